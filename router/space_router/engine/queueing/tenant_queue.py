"""The waiting requests of one API key."""

from __future__ import annotations

import heapq
import math

from space_router.engine.request.request_state import RequestState

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
        """Add a request."""
        self._waiting[live] = due
        heapq.heappush(self._by_due, (due, live.age, live))
        if live.near_at < math.inf:
            heapq.heappush(self._coming, (live.near_at, live.age, live))

    def remove(self, live: RequestState) -> None:
        """Remove a request; no effect if it is not here."""
        self._waiting.pop(live, None)
        most = 2 * len(self._waiting) + MAX_STALE
        # Stale entries would keep their requests' prompts in memory until they reach the top of the heap.
        if len(self._by_due) > most:
            self._by_due = [entry for entry in self._by_due if entry[-1] in self._waiting]
            heapq.heapify(self._by_due)
        if len(self._coming) > most:
            self._coming = [entry for entry in self._coming if entry[-1] in self._waiting]
            heapq.heapify(self._coming)
        if len(self._near) > most:
            self._near = [entry for entry in self._near if entry[-1] in self._waiting]
            heapq.heapify(self._near)

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
