"""When a device did what: marks in its queue of work, and the seconds between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

import torch


class TimelineMark(Protocol):
    """A moment that a timeline made."""


class Timeline(Protocol):
    """Marks on one device."""

    def mark(self) -> TimelineMark:
        """The moment at which the device has done all it was given until now."""
        ...

    def wait(self, mark: TimelineMark) -> None:
        """Until that moment."""
        ...

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Between two moments that are over."""
        ...


class HostTimeline:
    """Of the CPU, which has done what it was given when the call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> TimelineMark:
        """Now."""
        return cast(TimelineMark, self._clock())

    def wait(self, mark: TimelineMark) -> None:
        """It is over."""

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Between two moments."""
        return cast(float, end) - cast(float, begin)


class CudaTimeline:
    """Of a CUDA device: events in the current stream."""

    def mark(self) -> TimelineMark:
        """When the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: TimelineMark) -> None:
        """Until the stream has got there."""
        cast(torch.cuda.Event, mark).synchronize()

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Between two events that have happened, as the device counts them."""
        return float(cast(torch.cuda.Event, begin).elapsed_time(cast(torch.cuda.Event, end))) / 1000.0
