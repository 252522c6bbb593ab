"""Requests that wait, in the order in which they will be admitted."""

from __future__ import annotations

import heapq
import math
from collections import Counter

from space_router.engine.errors import QueueFull
from space_router.engine.queueing.tenant_queue import TenantQueue
from space_router.engine.request.request_state import Phase, RequestState

SECONDS_WITHOUT_EXPERIENCE = 1.0
MAX_RETRY_AFTER = 60.0
AGEING_SECONDS = 30.0
ANSWER_WITHOUT_EXPERIENCE = 128.0  # tokens


class RequestQueue:
    """A bounded queue with priorities that age, and fairness among keys.

    Level: a request's priority, the lowest number first; it gains one level per `ageing` seconds of waiting, up to the
    most urgent that anybody waiting asked for. So everybody reaches the first level, and only that is served.

    Within the level, start-time fair queueing: the key goes next that was served the fewest tokens, on a clock that
    stands where the last one served began; a key that comes back after a pause gets no credit for it. A request is
    charged, at its first admission, for the prompt ids to be computed and for an answer of average length; when it has
    ended, for what it really got. Requests without a key share one.

    Within a key, the oldest by arrival plus `ageing` seconds per level; before them the earliest of near deadlines, of
    requests that came less than `ageing` seconds after it.

    A request that was admitted before (preempted, or its worker died) keeps its age and stands in front of the level.
    Parked requests count as waiting, but are not in the order until they are unparked. Every move costs O(log n).
    """

    def __init__(self, max_waiting: int, *, ageing: float = AGEING_SECONDS, max_tokens: float = math.inf) -> None:
        """`ageing`: seconds of waiting per level; `max_tokens`: prompt tokens that may wait."""
        self.max_waiting = max_waiting
        self.max_tokens = max_tokens
        self._num_tokens = 0  # of the prompts of those that wait
        self._ageing = ageing
        self._waiting: set[RequestState] = set()
        self._now = -math.inf  # the latest time known
        self._priorities: Counter[int] = Counter()  # of those in the order
        self._by_priority: list[int] = []  # a heap of every priority in the counter, and of some that were
        self._lines: dict[str, TenantQueue] = {}
        self._returning = TenantQueue("returning", patience=ageing)  # those that were admitted before, of all keys
        self._ready: list[tuple[float, int, TenantQueue]] = []  # start tag, turn: lines whose first may be due
        self._later: list[
            tuple[float, int, TenantQueue]
        ] = []  # due, turn: lines whose first was not due when last looked at
        self._num_turns = 0
        self._clock = 0.0  # tokens: where the last request served began
        self._answer = ANSWER_WITHOUT_EXPERIENCE  # tokens, moving average
        self._seconds_per_request = SECONDS_WITHOUT_EXPERIENCE
        self._last_admission: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: RequestState) -> bool:
        return live in self._waiting

    def push(self, live: RequestState, *, parked: bool = False) -> None:
        """Let a request wait; bounds are `check`ed by the caller, at the door only."""
        self._waiting.add(live)
        self._num_tokens += live.num_prompt
        live.phase = Phase.PARKED
        if not parked:
            self.unpark(live)

    def park(self, live: RequestState) -> None:
        """Take a waiting request out of the order, until it is unparked."""
        self._step_out(live)
        live.phase = Phase.PARKED

    def unpark(self, live: RequestState) -> None:
        """Give a waiting request its place in the order."""
        if live.phase is not Phase.PARKED:
            return
        live.phase = Phase.QUEUED
        priority = live.request.priority
        self._now = max(self._now, live.submitted)
        if priority not in self._priorities:
            heapq.heappush(self._by_priority, priority)
        self._priorities[priority] += 1
        line = self._line(live)
        due = live.submitted + priority * self._ageing
        goes_first = due < line.due
        line.add(live, due)
        if goes_first:
            self._give_turn(line)

    def head(self, now: float | None = None) -> RequestState | None:
        """The next to admit; None where nobody is ready. `now`: seconds on the clock of the arrivals; None: the latest
        that is known.
        """
        if now is not None:
            self._now = max(self._now, now)
        top = self._top_priority()
        if top is None:
            return None
        latest_due = self._now + top * self._ageing
        while self._later and self._later[0][0] <= latest_due:
            _, turn, line = heapq.heappop(self._later)
            if turn == line.turn:
                self._give_turn(line)
        while self._ready:
            _, turn, line = self._ready[0]
            if turn == line.turn and (live := line.head(self._now, latest_due)) is not None:
                return live
            heapq.heappop(self._ready)
            if turn == line.turn and len(line):
                heapq.heappush(self._later, (line.due, turn, line))
        return None

    def remove(self, live: RequestState) -> None:
        """A request waits no longer; nothing happens if it did not."""
        if live in self._waiting:
            self._step_out(live)
            self._waiting.remove(live)
            self._num_tokens -= live.num_prompt

    def admitted(self, live: RequestState, now: float, num_prefill: int = 0) -> None:
        """Remove a request because it goes to a worker, to compute `num_prefill` ids of its prompt there; `now` in
        seconds teaches how fast the queue moves.
        """
        self.remove(live)
        if live.num_charged is None:
            line = self._line(live)
            live.num_charged = num_prefill + self.expected_answer(live)
            self._clock = line.finish = max(self._clock, line.finish)
            self._charge(line, live.num_charged)
        if self._last_admission is not None:
            self._seconds_per_request += 0.1 * (now - self._last_admission - self._seconds_per_request)
        self._last_admission = now if self._waiting else None  # how long nobody came says nothing about the next wait

    def ended(self, live: RequestState) -> None:
        """A request is over: its key is charged for what it got instead of what was expected."""
        if live.num_charged is not None:
            self._answer += 0.05 * (live.num_generated - self._answer)
            line = self._line_of(live.request.key)
            self._charge(line, live.num_prompt - live.statistics.num_cached + live.num_generated - live.num_charged)
            if not len(line) and line.finish <= self._clock:
                del self._lines[line.key]  # a new one would stand at the same place

    def expected_answer(self, live: RequestState) -> float:
        """Tokens that a request which has not begun will probably get: as many as others got, within its own bounds."""
        return min(max(self._answer, live.least_left), live.max_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._num_tokens

    @property
    def overfull(self) -> bool:
        """More wait than may. One request alone may be of any length."""
        return len(self) > self.max_waiting or (self._num_tokens > self.max_tokens and len(self) > 1)

    def refusal(self) -> QueueFull | None:
        """What anybody will hear who comes now and must wait; None: one more may wait, or might not have to."""
        full = len(self) >= self.max_waiting or self._num_tokens >= self.max_tokens
        return self.full() if full and self._waiting else None

    def full(self) -> QueueFull:
        """What to tell somebody for whom there is no room."""
        seconds = max(1.0, min(MAX_RETRY_AFTER, len(self._waiting) * self._seconds_per_request))
        if len(self._waiting) < self.max_waiting:
            return QueueFull(f"{self._num_tokens} prompt tokens", retry_after=seconds)
        return QueueFull(f"{len(self._waiting)} requests", retry_after=seconds)

    def _line(self, live: RequestState) -> TenantQueue:
        """Where a request stands."""
        return self._returning if live.num_charged is not None else self._line_of(live.request.key)

    def _line_of(self, key: str) -> TenantQueue:
        if key not in self._lines:
            self._lines[key] = TenantQueue(key, patience=self._ageing)
        return self._lines[key]

    def _give_turn(self, line: TenantQueue) -> None:
        """A line's place among the others: its start tag, which never lies before the clock."""
        self._num_turns += 1
        line.turn = self._num_turns
        tag = -math.inf if line is self._returning else max(self._clock, line.finish)
        heapq.heappush(self._ready, (tag, line.turn, line))
        most = 2 * len(self._lines) + 64
        for heap in (self._ready, self._later):
            if len(heap) > most:
                heap[:] = [entry for entry in heap if entry[1] == entry[2].turn]
                heapq.heapify(heap)

    def _charge(self, line: TenantQueue, num_tokens: float) -> None:
        line.finish += num_tokens
        if len(line):
            self._give_turn(line)

    def _step_out(self, live: RequestState) -> None:
        line, priority = self._line(live), live.request.priority
        if live in line:
            line.remove(live)
            self._priorities[priority] -= 1
            if not self._priorities[priority]:
                del self._priorities[priority]

    def _top_priority(self) -> int | None:
        """The most urgent that anybody in the order asked for."""
        while self._by_priority and self._by_priority[0] not in self._priorities:
            heapq.heappop(self._by_priority)
        return self._by_priority[0] if self._by_priority else None
