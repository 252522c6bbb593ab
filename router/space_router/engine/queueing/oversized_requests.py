"""Requests that fit no worker that is there, while a larger one is away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.scheduler import Scheduler

ABSENCE = 600.0  # seconds that they wait for such a worker: one with a large model takes minutes to come back


class OversizedRequests:
    """They stand aside, so that those behind them go on, and take their places again once others are there."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._since: dict[RequestState, float] = {}  # seconds on the engine's clock, the first first
        self._there: tuple[list[Scheduler], bool] = ([], False)  # when last looked at

    def __contains__(self, live: RequestState) -> bool:
        return live in self._since

    def takes(self, live: RequestState, schedulers: Sequence[Scheduler], now: float) -> bool:
        """Set a waiting request aside if it fits none of these that take requests at all."""
        serving = [scheduler for scheduler in schedulers if not scheduler.closing]
        if not serving or any(scheduler.fits(live) for scheduler in serving):
            return False
        self._queue.park(live)
        self._since.setdefault(live, now)
        return True

    def review(self, schedulers: Sequence[Scheduler], *, complete: bool) -> None:
        """Let all back where other workers are there than before, or none is missing any more."""
        there = (list(schedulers), complete)
        if there != self._there:
            self._there = there
            self.let_back()

    def let_back(self) -> None:
        """All take their places in the order: whoever still does not fit is set aside again."""
        aside, self._since = self._since, {}
        for live in aside:
            if live in self._queue and not live.is_suspect and not live.lagging:
                self._queue.unpark(live)

    def overdue(self, schedulers: Sequence[Scheduler], now: float) -> Iterator[RequestState]:
        """Those that have waited in vain for as long as anybody may, and fit none of all that are there."""
        while self._since and now - next(iter(self._since.values())) >= ABSENCE:
            live = next(iter(self._since))
            del self._since[live]
            if live in self._queue and any(scheduler.fits(live) for scheduler in schedulers):
                self._since[live] = now
            elif live in self._queue:
                yield live
