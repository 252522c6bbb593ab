"""What all measurements share: arms in alternating turns, medians with their spread, and one report."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from space_common.process import module_command, safe_environment
from space_eval.report.estimates import percentile
from space_eval.report.facts import commit, machine

Arm = TypeVar("Arm")


class PerfError(Exception):
    """A measurement that cannot be made as asked, or whose result is not usable; the message says why."""


def take_turns(
    arms: Sequence[Arm],
    num_rounds: int,
    turn: Callable[[Arm, int], None],
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call `turn(arm, round)` for every arm in every round, in reverse order in every other round.

    A machine that becomes slower during the run slows all arms alike. No round begins after `seconds`, except the
    first.
    """
    begun = clock()
    for number in range(num_rounds):
        if number and seconds is not None and clock() - begun > seconds:
            return
        for arm in arms if number % 2 == 0 else reversed(arms):
            turn(arm, number)


@dataclass(frozen=True)
class Spread:
    """A median, and the range in which 80 % of the values are."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), percentile(values, 0.1), percentile(values, 0.9))

    def shown(self, form: str) -> str:
        """`1.02 (0.98–1.05)`."""
        return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. A nan is shown as a dash."""
    lines = ["| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |" for cells in [head, *rows]]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines).replace("| nan ", "| – ") + "\n"


@dataclass
class Report:
    """One measurement: how to read it, where it was made, its tables, and everything as a JSON record."""

    title: str
    notes: str
    tables: Sequence[str]
    record: Mapping[str, Any]
    facts: Mapping[str, object] = field(default_factory=dict)
    failures: Sequence[str] = ()  # results that must not be; the command then ends with 1

    def __post_init__(self) -> None:
        self.facts = {"machine": machine(), "commit": commit(), **self.facts}

    def markdown(self) -> str:
        facts = "".join(f"{name}: {value}  \n" for name, value in self.facts.items())
        parts = [f"# {self.title}\n", facts, self.notes.strip() + "\n", *self.tables]
        return "\n".join([*parts, *(f"WRONG: {failure}\n" for failure in self.failures)])

    def write(self, folder: Path, name: str) -> None:
        """`name`.md and `name`.json."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"facts": self.facts, **self.record, "failures": list(self.failures)}
        (folder / f"{name}.md").write_text(self.markdown(), encoding="utf-8")
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def environment() -> dict[str, str]:
    """Of a process that imports this package or tests/support."""
    tests = Path(__file__).resolve().parents[1]
    path = [str(tests), str(tests / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return safe_environment({"PYTHONPATH": os.pathsep.join(path)})


def start_module(module: str, *words: object) -> subprocess.Popen[str]:
    """A module in a process of its own, its standard output a pipe."""
    return subprocess.Popen(module_command(module, *words), env=environment(), stdout=subprocess.PIPE, text=True)


def log(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return parse


def numbers(least: int) -> Callable[[str], list[int]]:
    """For argparse: whole numbers with commas between."""
    return lambda text: [at_least(least)(word.strip()) for word in text.split(",")]
