"""Admission: which waiting requests go to which worker, which are rejected, and which wait for a shared prefix."""

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

MAX_WAITS = 4  # times that one request waits for another to compute a shared prefix


@dataclass(frozen=True)
class Admitted:
    """A request was sent to a worker."""

    live: RequestState
    num_cached: int  # prompt ids found in the worker's prefix cache


@dataclass(frozen=True)
class Rejected:
    """A request must end now."""

    live: RequestState
    error: EngineError


class QueueAdmission:
    """Admits from the head of the queue while there is room, strictly in the queue's order.

    Only a head that fits none of the present workers is set aside (see `OversizedRequests`).

    A request whose prefix is being computed by a running request is parked as its follower and unparked once the shared
    blocks are computed. This does not delay it, because workers compute prompts in order of arrival; and it happens
    at most `MAX_WAITS` times.
    """

    def __init__(self, queue: RequestQueue, throughput: ThroughputEstimator) -> None:
        self._queue = queue
        self._throughput = throughput
        self.oversized = OversizedRequests(queue)

    def admit(self, schedulers: Sequence[Scheduler], now: float, *, complete: bool) -> Iterator[Admitted | Rejected]:
        """Yield all admissions and rejections that are possible now.

        The caller must remove a rejected request from the queue before it asks for the next item. `complete`: no
        worker is missing, so a request that fits none of them can never run.
        """
        while schedulers and (live := self._queue.head(now)) is not None:
            if self._follows(live, schedulers):
                continue
            decision = self.place(live, schedulers, now, complete=complete)
            if decision is None and self.oversized.set_aside(live, schedulers, now):
                continue
            if decision is None:
                for scheduler in schedulers:
                    scheduler.preempt_stalled()
                return
            yield decision

    def place(
        self, live: RequestState, schedulers: Sequence[Scheduler], now: float, *, complete: bool
    ) -> Admitted | Rejected | None:
        """Admit one waiting request to the best worker, or reject it; None if it must go on waiting."""
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
        """Return the error for a request that has not begun and cannot meet its deadline; else None.

        `num_prefill`: prompt ids to compute; `now`: seconds on the engine's clock.
        """
        if live.request.deadline is None or live.num_generated:
            return None
        least = self._throughput.least_seconds(num_prefill, live.least_left, now)
        return None if now + least <= live.deadline_at else DeadlineExceeded(live.request.deadline, least=least)

    def _follows(self, live: RequestState, schedulers: Sequence[Scheduler]) -> bool:
        """Park a request behind the one that is computing its prefix; False if there is none."""
        if live.num_waits >= MAX_WAITS:
            return False
        asked = (scheduler.pending_prefixes.find(live) for scheduler in schedulers if not scheduler.is_blocked(live))
        prefixes = [prefix for prefix in asked if prefix is not None]
        if not prefixes:
            return False
        prefix = max(prefixes, key=lambda p: p.num_ids)
        live.num_waits += 1
        live.awaited_ids = prefix.num_ids
        prefix.leader.followers.append(live)
        self._queue.park(live)
        return True


def too_large() -> RequestFailed:
    """Return the error for a request that fits no worker when none is missing."""
    return RequestFailed("The workers came back with less cache, or a shorter window, than this request needs.")
