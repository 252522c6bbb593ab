"""The queue of waiting requests, in order of admission."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from space_router.engine.errors import QueueFull
from space_router.engine.request.request_state import Phase, RequestState

MAX_STALE = 64  # stale heap entries that are kept, in addition to as many as requests wait


class TenantQueue:
    """Requests of one key, in order of admission.

    The request with the smallest `due` time goes first: its arrival plus `ageing` seconds per priority level. Requests
    whose deadlines are near go before it, by priority and earliest deadline, unless they are due more than `patience`
    seconds after it; so a steady flow of near deadlines cannot starve the others.
    """

    def __init__(self, key: str, *, patience: float) -> None:
        self.key = key
        self._patience = patience
        self.finish = 0.0  # finish tag: tokens served, on the virtual clock of all keys (see RequestQueue)
        self.turn = 0  # number of its current heap entry in RequestQueue; entries with other numbers are stale
        self._waiting: dict[RequestState, float] = {}  # -> due
        self._by_due: list[tuple[float, int, RequestState]] = []
        self._coming: list[tuple[float, int, RequestState]] = []  # by the time from which their deadlines are near
        self._near: list[tuple[int, float, int, RequestState]] = []  # by priority and deadline

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: RequestState) -> bool:
        return live in self._waiting

    def add(self, live: RequestState, due: float) -> None:
        self._waiting[live] = due
        heapq.heappush(self._by_due, (due, live.age, live))
        if live.near_at < math.inf:
            heapq.heappush(self._coming, (live.near_at, live.age, live))

    def remove(self, live: RequestState) -> None:
        """Remove a request; no effect if it is not here."""
        self._waiting.pop(live, None)
        most = 2 * len(self._waiting) + MAX_STALE
        # Stale entries would keep their requests' prompts in memory until they reach the top of the heap.
        heaps: tuple[list[Any], ...] = (self._by_due, self._coming, self._near)
        for heap in heaps:
            if len(heap) > most:
                heap[:] = [entry for entry in heap if entry[-1] in self._waiting]
                heapq.heapify(heap)

    @property
    def due(self) -> float:
        """Due time of the first request; infinity if empty."""
        while self._by_due and self._by_due[0][-1] not in self._waiting:
            heapq.heappop(self._by_due)
        return self._by_due[0][0] if self._by_due else math.inf

    def head(self, now: float, latest_due: float) -> RequestState | None:
        """Return the next request that is due by `latest_due`, or None."""
        while self._coming and self._coming[0][0] <= now:
            live = heapq.heappop(self._coming)[-1]
            if live in self._waiting:
                heapq.heappush(self._near, (live.request.priority, live.deadline_at, live.age, live))
        while self._near and self._near[0][-1] not in self._waiting:
            heapq.heappop(self._near)
        if self._near and self._waiting[self._near[0][-1]] <= min(latest_due, self.due + self._patience):
            return self._near[0][-1]
        return self._by_due[0][-1] if self.due <= latest_due else None


SECONDS_WITHOUT_EXPERIENCE = 1.0
MAX_RETRY_AFTER = 60.0
AGEING_SECONDS = 30.0
ANSWER_WITHOUT_EXPERIENCE = 128.0  # tokens
MIN_GAPS = 8  # admissions measured before the bound on seconds holds
MIN_WAITING = 2  # requests that may wait however slow the last ones were; while so many wait, the speed is measured
EXPECTED_SHARE = 0.75  # of the longest wait, which a new request may be expected to wait: often it is more in the end
SPEED_WEIGHT = 0.95  # decay per admission of the sums from which the tokens per second are known
LOOK_SECONDS = 1.0  # between requests of which the priority is read though they seem to come too late
SHARED_SECONDS = 10.0  # after a refusal, in which the key that was refused counts among those that share the queue


@dataclass
class WaitingLevel:
    """The waiting requests of one key and priority."""

    number: int = 0
    charges: float = 0.0  # tokens that the key is expected to be charged

    def add(self, charge: float, number: int = 1) -> None:
        self.charges += charge
        self.number += number


class RequestQueue:
    """A bounded queue with ageing priorities, and fairness among API keys.

    Between levels: a request's level is its priority, lowest number first. It gains one level per `ageing` seconds of
    waiting, up to the most urgent priority that is waiting. Only that level is served, and every request reaches it.

    Within a level, between keys: start-time fair queueing. The key that was served the fewest tokens goes next, on a
    virtual clock that stands at the start tag of the last request served, so an idle key earns no credit. At its first
    admission a request is charged for the prompt ids to compute and an output of average length; when it ends, the
    charge is corrected to the actual counts. With forced drafts the rows of the decode steps are charged. Requests
    without a key share one.

    Within a key: the earliest arrival plus `ageing` seconds per level. Requests whose deadline is near go before, the
    earliest deadline first, if they arrived less than `ageing` seconds after the head.

    The bounds are shared by the keys where they keep one out: while a key that has less than its share was refused in
    the last SHARED_SECONDS, no key may have more than its share waiting. So keys that ask often leave places to others.

    A request that was admitted before (preempted, or its worker was lost) keeps its age and goes to the front of its
    level. Parked requests count as waiting but are not in the order. Every operation is O(log n), but that a
    refusal counts the keys, and a bound on seconds their priorities for every new request.
    """

    def __init__(
        self,
        max_waiting: int,
        *,
        ageing: float = AGEING_SECONDS,
        max_tokens: float = math.inf,
        max_seconds: float = math.inf,
    ) -> None:
        """`max_waiting`: requests; `ageing`: seconds of waiting per level; `max_tokens`: waiting prompt tokens.

        `max_seconds`: longest wait; a new request that is expected to wait more than EXPECTED_SHARE of it is refused.
        """
        self.max_waiting = max_waiting
        self.max_tokens = max_tokens
        self.max_seconds = max_seconds
        self.num_tokens = 0  # prompt tokens of the waiting requests
        self._ageing = ageing
        self._waiting: dict[RequestState, float] = {}  # -> tokens that its key will be charged, as far as known
        self._num_of = Counter[str]()  # waiting requests by key
        self._tokens_of = Counter[str]()  # waiting prompt tokens by key
        self._levels_of: dict[str, dict[int, WaitingLevel]] = {}  # the waiting requests by key and priority
        self._last_look = -math.inf  # when a request was let past whose priority was not known
        self._most_urgent = 0  # priority of the most urgent request that ever came
        self._refused: dict[str, float] = {}  # keys that had less than their share -> when last; the latest at the end
        self._now = -math.inf  # latest known time
        self._priorities: Counter[int] = Counter()  # of the requests in the order
        self._by_priority: list[int] = []  # heap of the priorities in the counter; may have stale ones
        self._tenants: dict[str, TenantQueue] = {}
        self._returning = TenantQueue("returning", patience=ageing)  # requests admitted before, of all keys
        self._ready: list[tuple[float, int, TenantQueue]] = []  # start tag, turn: tenants whose head may be due
        self._later: list[tuple[float, int, TenantQueue]] = []  # due, turn: tenants whose head was not due when checked
        self._num_turns = 0
        self._clock = 0.0  # virtual clock in tokens: start tag of the last request served
        self._answer = ANSWER_WITHOUT_EXPERIENCE  # tokens, moving average
        self._seconds_per_request = SECONDS_WITHOUT_EXPERIENCE
        self._num_gaps = 0  # measured between two admissions
        self._last_admission: float | None = None
        self._last_charge = 0.0  # tokens of the last admission, as expected while it waited
        self._admitted_tokens = self._admitted_seconds = 0.0  # decayed sums over the same gaps

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: RequestState) -> bool:
        return live in self._waiting

    def push(self, live: RequestState, *, parked: bool = False) -> None:
        """Add a request. The bounds are not checked here; see `overfull`."""
        charge = self._waiting[live] = live.num_prompt + self._expected_charge(live)
        self._levels_of.setdefault(live.request.key, {}).setdefault(live.request.priority, WaitingLevel()).add(charge)
        self._most_urgent = min(self._most_urgent, live.request.priority)
        self.num_tokens += live.num_prompt
        self._num_of[live.request.key] += 1
        self._tokens_of[live.request.key] += live.num_prompt
        live.phase = Phase.PARKED
        if not parked:
            self.unpark(live)

    def park(self, live: RequestState) -> None:
        self._leave_order(live)
        live.phase = Phase.PARKED

    def unpark(self, live: RequestState) -> None:
        if live.phase is not Phase.PARKED:
            return
        live.phase = Phase.QUEUED
        priority = live.request.priority
        self._now = max(self._now, live.submitted)
        if priority not in self._priorities:
            heapq.heappush(self._by_priority, priority)
        self._priorities[priority] += 1
        tenant = self._tenant_of(live)
        due = live.submitted + priority * self._ageing
        goes_first = due < tenant.due
        tenant.add(live, due)
        if goes_first:
            self._schedule_tenant(tenant)

    def head(self, now: float | None = None) -> RequestState | None:
        """Return the next request to admit, or None.

        `now`: seconds on the clock of the arrivals; None uses the latest known time.
        """
        if now is not None:
            self._now = max(self._now, now)
        while self._by_priority and self._by_priority[0] not in self._priorities:
            heapq.heappop(self._by_priority)
        if not self._by_priority:
            return None
        latest_due = self._now + self._by_priority[0] * self._ageing  # of the most urgent priority in the order
        while self._later and self._later[0][0] <= latest_due:
            _, turn, tenant = heapq.heappop(self._later)
            if turn == tenant.turn:
                self._schedule_tenant(tenant)
        while self._ready:
            _, turn, tenant = self._ready[0]
            if turn == tenant.turn and (live := tenant.head(self._now, latest_due)) is not None:
                return live
            heapq.heappop(self._ready)
            if turn == tenant.turn and len(tenant):
                heapq.heappush(self._later, (tenant.due, turn, tenant))
        return None

    def remove(self, live: RequestState) -> None:
        """Remove a request; no effect if it does not wait here."""
        if live in self._waiting:
            self._leave_order(live)
            self._levels_of[live.request.key][live.request.priority].add(-self._waiting.pop(live), -1)
            if not self._levels_of[live.request.key][live.request.priority].number:
                del self._levels_of[live.request.key][live.request.priority]
            self.num_tokens -= live.num_prompt
            self._num_of[live.request.key] -= 1
            self._tokens_of[live.request.key] -= live.num_prompt
            if not self._num_of[live.request.key]:
                del self._num_of[live.request.key], self._tokens_of[live.request.key]
                del self._levels_of[live.request.key]

    def admitted(self, live: RequestState, now: float, num_prefill: int = 0) -> None:
        """Remove a request that goes to a worker, and charge its key.

        `num_prefill`: prompt ids to compute; `now`: seconds, from which the queue's speed is estimated.
        """
        expected = self._waiting.get(live, 0.0)
        self.remove(live)
        if live.num_charged is None:
            tenant = self._tenant_of(live)
            live.num_charged = num_prefill + self._expected_charge(live)
            self._clock = tenant.finish = max(self._clock, tenant.finish)
            self._charge(tenant, live.num_charged)
        if self._last_admission is not None:
            self._seconds_per_request += 0.1 * (now - self._last_admission - self._seconds_per_request)
            self._num_gaps += 1
            self._admitted_tokens = SPEED_WEIGHT * self._admitted_tokens + self._last_charge
            self._admitted_seconds = SPEED_WEIGHT * self._admitted_seconds + now - self._last_admission
        self._last_admission = now if self._waiting else None  # time with an empty queue is not waiting time
        self._last_charge = expected

    def ended(self, live: RequestState) -> None:
        """Correct the charge of an ended request's key to the tokens it really used."""
        if live.num_charged is not None:
            if live.request.pooling is None:
                self._answer += 0.05 * (live.num_generated - self._answer)
            tenant = self._tenant_of_key(live.request.key)
            used = live.request.charge(live.num_generated, live.statistics.num_steps)
            self._charge(tenant, live.num_prompt - live.statistics.num_cached + used - live.num_charged)
            if not len(tenant) and tenant.finish <= self._clock:
                del self._tenants[tenant.key]  # a new queue would get the same start tag

    def expected_answer(self, live: RequestState) -> float:
        """Return the expected output tokens of a request: the average of others, within its own bounds."""
        return min(max(self._answer, live.least_left), live.max_tokens)

    def _expected_charge(self, live: RequestState) -> float:
        """Return the tokens that its key is charged for the expected answer."""
        answer = self.expected_answer(live)
        return live.request.charge(answer, answer / (live.request.num_forced_drafts + 1))

    def expected_wait(self, key: str, priority: int, own: float = 0.0) -> float:
        """Return the seconds until a request of this key and priority is served that came last. `own`: its charge, if
        it waits already.

        What is more urgent goes first, and what is less urgent does not count unless it can reach this level within the
        longest wait. Keys take turns: while the key's own requests are served, each other key that waits at this level
        is served as many tokens, with requests that come later.
        """
        if not self._admitted_tokens:
            return 0.0
        latest = priority + self.max_seconds / self._ageing
        charges, before, num_keys = -own, 0.0, 1
        for other, levels in self._levels_of.items():
            if other == key:
                charges += sum(level.charges for at, level in levels.items() if at <= latest)
            else:
                before += sum(level.charges for at, level in levels.items() if at < priority)
                num_keys += any(priority <= at <= latest for at in levels)
        if (tenant := self._tenants.get(key)) is not None:
            charges += max(0.0, tenant.finish - self._clock)
        return (charges * num_keys + before) * self._admitted_seconds / self._admitted_tokens

    def overfull(self, live: RequestState, now: float) -> QueueFull | None:
        """Return the error for the request that was pushed last if more waits than allowed; None otherwise.

        A single request may be of any length. `now`: seconds on the clock of the arrivals.
        """
        key = live.request.key
        if len(self) > self.max_waiting or (self.num_tokens > self.max_tokens and len(self) > 1):
            return self._refuse(key, now, self._num_of[key] - 1)
        if over_share := self._over_share(key, now, self._num_of[key]):
            return over_share
        return self._too_late(key, live.request.priority, len(self) - 1, self._waiting[live])

    def refusal(self, key: str, now: float) -> QueueFull | None:
        """Return the error for a new request that would have to wait; None if it may wait or may not have to.

        Its priority is not known yet. The most urgent that ever came is assumed, and now and then one is let past that
        is expected to wait too long, since it may be more urgent still; `overfull` knows.
        """
        if not self._waiting:
            return None
        if len(self) >= self.max_waiting or self.num_tokens >= self.max_tokens:
            return self._refuse(key, now, self._num_of[key])
        if over_share := self._over_share(key, now, self._num_of[key] + 1):
            return over_share
        if (late := self._too_late(key, self._most_urgent, len(self))) is None or now - self._last_look >= LOOK_SECONDS:
            self._last_look = now
            return None
        return late

    def _forget_refusals(self, now: float) -> None:
        while self._refused and next(iter(self._refused.values())) < now - SHARED_SECONDS:
            del self._refused[next(iter(self._refused))]

    def _share(self, key: str) -> tuple[int, float]:
        """Return how many requests and prompt tokens of a key may wait where the queue is shared."""
        num_keys = len({key, *self._num_of, *self._refused})
        return max(1, self.max_waiting // num_keys), self.max_tokens / num_keys

    def _over_share(self, key: str, now: float, number: int) -> QueueFull | None:
        """Return the error for a key that has `number` requests, more than its share, while others are kept out."""
        self._forget_refusals(now)
        if not self._refused.keys() - {key}:
            return None
        num_most, most_tokens = self._share(key)
        if number <= num_most and (number == 1 or self._tokens_of[key] <= most_tokens):
            return None
        waiting = f"{self._num_of[key]} prompts and choices of this API key, with {self._tokens_of[key]} prompt tokens,"
        return QueueFull(waiting, f"{num_most} of each key while others are refused", retry_after=self.retry_after)

    def _too_late(self, key: str, priority: int, num_before: int, own: float = 0.0) -> QueueFull | None:
        """Return the error for a request that is expected to wait too long.

        `num_before`: requests that wait without it; `own`: its charge, if it waits already.
        """
        if self.max_seconds == math.inf or self._num_gaps < MIN_GAPS or num_before < MIN_WAITING:
            return None
        seconds, most = self.expected_wait(key, priority, own), EXPECTED_SHARE * self.max_seconds
        if seconds <= most:
            return None
        retry_after = max(1.0, min(MAX_RETRY_AFTER, seconds - most))
        waiting = f"{len(self._waiting)} prompts and choices of requests"
        return QueueFull(waiting, f"what begins within {self.max_seconds:g} s", retry_after=retry_after)

    def _refuse(self, key: str, now: float, number: int) -> QueueFull:
        """Return the error for a further request of a key, which is remembered if its `number` is below its share."""
        self._forget_refusals(now)
        num_most, most_tokens = self._share(key)
        if number < num_most and self._tokens_of[key] < most_tokens:
            self._refused.pop(key, None)
            self._refused[key] = now
        return self.full()

    @property
    def retry_after(self) -> float:
        """Seconds in which what waits now leaves the queue, about."""
        return max(1.0, min(MAX_RETRY_AFTER, len(self._waiting) * self._seconds_per_request))

    def full(self) -> QueueFull:
        """Return the error for a request that finds no room, with an estimated delay to retry after."""
        if len(self._waiting) < self.max_waiting:
            return QueueFull(f"{self.num_tokens} prompt tokens", f"{self.max_tokens:.0f}", retry_after=self.retry_after)
        waiting = f"{len(self._waiting)} prompts and choices of requests"
        return QueueFull(waiting, f"{self.max_waiting}", retry_after=self.retry_after)

    def _tenant_of(self, live: RequestState) -> TenantQueue:
        return self._returning if live.num_charged is not None else self._tenant_of_key(live.request.key)

    def _tenant_of_key(self, key: str) -> TenantQueue:
        if key not in self._tenants:
            self._tenants[key] = TenantQueue(key, patience=self._ageing)
        return self._tenants[key]

    def _schedule_tenant(self, tenant: TenantQueue) -> None:
        """Order a tenant among the others by its start tag, which is never before the virtual clock."""
        self._num_turns += 1
        tenant.turn = self._num_turns
        tag = -math.inf if tenant is self._returning else max(self._clock, tenant.finish)
        heapq.heappush(self._ready, (tag, tenant.turn, tenant))
        most = 2 * len(self._tenants) + 64
        for heap in (self._ready, self._later):
            if len(heap) > most:
                heap[:] = [entry for entry in heap if entry[1] == entry[2].turn]
                heapq.heapify(heap)

    def _charge(self, tenant: TenantQueue, num_tokens: float) -> None:
        tenant.finish += num_tokens
        if len(tenant):
            self._schedule_tenant(tenant)

    def _leave_order(self, live: RequestState) -> None:
        tenant, priority = self._tenant_of(live), live.request.priority
        if live in tenant:
            tenant.remove(live)
            self._priorities[priority] -= 1
            if not self._priorities[priority]:
                del self._priorities[priority]
