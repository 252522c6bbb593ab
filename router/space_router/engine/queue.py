"""Requests that wait, in the order in which they will be admitted."""

from __future__ import annotations

import heapq

from space_router.engine.errors import QueueFull
from space_router.engine.live_request import LiveRequest, Phase

SECONDS_WITHOUT_EXPERIENCE = 1.0
MAX_RETRY_AFTER = 60.0
MAX_STALE = 64  # entries of the heap that may be of requests that have left, besides as many as wait


class RequestQueue:
    """A bounded priority queue: the lowest priority number first, within one the oldest first.

    A request that was admitted before (preempted, or its worker died) keeps its age and so comes back in front.
    Parked requests count as waiting, but are not in the order until they are unparked.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._waiting: set[LiveRequest] = set()
        self._heap: list[tuple[int, int, LiveRequest]] = []  # may hold requests that have left: see `head`
        self._seconds_per_request = SECONDS_WITHOUT_EXPERIENCE
        self._last_admission: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._waiting

    def push(self, live: LiveRequest, *, parked: bool = False) -> None:
        """Let a request wait; bounds are `check`ed by the caller, at the door only."""
        self._waiting.add(live)
        live.phase = Phase.PARKED
        if not parked:
            self.unpark(live)

    def unpark(self, live: LiveRequest) -> None:
        """Give a waiting request its place in the order."""
        if live.phase is Phase.PARKED:
            live.phase = Phase.QUEUED
            heapq.heappush(self._heap, (live.request.priority, live.age, live))

    def head(self) -> LiveRequest | None:
        """The next to admit; None where nobody is ready."""
        while self._heap:
            live = self._heap[0][2]
            if live in self._waiting and live.phase is Phase.QUEUED:
                return live
            heapq.heappop(self._heap)
        return None

    def remove(self, live: LiveRequest) -> None:
        """A request waits no longer; nothing happens if it did not."""
        self._waiting.discard(live)
        if len(self._heap) > 2 * len(self._waiting) + MAX_STALE:
            # Refused and cancelled ones would stay, with their prompts, until the queue has come to their age.
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def admitted(self, live: LiveRequest, now: float) -> None:
        """Remove a request because it goes to a worker; `now` in seconds teaches how fast the queue moves."""
        self.remove(live)
        if self._last_admission is not None:
            self._seconds_per_request += 0.1 * (now - self._last_admission - self._seconds_per_request)
        self._last_admission = now if self._waiting else None  # how long nobody came says nothing about the next wait

    def full(self) -> QueueFull:
        """What to tell somebody for whom there is no room."""
        seconds = max(1.0, min(MAX_RETRY_AFTER, len(self._waiting) * self._seconds_per_request))
        return QueueFull(max_queue=self.max_waiting, retry_after=seconds)
