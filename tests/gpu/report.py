"""Results of the GPU check: what a stage writes down as it goes, and one report of all stages beside their targets."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from space_common.version import commit, machine
from space_eval.report import markdown_table, without_nan, write_report

from gpu.stages import STAGES, Slice, Stage

GRACE = 15.0  # seconds before its limit at which a stage begins nothing new

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "grpcio",
)

CONTEXTS, BATCHES, ROWS = (1024, 8192, 32768), (1, 16, 64), (1, 36)
"""Of attention: positions before the step, sequences, rows of each (plain decoding, and full k = 5)."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences at which the server's own choice of layouts is compared with plain decoding."""

NOISE = 0.01  # share by which two equal arms may seem to differ


@dataclass
class Record:
    """A stage, as far as it got. It is saved after every entry: a stage that is stopped keeps what it had."""

    stage: str
    dry: bool
    machine: str = ""
    date: str = ""
    outcome: str = "running"  # then passed, failed, timed out or not run
    why: str = ""  # of an outcome that is not "passed"
    seconds: float = 0.0
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)  # by name: value and unit
    tables: dict[str, list[list[str]]] = field(default_factory=dict)  # by title: head and rows
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # what was not measured -> why

    def save(self, file: Path) -> None:
        """Replace the file in one step."""
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(without_nan(asdict(self)), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """What `save` wrote; None where the file is missing or unusable."""
        try:
            record = cls(**json.loads(file.read_text(encoding="utf-8")))
            record.figures = {
                name: (math.nan if value is None else value, unit) for name, (value, unit) in record.figures.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return record


class Notes:
    """Writes down the results of one stage, in its file and on stderr. The `notes` fixture of a stage's test."""

    def __init__(self, record: Record, file: Path, seconds: float, part: Slice) -> None:
        """`seconds`: limit; in the last of them `is_late` tells the stage to begin nothing new. `part`: the slice to
        measure."""
        self.record, self._file, self.part = record, file, part
        self.dry = record.dry  # tiny sizes on the CPU: the figures mean nothing
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.folder = file.parent
        self._until = time.monotonic() + seconds - min(GRACE, seconds / 4)
        record.save(file)

    @property
    def seconds_left(self) -> float:
        """Until it is late."""
        return self._until - time.monotonic()

    def is_late(self, name: str) -> bool:
        """Whether no time is left to measure `name`, which is then written down as missing."""
        if self.seconds_left >= 0:
            return False
        self.missing(name, "no time was left")
        return True

    def figure(self, name: str, value: float, unit: str = "") -> float:
        self.record.figures[name] = (float(value), unit)
        self._keep(f"{name}: {written(value, unit)}")
        return value

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.record.tables[title] = [[str(cell) for cell in row] for row in (head, *rows)]
        self.record.save(self._file)

    def note(self, text: str) -> None:
        self.record.notes.append(text)
        self._keep(text)

    def missing(self, name: str, why: str) -> None:
        """Write down what was not measured."""
        self.record.missing[name] = why
        self._keep(f"{name}: not run: {why}")

    def close(self, outcome: str, why: str, seconds: float) -> None:
        self.record.outcome, self.record.why, self.record.seconds = outcome, why, seconds
        self._keep(f"{outcome} {why}")

    def say(self, text: str) -> None:
        """Show progress, on stderr alone."""
        print(f"[{self.record.stage}] {text}", file=sys.stderr, flush=True)

    def _keep(self, text: str) -> None:
        self.record.save(self._file)
        self.say(text)


def written(value: float, unit: str = "") -> str:
    """Three digits, or all of a large number's; shares in per cent."""
    if not math.isfinite(value):
        return "–"
    if unit == "%":
        return f"{100 * value:.1f} %"
    digits = 0 if abs(value) >= 1000 or value == int(value) else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f} {unit}".rstrip()


@dataclass(frozen=True)
class Target:
    """A figure and its bound."""

    name: str  # the figure's
    bound: float
    at_least: bool = False
    unit: str = ""
    only: str = ""  # the bound holds on GPUs with this in their name

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {written(self.bound, self.unit)}{f' on {self.only}' * bool(self.only)}"

    def verdict(self, record: Record, device: str) -> str:
        """`met`, `missed`, or why neither can be said."""
        value, _ = record.figures.get(self.name, (math.nan, ""))
        if record.dry and record.outcome == "passed":
            return "dry run: means nothing"
        if math.isnan(value):
            return f"not run: {record.missing.get(self.name) or record.why or 'the stage did not get so far'}"
        if self.only and self.only not in device:
            return f"no bound for {device}"
        return "met" if (value >= self.bound) == self.at_least or value == self.bound else "missed"


def attention_name(context: int, batch: int, rows: int) -> str:
    """The figure of one case, by the backend that is best in it."""
    return f"attention {context // 1024}k × {batch}, {rows} row{'s' * (rows > 1)}: share of copy bandwidth"


def _llama(shape: str) -> tuple[Target, ...]:
    return (
        Target(f"{shape} plain decoding at batch 1: share of weight bandwidth", 0.70, True, "%"),
        Target(f"{shape} step(36 rows)/step(1 row) at batch 1", 1.15),
        Target(f"{shape} speed-up at k=5, acceptance .78", 3.0, True),
        Target(f"{shape} speed-up with the best layout, acceptance .78", 3.2, True),
        Target(f"{shape} device idle between steps, plain", 0.02, unit="%"),
        Target(f"{shape} device idle between steps, k=5", 0.02, unit="%"),
        *(Target(f"{shape} auto/plain at batch {batch}", 1 - NOISE, True) for batch in BATCH_SIZES),
    )


TARGETS: Mapping[str, tuple[Target, ...]] = {
    "compile": (Target("kernels that do not compile or do not fit", 0),),
    "kernels": (Target("kernels: tests that failed", 0),),
    "gpu-tests": (Target("gpu-tests: tests that failed", 0),),
    "attention": tuple(
        Target(attention_name(context, batch, rows), 0.70, True, "%")
        for rows in ROWS
        for context in CONTEXTS
        for batch in BATCHES
    ),
    "exact-products": (Target("exact: cells that are not bitwise equal", 0),),
    "eight-bits": (Target("eight bits: cells that are not bitwise equal", 0),),
    "exact-float32": (Target("float32 differences that are no tie", 0), Target("float32 ties per 100,000 tokens", 1)),
    "exact-bfloat16": (Target("bfloat16 differences that are no tie", 0),),
    "device-steps": (
        Target("texts that device-resident steps changed", 0),
        Target("exact: texts that device-resident steps changed", 0),
    ),
    "worker": (Target("texts over gRPC that drafts changed", 0),),
    "llama-1b": (*_llama("1b"), Target("1b texts with exact products that drafts changed", 0)),
    "llama-8b": (*_llama("8b"), Target("8b plain decoding at batch 1", 200, True, "tokens/s", only="H200")),
    "start-1b": (Target("1b first answer after the weights are read", 10.0, unit="s"),),
    "start-8b": (Target("8b first answer after the weights are read", 10.0, unit="s"),),
}
"""What the GPU path promises, by stage."""


@dataclass(frozen=True)
class Catalogue:
    """The stages of one command, and what its report begins with."""

    title: str
    stages: Mapping[str, Stage]
    summary: Callable[[Mapping[str, Record]], str] | None = None  # of the records: Markdown before the stages


CHECK = Catalogue("GPU check", STAGES)


class Report:
    """report.md and report.json in a folder, made from the records of the stages in it."""

    def __init__(
        self, folder: Path, *, dry: bool, commit_given: str | None = None, catalogue: Catalogue = CHECK
    ) -> None:
        """`commit_given`: of a copy that is no checkout."""
        self.folder, self.dry, self._catalogue = folder, dry, catalogue
        self.facts = facts(dry=dry, commit_given=commit_given)
        self.machine = f"{self.facts['device']}, {self.facts['commit']}"

    def records(self) -> dict[str, Record]:
        """The stages that were run in the same way, on this machine and commit."""
        names = dict.fromkeys(
            str(one) for name in self._catalogue.stages for dry in (True, False) for one in Slice.all_of(name, dry=dry)
        )
        found = {name: Record.read(self.folder / f"{name}.json") for name in names}
        return {
            name: record
            for name, record in found.items()
            if record is not None and (record.dry, record.machine) == (self.dry, self.machine)
        }

    def write(self) -> None:
        records = self.records()
        rows = [dict(zip(_HEAD, row, strict=True)) for row in self.rows(records)]
        stages = {name: asdict(record) for name, record in records.items()}
        content = {"dry": self.dry, "facts": self.facts, "figures": rows, "stages": stages}
        write_report(self.folder, "report", self.markdown(records), content)

    def rows(self, records: Mapping[str, Record]) -> list[list[str]]:
        """Cells of `_HEAD`: for each stage its outcome, its targets, its other figures."""
        rows = []
        for name, stage in self._catalogue.stages.items():
            labels = [name, *(str(one) for one in Slice.all_of(name))]
            found = {label: records[label] for label in dict.fromkeys(labels) if label in records}
            if not found:
                rows.append([name, stage.title, "–", "", "not run: not asked for"])
            targets = {target.name: target for target in TARGETS.get(name, ())}
            absent = {
                one for one in targets if not any(one in (*each.figures, *each.missing) for each in found.values())
            }
            for label, record in found.items():
                reached = {*record.figures, *record.missing}
                is_last = label == [*found][-1]
                own = [one for key, one in targets.items() if key in reached or (is_last and key in absent)]
                rows += self._rows_of(label, stage.title, record, own)
        return rows

    def _rows_of(self, label: str, title: str, record: Record, targets: Sequence[Target]) -> list[list[str]]:
        verdict = f"{record.outcome}: {record.why}" if record.why else record.outcome
        rows = [[label, title, written(record.seconds, "s"), "", verdict]]
        values = {name: written(*figure) for name, figure in record.figures.items()}
        for target in targets:
            verdict = target.verdict(record, self.facts["device"])
            rows.append(["", target.name, values.get(target.name, "–"), str(target), verdict])
        values |= {name: f"not run: {why}" for name, why in record.missing.items()}
        names = {target.name for target in targets}
        return [*rows, *(["", name, value, "", ""] for name, value in values.items() if name not in names)]

    def markdown(self, records: Mapping[str, Record]) -> str:
        lines = [f"# {self._catalogue.title}", ""]
        if self.dry:
            text = "A dry run: tiny sizes on the CPU, to see that every stage runs. Its figures mean nothing."
            lines += [f"**{text}**", ""]
        lines += [f"{name}: {value}  " for name, value in self.facts.items()]
        if self._catalogue.summary is not None:
            lines += ["", self._catalogue.summary(records)]
        lines += ["", _table(_HEAD, self.rows(records))]
        for name, record in records.items():
            lines += [f"## {name}", "", f"{record.outcome} on {record.machine}, {record.date}", ""]
            lines += [f"- {note}" for note in record.notes]
            for title, (head, *rows) in record.tables.items():
                lines += ["", f"**{title}**", "", _table(head, rows)]
        return "\n".join(lines)


_HEAD = ["stage", "figure", "measured", "target", "verdict"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(head, [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows])


def facts(*, dry: bool, commit_given: str | None = None) -> dict[str, str]:
    """What figures of a GPU must be read with, by name."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit() or commit_given or "unknown: this copy is no checkout; give it with --commit",
        "machine": machine(),
        "python": platform.python_version(),
        **dict.fromkeys(PACKAGES, "absent"),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if dry or not torch.cuda.is_available():
        return found | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "device": torch.cuda.get_device_name(),
        "driver": _driver(),
        "CUDA of torch": str(torch.version.cuda),
        "compute capability": f"{properties.major}.{properties.minor}",
        "device memory": f"{properties.total_memory / 1024**3:.1f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not answer"
    return lines[0] if lines else "unknown"
