"""What all measurements share: arms in alternating turns, medians with their spread, one report, and one command."""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from space_common.http_client import HttpError
from space_common.process import ServerError, module_command, safe_environment
from space_common.version import commit, machine
from space_eval.flags import whole_from
from space_eval.report import Spread, markdown_facts, percentile, write_report
from space_model.model_error import ModelError

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


TAILS = 0.1  # share of the values that a `Spread` of measured times leaves out on either side


def without_tails(values: Sequence[float]) -> Spread:
    """The median, and the range without TAILS of the values on either side."""
    return Spread(statistics.median(values), percentile(values, TAILS), percentile(values, 1 - TAILS))


Column = tuple[str, str, str]  # of a table of records: its head, the name of the value, and its format


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. A nan is shown as a dash."""
    lines = ["| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |" for cells in [head, *rows]]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines).replace("| nan ", "| – ") + "\n"


def columns_table(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of a value in each column."""
    rows = [[format(record[name], form) for _, name, form in columns] for record in records]
    return table([head for head, _, _ in columns], rows)


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
        parts = [f"# {self.title}\n", markdown_facts(self.facts), self.notes.strip() + "\n", *self.tables]
        return "\n".join([*parts, *(f"WRONG: {failure}\n" for failure in self.failures)]).rstrip("\n") + "\n"

    def write(self, folder: Path, name: str) -> None:
        record = {"facts": self.facts, "passed": not self.failures, **self.record, "failures": list(self.failures)}
        write_report(folder, name, self.markdown(), record)


def environment() -> dict[str, str]:
    """Of a process that imports this package or tests/support."""
    tests = Path(__file__).resolve().parents[1]
    path = [str(tests), str(tests / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return safe_environment({"PYTHONPATH": os.pathsep.join(path)})


def start_module(module: str, *words: object) -> subprocess.Popen[str]:
    """A module in a process of its own, its standard output a pipe."""
    return subprocess.Popen(module_command(module, *words), env=environment(), stdout=subprocess.PIPE, text=True)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def numbers(least: int) -> Callable[[str], list[int]]:
    """For argparse: whole numbers with commas between."""
    return lambda text: [whole_from(least)(word.strip()) for word in text.split(",")]


MEASUREMENTS: Mapping[str, tuple[str, str]] = {
    "overhead": ("perf.overhead", "what mask rows cost, and the batch at which each draft layout stops paying"),
    "sources": ("perf.sources", "drafts by lookup, by masks and by both joined, on given prompts"),
    "positions": ("perf.positions", "accepted drafts by position and kind of text, from runs of eval acceptance"),
    "host-time": ("perf.host_time", "what a step of the worker takes besides model computation, by part"),
    "matmul": ("perf.matmul", "the CPU's matmul of few rows, beside memory's speed and torch's own"),
    "sampling": ("perf.sampling", "sampling and log-probabilities of rows on the CPU, compiled and by torch"),
    "memory": ("perf.memory", "what SPACE takes in memory, beside a server with a draft model"),
    "loading": ("perf.loading", "what loading a model adds to a process, held and at most, beside its tensors' bytes"),
    "edge": ("perf.edge", "one core and 1 GiB: whether all texts are exact, and what the server takes"),
    "scheduler": ("perf.scheduler", "what a step costs the router, by queued requests and by pages"),
    "streams": ("perf.streams", "what one router adds and costs, from one stream to a thousand"),
    "perplexity": ("perf.perplexity", "perplexity in each form of the weights, beside llama.cpp on the same ids"),
    "kv-offload": ("perf.kv_offload", "long conversations in turn, with and without host memory behind the KV cache"),
    "engines": ("perf.engines.compare", "other inference engines beside ours, in one run on the same weights"),
}
"""A module with `add_arguments` and `run`, loaded when it is asked for, and what it measures."""


def parser(
    arguments: Sequence[str], prog: str = "python tests/perf", modules: Mapping[str, tuple[str, str]] = MEASUREMENTS
) -> argparse.ArgumentParser:
    """All measurements, and the flags of the one that `arguments` begin with."""
    top = argparse.ArgumentParser(prog=prog)
    commands = top.add_subparsers(dest="name", required=True)
    for name, (path, summary) in modules.items():
        if name != next(iter(arguments), None):
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(path)
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {name}.md and {name}.json there")
        command.set_defaults(run=module.run)
    return top


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "python tests/perf",
    modules: Mapping[str, tuple[str, str]] = MEASUREMENTS,
) -> int:
    """Run one measurement. Exit status 0; 1 where a result is wrong or a server failed; 2 for unusable flags."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(given, prog, modules).parse_args(given)
    try:
        report: Report = options.run(options)
    except (PerfError, ModelError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2
    except (ServerError, HttpError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(report.markdown(), end="")
    if options.out is not None:
        report.write(options.out, options.name)
        print(f"{options.name}: wrote {options.out / options.name}.md and .json", file=sys.stderr)
    return 1 if report.failures else 0
