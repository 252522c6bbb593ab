"""The report of a GPU check: one table of all stages, with each figure beside its target, and the details of each."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from space_eval.report.facts import commit, machine

from gpu.record import Figure, Record, written
from gpu.stages import STAGES

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "flashinfer-python", "grpcio")

CONTEXTS, BATCHES, ROWS = (1024, 8192, 32768), (1, 16, 64), (1, 36)
"""Of attention: positions before the step, sequences, rows of each (plain decoding, and full k = 5)."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences at which the server's own choice of layouts is compared with plain decoding."""

NOISE = 0.01
"""Share by which two equal arms may seem to differ."""


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
        figure = record.value(self.name)
        if record.dry and record.outcome == "passed":
            return "dry run: means nothing"
        if figure is None or figure.value != figure.value:
            return f"not run: {record.missing.get(self.name) or record.why or 'the stage did not get so far'}"
        if self.only and self.only not in device:
            return f"no bound for {device}"
        return "met" if (figure.value >= self.bound) == self.at_least or figure.value == self.bound else "missed"


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


class Report:
    """report.md and report.json in a folder, made from the records of the stages in it."""

    def __init__(self, folder: Path, *, dry: bool, commit_given: str | None = None) -> None:
        """`commit_given`: of a copy that is no checkout."""
        self.folder, self.dry = folder, dry
        self.facts = facts(dry=dry, commit_given=commit_given)
        self.machine = f"{self.facts['device']}, {self.facts['commit']}"

    def records(self) -> dict[str, Record]:
        """The stages that were run in the same way, on this machine and commit."""
        found = {name: Record.read(self.folder / f"{name}.json") for name in STAGES}
        return {
            name: record
            for name, record in found.items()
            if record is not None and (record.dry, record.machine) == (self.dry, self.machine)
        }

    def write(self) -> None:
        """Write both files."""
        records = self.records()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "report.md").write_text(self.markdown(records), encoding="utf-8")
        stages = {name: record.as_json() for name, record in records.items()}
        head = ("stage", "figure", "measured", "target", "verdict")
        rows = [dict(zip(head, row, strict=True)) for row in self.rows(records)]
        content = {"dry": self.dry, "facts": self.facts, "figures": rows, "stages": stages}
        (self.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def rows(self, records: Mapping[str, Record]) -> list[list[str]]:
        """[stage, figure, measured, target, verdict]: for each stage its outcome, its targets, its other figures."""
        rows = []
        for name, stage in STAGES.items():
            record = records.get(name)
            if record is None:
                rows.append([name, stage.title, "–", "", "not run: not asked for"])
                continue
            verdict = f"{record.outcome}: {record.why}" if record.why else record.outcome
            rows.append([name, stage.title, written(record.seconds, "s"), "", verdict])
            targets = {target.name: target for target in TARGETS.get(name, ())}
            for target in targets.values():
                measured = record.value(target.name) or "–"
                rows.append(["", target.name, str(measured), str(target), target.verdict(record, self.facts["device"])])
            others: list[tuple[str, Figure | str]] = [(figure.name, figure) for figure in record.figures]
            others += [(name, f"not run: {why}") for name, why in record.missing.items()]
            rows += [["", name, str(value), "", ""] for name, value in others if name not in targets]
        return rows

    def markdown(self, records: Mapping[str, Record]) -> str:
        """The report."""
        lines = ["# GPU check", ""]
        if self.dry:
            lines += [
                "**A dry run: tiny sizes on the CPU, to see that every stage runs. Its figures mean nothing.**",
                "",
            ]
        lines += [f"{name}: {value}  " for name, value in self.facts.items()]
        lines += ["", *_table(["stage", "figure", "measured", "target", "verdict"], self.rows(records))]
        for name, record in records.items():
            lines += ["", f"## {name}", "", f"{record.outcome} on {record.machine}, {record.date}", ""]
            lines += [f"- {note}" for note in record.notes]
            for table in record.tables:
                lines += ["", f"**{table.title}**", "", *_table(table.head, table.rows)]
        return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *escaped]]


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
