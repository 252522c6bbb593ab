"""Exponential backoff of restarts."""

from __future__ import annotations

FIRST = 0.1  # seconds
LAST = 5.0


class Backoff:
    """0, then 0.1 s doubling to 5 s, until something `worked`."""

    def __init__(self) -> None:
        self._next = 0.0

    def next(self) -> float:
        """Return the seconds to wait now; the next wait is longer."""
        now, self._next = self._next, min(LAST, max(FIRST, 2 * self._next))
        return now

    def worked(self) -> None:
        """Reset the backoff."""
        self._next = 0.0
