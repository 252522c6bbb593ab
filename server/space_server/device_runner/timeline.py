"""Marks in a device's work queue, and the seconds between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

import torch


class TimelineMark(Protocol):
    """A moment recorded by a timeline."""


class Timeline(Protocol):
    """Marks on one device."""

    def mark(self) -> TimelineMark:
        """Record the moment at which all work queued so far is done."""
        ...

    def wait(self, mark: TimelineMark) -> None:
        """Block until that moment."""
        ...

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Return the seconds between two moments that have passed."""
        ...


class HostTimeline:
    """Timeline of the CPU, whose work is done when the call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> TimelineMark:
        """Return the current time."""
        return cast(TimelineMark, self._clock())

    def wait(self, mark: TimelineMark) -> None:
        """Return at once."""

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Return the seconds between two moments."""
        return cast(float, end) - cast(float, begin)


class CudaTimeline:
    """Timeline of a CUDA device: events in the current stream."""

    def mark(self) -> TimelineMark:
        """Record an event in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: TimelineMark) -> None:
        """Block until the event has happened."""
        cast(torch.cuda.Event, mark).synchronize()

    def seconds(self, begin: TimelineMark, end: TimelineMark) -> float:
        """Return the device seconds between two events that have happened."""
        return float(cast(torch.cuda.Event, begin).elapsed_time(cast(torch.cuda.Event, end))) / 1000.0
