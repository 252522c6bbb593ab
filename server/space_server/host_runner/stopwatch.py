"""Adds up the seconds spent in some parts of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Stopwatch:
    """Adds up the seconds of its `with` blocks, which do not nest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += self._clock() - self._started
