"""Requests that fit none of the present workers while a larger worker is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.scheduler import Scheduler

MAX_ABSENCE = 600.0  # seconds to wait for such a worker: with a large model it takes minutes to restart


class OversizedRequests:
    """Parks such requests so that those behind them can run; returns them to the queue when the workers change."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._since: dict[RequestState, float] = {}  # seconds on the engine's clock, earliest first
        self._last_seen: tuple[list[Scheduler], bool] = ([], False)  # arguments of the last `review`

    def __contains__(self, live: RequestState) -> bool:
        return live in self._since

    def set_aside(self, live: RequestState, schedulers: Sequence[Scheduler], now: float) -> bool:
        """Park a waiting request if it fits none of the workers that accept requests; return whether it was parked."""
        serving = [scheduler for scheduler in schedulers if not scheduler.closing]
        if not serving or any(scheduler.fits(live) for scheduler in serving):
            return False
        self._queue.park(live)
        self._since.setdefault(live, now)
        return True

    def review(self, schedulers: Sequence[Scheduler], *, complete: bool) -> None:
        """Return all requests to the queue if the workers have changed or none is missing any more."""
        seen = (list(schedulers), complete)
        if seen != self._last_seen:
            self._last_seen = seen
            self.return_all()

    def return_all(self) -> None:
        """Return all requests to the queue; those that still do not fit are set aside again."""
        aside, self._since = self._since, {}
        for live in aside:
            if live in self._queue and not live.is_suspect and not live.lagging:
                self._queue.unpark(live)

    def overdue(self, schedulers: Sequence[Scheduler], now: float) -> Iterator[RequestState]:
        """Yield the requests that have waited `MAX_ABSENCE` and fit none of the present workers."""
        while self._since and now - next(iter(self._since.values())) >= MAX_ABSENCE:
            live = next(iter(self._since))
            del self._since[live]
            if live in self._queue and any(scheduler.fits(live) for scheduler in schedulers):
                self._since[live] = now
            elif live in self._queue:
                yield live
