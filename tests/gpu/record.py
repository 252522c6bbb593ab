"""Results of a stage of the GPU check, saved after every entry: a stage that is stopped keeps what it had."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

GRACE = 15.0
"""Seconds before its limit at which a stage begins nothing new."""


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str = ""

    def __str__(self) -> str:
        return written(self.value, self.unit)


@dataclass(frozen=True)
class Table:
    """Results that do not fit in one number."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Record:
    """A stage, as far as it got."""

    stage: str
    dry: bool
    machine: str = ""
    date: str = ""
    outcome: str = "running"  # then passed, failed, timed out or not run
    why: str = ""  # of an outcome that is not "passed"
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # what was not measured -> why

    def add(self, name: str, value: float, unit: str = "") -> None:
        """Add a figure."""
        self.figures.append(Figure(name, float(value), unit))

    def value(self, name: str) -> Figure | None:
        """The figure of this name; None: there is none."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and texts; nan and infinities are null."""
        record = asdict(self)
        for figure in record["figures"]:
            figure["value"] = figure["value"] if math.isfinite(figure["value"]) else None
        return record

    def save(self, file: Path) -> None:
        """Replace the file in one step."""
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """What `save` wrote; None where the file is missing or unusable."""
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            known["figures"] = [
                Figure(one["name"], math.nan if one["value"] is None else one["value"], one["unit"])
                for one in known["figures"]
            ]
            known["tables"] = [Table(**one) for one in known["tables"]]
            return cls(**known)
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Notes:
    """Writes down the results of one stage, in its file and on stderr. The `notes` fixture of a stage's test."""

    def __init__(self, record: Record, file: Path, seconds: float) -> None:
        """`seconds`: limit of the stage; in the last of them `is_late` tells it to begin nothing new."""
        self.record, self._file = record, file
        self.dry = record.dry  # tiny sizes on the CPU: the figures mean nothing
        self.device = torch.device("cpu" if self.dry else "cuda")
        self._until = time.monotonic() + seconds - min(GRACE, seconds / 4)
        record.save(file)

    def is_late(self, name: str) -> bool:
        """Whether no time is left to measure `name`, which is then written down as missing."""
        if time.monotonic() <= self._until:
            return False
        self.missing(name, "no time was left")
        return True

    def figure(self, name: str, value: float, unit: str = "") -> float:
        """Write down a number; the number."""
        self.record.add(name, value, unit)
        self._keep(f"{name}: {written(value, unit)}")
        return value

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write down a table, in place of one with the same title."""
        made = Table(title, list(head), [[str(cell) for cell in row] for row in rows])
        self.record.tables = [one for one in self.record.tables if one.title != title] + [made]
        self._keep("")

    def note(self, text: str) -> None:
        """Write down a sentence."""
        self.record.notes.append(text)
        self._keep(text)

    def missing(self, name: str, why: str) -> None:
        """Write down what was not measured."""
        self.record.missing[name] = why
        self._keep(f"{name}: not run: {why}")

    def close(self, outcome: str, why: str, seconds: float) -> None:
        """The stage has ended."""
        self.record.outcome, self.record.why, self.record.seconds = outcome, why, seconds
        self._keep(f"{outcome} {why}")

    def say(self, text: str) -> None:
        """Show progress, on stderr alone."""
        print(f"[{self.record.stage}] {text}", file=sys.stderr, flush=True)

    def _keep(self, text: str) -> None:
        self.record.save(self._file)
        if text:
            self.say(text)


def written(value: float, unit: str = "") -> str:
    """Three digits, or all of a large number's; shares in per cent."""
    if not math.isfinite(value):
        return "–"
    if unit == "%":
        return f"{100 * value:.1f} %"
    digits = 0 if abs(value) >= 1000 or value == int(value) else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f} {unit}".rstrip()
