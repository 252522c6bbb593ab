"""From the queue to the workers: who goes next, who cannot go any more, and who had better wait a moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from space_router.engine.errors import DeadlineExceeded, EngineError, RequestFailed
from space_router.engine.queueing.oversized_requests import OversizedRequests
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.queueing.routing import best_placement
from space_router.engine.queueing.throughput_estimator import ThroughputEstimator
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.scheduler import Scheduler

MAX_WAITS = 4  # times one request lets others compute a prefix that it could share


@dataclass(frozen=True)
class Admitted:
    """A request has gone to a worker."""

    live: RequestState
    num_cached: int  # ids that need not be computed there


@dataclass(frozen=True)
class Rejected:
    """A request must end now."""

    live: RequestState
    error: EngineError


class QueueAdmission:
    """Admits from the head of the queue as long as there is room; nobody overtakes in the queue's order, but where the
    head fits only a worker that is not there.

    Whose prefix is being computed by a running request is parked as its follower, and comes back with the blocks to
    share as soon as they are there. Workers compute prompts in the order in which they come, so it would not have been
    first; and it waits so `MAX_WAITS` times at most.
    """

    def __init__(self, queue: RequestQueue, pace: ThroughputEstimator) -> None:
        self._queue = queue
        self._pace = pace
        self.oversized = OversizedRequests(queue)

    def admit(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Admitted | Rejected]:
        """All that can go now. Whoever is turned away must be out of the queue before the next is asked for.

        `complete`: no worker is missing, so that what fits none of them fits nowhere.
        """
        while schedulers and (live := self._queue.head(now)) is not None:
            if self._follows(live, schedulers):
                continue
            gone = self.place(live, schedulers, now, complete=complete)
            if gone is None and self.oversized.takes(live, schedulers, now):
                continue
            if gone is None:
                for scheduler in schedulers:
                    scheduler.preempt_stalled()
                return
            yield gone

    def place(
        self, live: RequestState, schedulers: Sequence[Scheduler], now: float, *, complete: bool
    ) -> Admitted | Rejected | None:
        """Where this request goes of those that wait; None: it goes on waiting."""
        best = best_placement(live, schedulers)
        if best is None:
            if unmeetable_deadline := self.unmeetable_deadline(live, 1, now):
                return Rejected(live, unmeetable_deadline)
            return Rejected(live, too_large()) if complete and not any(s.fits(live) for s in schedulers) else None
        scheduler, placement = best
        num_prefill = len(live.ids) - scheduler.num_ids(placement)
        if unmeetable_deadline := self.unmeetable_deadline(live, num_prefill, now):
            return Rejected(live, unmeetable_deadline)
        self._queue.admitted(live, now, num_prefill)
        sequence = scheduler.admit(live, placement)
        return Admitted(live, min(sequence.computed, live.num_prompt))

    def unmeetable_deadline(self, live: RequestState, num_prefill: int, now: float) -> DeadlineExceeded | None:
        """What to say to a request that cannot meet its deadline any more and has not begun; None to others."""
        if live.request.deadline is None or live.num_generated:
            return None
        least = self._pace.least_seconds(num_prefill, live.least_left, now)
        return None if now + least <= live.deadline_at else DeadlineExceeded(live.request.deadline, least=least)

    def _follows(self, live: RequestState, schedulers: Sequence[Scheduler]) -> bool:
        """Park a request behind the one that is computing its prefix, if there is one."""
        if live.num_waits >= MAX_WAITS:
            return False
        asked = (scheduler.pending_prefixes.to(live) for scheduler in schedulers if not scheduler.is_blocked(live))
        pending_prefixes = [promise for promise in asked if promise is not None]
        if not pending_prefixes:
            return False
        promise = max(pending_prefixes, key=lambda p: p.num_ids)
        live.num_waits += 1
        live.awaited_ids = promise.num_ids
        promise.leader.followers.append(live)
        self._queue.park(live)
        return True


def too_large() -> RequestFailed:
    """What to say to a request that fits no worker, and none is to come."""
    return RequestFailed("The workers came back with less cache, or a shorter window, than this request needs.")
