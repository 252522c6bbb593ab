"""Memory and open files of the processes of a run: after their warm-up, at most, at last, and the bounds of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perf.harness import table
from processes import ProcessFigures


@dataclass(frozen=True)
class FootprintBounds:
    """What a process may have above its figures after the warm-up."""

    growth_bytes: int  # at last
    peak_bytes: int  # at any moment
    growth_files: int
    peak_files: int


ROUTER = FootprintBounds(96 << 20, 384 << 20, 16, 320)  # floods of 200 connections, hostile bodies
WORKER = FootprintBounds(256 << 20, 384 << 20, 16, 32)


class Footprint:
    """One process."""

    def __init__(self, name: str, bounds: FootprintBounds, figures: ProcessFigures) -> None:
        """`figures`: after its warm-up."""
        self.name = name
        self._bounds = bounds
        self._first = self._last = figures
        self._peak_bytes, self._peak_files = figures.resident_bytes, figures.num_files

    def add(self, figures: ProcessFigures) -> None:
        """Take the figures of a later moment; those of a process that is gone change nothing."""
        if not figures.resident_bytes:
            return
        self._last = figures
        self._peak_files = max(self._peak_files, figures.num_files)
        self._peak_bytes = max(self._peak_bytes, figures.resident_bytes)
        if figures.peak_bytes > self._first.peak_bytes:  # else it is of the start
            self._peak_bytes = max(self._peak_bytes, figures.peak_bytes)

    @property
    def failures(self) -> list[str]:
        """What exceeds its bound, in sentences."""
        first, last, bounds = self._first, self._last, self._bounds
        found = (
            ("MiB at last", last.resident_bytes >> 20, first.resident_bytes >> 20, bounds.growth_bytes >> 20),
            ("MiB at most", self._peak_bytes >> 20, first.resident_bytes >> 20, bounds.peak_bytes >> 20),
            ("open files at last", last.num_files, first.num_files, bounds.growth_files),
            ("open files at most", self._peak_files, first.num_files, bounds.peak_files),
        )
        return [
            f"{self.name} had {now} {what}, {before} after its warm-up; it may have {more} more."
            for what, now, before, more in found
            if now > before + more
        ]

    @property
    def row(self) -> tuple[str, ...]:
        """MiB and files: after the warm-up, at most, at last."""
        figures = ((self._first.resident_bytes, self._first.num_files), (self._peak_bytes, self._peak_files))
        last = (self._last.resident_bytes, self._last.num_files)
        return (self.name, *(f"{memory >> 20} MiB, {files} files" for memory, files in (*figures, last)))

    @property
    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": [self._first.resident_bytes, self._peak_bytes, self._last.resident_bytes],
            "files": [self._first.num_files, self._peak_files, self._last.num_files],
        }


class FootprintWatch:
    """Looks at processes again and again; one that takes the place of another is warmed up anew, with its own row."""

    def __init__(self, warm_seconds: float) -> None:
        """`warm_seconds`: from the first look at a process to the figures that its others are held to."""
        self.footprints: list[Footprint] = []
        self._warm_seconds = warm_seconds
        self._seen: dict[int, float] = {}  # when, by process id
        self._warm: dict[int, Footprint] = {}

    def look(self, name: str, pid: int, bounds: FootprintBounds, now: float, figures: ProcessFigures) -> None:
        """Take the figures of the process that is in the place `name` at the moment `now`, in seconds."""
        if not figures.resident_bytes:
            return
        if pid in self._warm:
            self._warm[pid].add(figures)
        elif now - self._seen.setdefault(pid, now) >= self._warm_seconds:
            self._warm[pid] = Footprint(f"{name}, process {pid}", bounds, figures)
            self.footprints.append(self._warm[pid])


def footprint_table(footprints: Sequence[Footprint]) -> str:
    return table(("process", "after its warm-up", "at most", "at last"), [one.row for one in footprints])
