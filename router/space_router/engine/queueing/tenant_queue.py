"""The waiting requests of one key."""

from __future__ import annotations

import heapq
import math

from space_router.engine.request.request_state import RequestState

MAX_STALE = 64  # entries of a heap that may be of requests that have left, besides as many as wait


class TenantQueue:
    """Requests of one key, in the order in which they go.

    The one that is due first goes first; due is when it would have come to have, at the most urgent level, the place
    that it has now. Requests whose deadlines are near go before, within their priority the earliest deadline first;
    but not once the first is due `patience` seconds before such a one: a stream of them holds up nobody for ever.
    """

    def __init__(self, key: str, *, patience: float) -> None:
        self.key = key
        self._patience = patience
        self.finish = 0.0  # tokens its requests have been served, on the clock of all keys (see RequestQueue)
        self.turn = 0  # number of its place among the lines: a place with another number is stale
        self._waiting: dict[RequestState, float] = {}  # -> due
        self._by_due: list[tuple[float, int, RequestState]] = []
        self._coming: list[tuple[float, int, RequestState]] = []  # by when their deadlines are near
        self._near: list[tuple[int, float, int, RequestState]] = []  # by priority and deadline

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, live: RequestState) -> bool:
        return live in self._waiting

    def add(self, live: RequestState, due: float) -> None:
        """A request stands in this line."""
        self._waiting[live] = due
        heapq.heappush(self._by_due, (due, live.age, live))
        if live.near_at < math.inf:
            heapq.heappush(self._coming, (live.near_at, live.age, live))

    def remove(self, live: RequestState) -> None:
        """A request stands here no longer; nothing happens if it did not."""
        self._waiting.pop(live, None)
        most = 2 * len(self._waiting) + MAX_STALE
        # Those that left would stay, with their prompts, until the line has come to them.
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
        """When the first is due; infinity for an empty line."""
        while self._by_due and self._by_due[0][-1] not in self._waiting:
            heapq.heappop(self._by_due)
        return self._by_due[0][0] if self._by_due else math.inf

    def head(self, now: float, latest_due: float) -> RequestState | None:
        """Who goes next of those that are due by `latest_due`."""
        while self._coming and self._coming[0][0] <= now:
            live = heapq.heappop(self._coming)[-1]
            if live in self._waiting:
                heapq.heappush(self._near, (live.request.priority, live.deadline_at, live.age, live))
        while self._near and self._near[0][-1] not in self._waiting:
            heapq.heappop(self._near)
        if self._near and self._waiting[self._near[0][-1]] <= min(latest_due, self.due + self._patience):
            return self._near[0][-1]
        return self._by_due[0][-1] if self.due <= latest_due else None
