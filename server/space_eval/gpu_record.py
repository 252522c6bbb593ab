"""What a stage of the GPU check found, written down as it goes: a stage that is stopped keeps what it had."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["running", "passed", "failed", "timed out", "not run"]


class StageFailed(Exception):
    """What the stage was to show is not so; the message says what was found."""


class StageNotRun(Exception):
    """The stage cannot be run here; the message says why, and what would help."""


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
    """What does not fit in one number."""

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
    outcome: Outcome = "running"
    why: str = ""  # of an outcome that is not "passed"
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # what was not measured -> why

    def value(self, name: str) -> Figure | None:
        """The figure of this name; None: there is none."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and texts; a number that is none is null."""
        record = asdict(self)
        for figure in record["figures"]:
            figure["value"] = figure["value"] if math.isfinite(figure["value"]) else None
        return record

    def save(self, file: Path) -> None:
        """At once or not at all."""
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """What `save` wrote; None where there is nothing to read."""
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


class Notebook:
    """A stage's record in its file, kept up with every entry; each entry goes to stderr, too."""

    def __init__(self, record: Record, file: Path) -> None:
        self.record, self._file = record, file
        record.save(file)

    @property
    def dry(self) -> bool:
        """Tiny sizes on the CPU: the figures mean nothing."""
        return self.record.dry

    def figure(self, name: str, value: float, unit: str = "") -> float:
        """Write down a number; the number."""
        self.record.figures.append(Figure(name, float(value), unit))
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

    def say(self, text: str) -> None:
        """Progress, on stderr alone."""
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
