"""Admission: which waiting requests go to which worker, wait for a shared prefix, or cannot be done in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from space_proto import worker_pb2

from space_router.engine.errors import CacheTooSmall, DeadlineExceeded, EngineError, PromptTooLong, RequestFailed
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Placement, Scheduler

PAST_WEIGHT = 0.95  # decay of the averages per step
SAFETY_FACTOR = 0.5  # minimum times are this share of the measured ones, so that a faster phase is not ruled out
RECENT = 32  # steps of which the fastest gives the minimum time
MIN_STEPS = 5  # measured steps before a minimum time is claimed
HALF_LIFE = 30.0  # seconds without a step of the kind in which its minimum time halves


class Rate:
    """Seconds per id in steps of one kind: the average and the recent minimum; 0 while unknown."""

    def __init__(self) -> None:
        self._seconds = self._num_ids = 0.0  # decayed sums, so a step is weighted by its ids
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds per id
        self._learnt_at = 0.0

    def learn(self, seconds: float, num_ids: float, now: float, *, full: float = 0.0) -> None:
        """Add a step that took `seconds` for `num_ids` ids.

        `full`: maximum ids of a step. A small step takes mostly fixed time, so as a minimum its time is divided by
        `full`: a full step takes at least as long.
        """
        self._seconds = PAST_WEIGHT * self._seconds + seconds
        self._num_ids = PAST_WEIGHT * self._num_ids + num_ids
        self._recent.append(seconds / max(num_ids, full))
        self._learnt_at = now

    @property
    def average(self) -> float:
        return self._seconds / self._num_ids if self._num_ids else 0.0

    def least(self, now: float) -> float:
        """Return the minimum seconds per id.

        It decays with time: requests rejected because of it run no steps that could correct it.
        """
        if len(self._recent) < MIN_STEPS:
            return 0.0
        return min(self._recent) * math.exp2((self._learnt_at - now) / HALF_LIFE)


class ThroughputEstimator:
    """Estimates the seconds that prompts and outputs take."""

    def __init__(self, max_prefill_rows: int) -> None:
        """`max_prefill_rows`: maximum prompt ids per step."""
        self.prompts = Rate()
        self.tokens = Rate()  # per output token of one sequence
        self._max_prefill_rows = max_prefill_rows

    def learn(self, report: worker_pb2.StepReport, decoded: Sequence[int], now: float) -> None:
        """Add a step. `decoded`: tokens of each decoding sequence; `now`: seconds on the engine's clock."""
        if not report.stepped:
            return
        stats, seconds = report.stats, step_seconds(report.stats)
        if stats.prefill_rows > stats.chain_rows + stats.mask_rows:
            num_rows = stats.prefill_rows + stats.chain_rows + stats.mask_rows
            self.prompts.learn(seconds, num_rows, now, full=self._max_prefill_rows)
        elif given := [number for number in decoded if number]:  # a failed sequence has no tokens
            self.tokens.learn(seconds, sum(given) / len(given), now)

    def seconds(self, num_prompt_ids: int, num_tokens: float) -> float:
        """Return the expected seconds to prefill `num_prompt_ids` and generate `num_tokens`."""
        return num_prompt_ids * self.prompts.average + num_tokens * self.tokens.average

    def least_seconds(self, num_prompt_ids: int, num_tokens: int, now: float) -> float:
        """Return the minimum seconds for the same work."""
        return SAFETY_FACTOR * (num_prompt_ids * self.prompts.least(now) + num_tokens * self.tokens.least(now))


def step_seconds(stats: worker_pb2.StepStats) -> float:
    return stats.forward_seconds + stats.sample_seconds + stats.draft_seconds + stats.host_seconds


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


def best_placement(live: RequestState, schedulers: Iterable[Scheduler]) -> tuple[Scheduler, Placement] | None:
    """Return the cheapest worker with room, among equals the one with most free blocks; None if none has room.

    The cost, in prompt ids: the request's own prefill, the prefill queued before it, and the running sequences.
    """

    def cost(placed: tuple[Scheduler, Placement]) -> tuple[int, int]:
        scheduler, placement = placed
        num_own = len(live.ids) - scheduler.num_ids(placement)
        running = IDS_PER_SEQUENCE * scheduler.num_running
        return num_own + scheduler.num_prefill_ahead + running, -scheduler.pool.num_available

    placed = [(scheduler, placement) for scheduler in schedulers if (placement := scheduler.placement(live))]
    return min(placed, key=cost, default=None)


@dataclass(frozen=True)
class LoadFigures:
    """How busy the engine is now."""

    num_queued: int
    num_running: int
    num_waiting_tokens: int  # of prompts and texts that wait
    block_size: int  # 0: no worker has been up
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    states_free: int
    states_held: int
    states_cached: int
    host_blocks_free: int
    host_blocks_cached: int
    num_workers_up: int
    draining: bool

    @property
    def num_blocks(self) -> int:
        """Blocks of the key/value caches of all workers."""
        return self.blocks_free + self.blocks_held + self.blocks_cached


def resolve_max_tokens(request: ValidRequest, facts: WorkerModelFacts, max_prompt_tokens: int | None = None) -> int:
    """Return `max_tokens`, or if none was given, as many as fit. Raises PromptTooLong or CacheTooSmall."""
    num_prompt, max_tokens = len(request.prompt_ids), request.max_tokens
    if max_prompt_tokens is not None and num_prompt > max_prompt_tokens:
        raise PromptTooLong(num_prompt=num_prompt, max_tokens=None, window=max_prompt_tokens, is_of_prompts=True)
    least = 1 if max_tokens is None else max_tokens
    if num_prompt + least > facts.window:
        raise PromptTooLong(num_prompt=num_prompt, max_tokens=max_tokens, window=facts.window)
    if num_prompt + least + 1 > facts.num_slots:
        raise CacheTooSmall(num_prompt=num_prompt, max_tokens=max_tokens, num_slots=facts.num_slots)
    if max_tokens is not None:
        return max_tokens
    return min(facts.window - num_prompt, facts.num_slots - num_prompt - 1)


def should_follow(leader: RequestState, follower: RequestState, facts: WorkerModelFacts) -> bool:
    """Whether the leader's prompt has full blocks to share that are not computed yet."""
    shares = leader.request.share_prefix and follower.request.share_prefix and facts.shares_prefixes
    return shares and not leader.num_generated and leader.num_prompt > facts.block_size


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
