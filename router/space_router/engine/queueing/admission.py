"""Admission: which waiting requests go to which worker, which are rejected, and which wait for a shared prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from space_router.engine.errors import CacheTooSmall, DeadlineExceeded, EngineError, PromptTooLong, RequestFailed
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.pages import PagePool
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.queueing.throughput_estimator import ThroughputEstimator
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduler import Placement, Scheduler

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


IDS_PER_SEQUENCE = 32
"""Prompt ids whose prefill costs about as much as one more concurrent sequence on the worker.

A cached prefix of 512 ids outweighs 16 more sequences. On a GPU, where a step of 64 sequences takes little longer than
one of 8, a sequence costs less; on a CPU, where step time grows with each, more. This value is a compromise: a popular
system prompt does not fill one worker while others idle, and a chat does not leave the worker that has its history for
a slightly less busy one.
"""


def cost(live: RequestState, scheduler: Scheduler, placement: Placement) -> int:
    """Return the cost of running a request there, in prompt ids: its own prefill, the prefill queued before it, and
    the running sequences.
    """
    num_own = len(live.ids) - scheduler.num_ids(placement)
    return num_own + scheduler.num_prefill_ahead + IDS_PER_SEQUENCE * scheduler.num_running


def best_placement(live: RequestState, schedulers: Iterable[Scheduler]) -> tuple[Scheduler, Placement] | None:
    """Return the cheapest worker with room, among equals the one with most free blocks; None if none has room."""
    placed = [(scheduler, placement) for scheduler in schedulers if (placement := scheduler.placement(live))]
    return min(placed, key=lambda p: (cost(live, *p), -p[0].pool.num_available), default=None)


@dataclass(frozen=True)
class LoadFigures:
    """How busy the engine is now."""

    num_queued: int
    num_running: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    num_workers_up: int
    draining: bool

    @classmethod
    def of(cls, pools: Sequence[PagePool], *, num_queued: int, num_open: int, draining: bool) -> LoadFigures:
        """`pools`: of the workers that are up; `num_open`: requests that have not ended, including waiting ones."""
        return cls(
            num_queued=num_queued,
            num_running=num_open - num_queued,
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_held=sum(pool.num_held for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            num_workers_up=len(pools),
            draining=draining,
        )


def resolve_max_tokens(request: ValidRequest, facts: WorkerModelFacts) -> int:
    """Return `max_tokens`, or if none was given, as many as fit. Raises PromptTooLong or CacheTooSmall."""
    num_prompt, max_tokens = len(request.prompt_ids), request.max_tokens
    least = 1 if max_tokens is None else max_tokens
    if num_prompt + least > facts.window:
        raise PromptTooLong(num_prompt=num_prompt, max_tokens=max_tokens, window=facts.window)
    if num_prompt + least + 1 > facts.num_slots:
        raise CacheTooSmall(num_prompt=num_prompt, max_tokens=max_tokens, num_slots=facts.num_slots)
    if max_tokens is not None:
        return max_tokens
    return min(facts.window - num_prompt, facts.num_slots - num_prompt - 1)


def should_follow(leader: RequestState, follower: RequestState, block_size: int) -> bool:
    """Whether the leader's prompt has full blocks to share that are not computed yet."""
    shares = leader.request.share_prefix and follower.request.share_prefix
    return shares and not leader.num_generated and leader.num_prompt > block_size


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
