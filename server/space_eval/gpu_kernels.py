"""Stages: every Triton kernel compiles for this GPU, and the tests of the kernels pass on it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from space_common.python_process import module_command
from space_kernels.compile_check import SHARED_KIB

from space_eval.gpu_record import Notebook, StageFailed, StageNotRun

ROOT = Path(__file__).parents[2]
"""Of the checkout: its tests are not installed."""

MOST_PROCESSES = 8
_SHOWN = 25


def compile_kernels(notes: Notebook, until: float) -> None:
    """Compile each kernel in every configuration for this GPU; dry: the first ones of a small module."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.json"
        capability = 90 if notes.dry else _capability()
        words = ["--cc", str(capability), "--processes", str(_processes()), "--out", str(out)]
        words += ["--module", "norm", "--first", "1"] if notes.dry else []
        run = _run(module_command("space_kernels.compile_check", *words), TRITON_INTERPRET=None)
        if not out.is_file():
            raise StageFailed(f"the compile check ended with status {run.status}: {run.last}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    failed = [one for one in found if one["error"]]
    notes.figure("kernel configurations compiled", len(found) - len(failed))
    notes.figure("kernels that do not compile or do not fit", len(failed))
    notes.figure("configurations that spill registers", sum(one["spilled_bytes"] > 0 for one in found))
    shown = sorted(found, key=lambda one: (not one["error"], -one["spilled_bytes"], -one["shared_bytes"]))[:_SHOWN]
    head = ["kernel", "cc", "warps", "stages", "shared", "registers", "spilled", "error"]
    keys = ("kernel", "capability", "num_warps", "num_stages", "shared_bytes", "registers", "spilled_bytes", "error")
    notes.table("Kernels that fail, spill or need most", head, [[one[key] or "" for key in keys] for one in shown])
    if failed:
        raise StageFailed(f"{failed[0]['kernel']} for {failed[0]['capability']}: {failed[0]['error']}")


def kernel_tests(notes: Notebook, until: float) -> None:
    """Every test of tests/kernels that takes the device there is; dry: one file of them, interpreted."""
    words = ["tests/kernels/test_swiglu_triton.py"] if notes.dry else on_any_device()
    _tests(notes, words, "kernel tests")


def on_any_device() -> list[str]:
    """The files of kernel tests that run on a GPU where there is one. Those that need one are `gpu_tests`."""
    found = []
    for file in sorted((ROOT / "tests" / "kernels").glob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "torch.cuda.is_available()" in text and "pytest.mark.gpu" not in text:
            found.append(str(file.relative_to(ROOT)))
    return found


def gpu_tests(notes: Notebook, until: float) -> None:
    """Every test that is marked `gpu`; dry: those of one file are found."""
    marked = [
        str(file.relative_to(ROOT))
        for room in ("kernels", "model", "server", "exactness", "eval")
        for file in sorted((ROOT / "tests" / room).glob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8") and file.stem != "test_gpu_check"
    ]
    if not marked:
        raise StageNotRun("no test is marked gpu, or there is no tests folder: run it in a checkout")
    words = [marked[0], "--collect-only"] if notes.dry else marked
    _tests(notes, [*words, "-m", "gpu"], "GPU tests")


def _tests(notes: Notebook, words: Sequence[str], name: str) -> None:
    if not (ROOT / "tests" / "kernels").is_dir():
        raise StageNotRun("there is no tests folder: run it in a checkout")
    if importlib.util.find_spec("pytest") is None:
        raise StageNotRun("pytest is not installed: pip install pytest pytest-timeout")
    command = module_command("pytest", "-q", "-p", "no:cacheprovider", *words)
    if not notes.dry and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(_processes())]
    run = _run(command, OMP_NUM_THREADS="2")  # of the references, in as many processes as half of the cores
    said = run.last
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", said)}
    bad = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    notes.note(f"pytest {' '.join(words)}: {said}")
    notes.figure(f"{name} that passed", counts.get("passed", 0))
    notes.figure(f"{name} that failed", bad)
    for line in [line for line in run.lines if line.startswith(("FAILED", "ERROR"))][:_SHOWN]:
        notes.note(line)
    if bad or run.status not in (0, 5):
        raise StageFailed(said)


@dataclass(frozen=True)
class _Ran:
    """A command that has ended."""

    status: int
    lines: list[str]

    @property
    def last(self) -> str:
        """What it said last."""
        said = [line.strip(" =") for line in self.lines if line.strip()]
        return said[-1] if said else "nothing was said"


def _run(command: Sequence[str], **variables: str | None) -> _Ran:
    """Its output is kept, and shown on stderr as it comes. `variables` of its environment; None: without that one."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    where = ROOT if (ROOT / "tests").is_dir() else Path.cwd()
    lines = []
    with subprocess.Popen(
        command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line.rstrip())
    return _Ran(process.returncode, lines)


def _capability() -> int:
    """The newest that is known here and not newer than the GPU's."""
    major, minor = torch.cuda.get_device_capability()
    known = [capability for capability in SHARED_KIB if capability <= 10 * major + minor]
    if not known:
        raise StageNotRun(f"kernels need compute capability 8.0 or later; this GPU has {major}.{minor}")
    return max(known)


def _processes() -> int:
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2))
