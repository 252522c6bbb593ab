"""The stages of the GPU check, each in a process of its own with a time limit: if one hangs, the others go on.

`python -m space_eval.gpu_stages` is such a process; `space_eval.gpu_check` starts them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from space_common.python_process import module_command, safe_environment

from space_eval.gpu_record import Notebook, Record, StageFailed, StageNotRun

LEAST_SECONDS = 20.0
"""A stage for which less is left is not begun."""

GRACE = 15.0
"""Seconds before its limit at which a stage should begin nothing new."""

_ROOMS = ("space_proto", "space_kernels", "space_model", "space_eval")


@dataclass(frozen=True)
class Stage:
    """One part of the check."""

    name: str
    title: str
    module: str
    function: str
    limit: float  # seconds
    dry_interprets: bool = True  # Triton's kernels are interpreted in a dry run

    def load(self) -> Callable[[Notebook, float], None]:
        """(notebook, moment by the monotonic clock at which to begin nothing new) -> None."""
        found: Callable[[Notebook, float], None] = getattr(importlib.import_module(self.module), self.function)
        return found


STAGES: tuple[Stage, ...] = (
    Stage(
        "compile", "Every Triton kernel compiles for this GPU", "space_eval.gpu_kernels", "compile_kernels", 400, False
    ),
    Stage("kernels", "The kernels' tests on the device", "space_eval.gpu_kernels", "kernel_tests", 600),
    Stage("gpu-tests", "The tests that need a GPU", "space_eval.gpu_kernels", "gpu_tests", 300),
    Stage("attention", "Attention against its roofline", "space_eval.gpu_attention", "run", 240),
    Stage("exact-products", "Exact products: SPACE ≡ plain to the last bit", "space_eval.gpu_exact", "products", 300),
    Stage("eight-bits", "Weights, keys and values of eight bits", "space_eval.gpu_eight_bits", "run", 300),
    Stage("exact-float32", "IEEE float32: SPACE on, off and transformers", "space_eval.gpu_exact", "float32", 300),
    Stage("exact-bfloat16", "The same in bfloat16, and where it ties", "space_eval.gpu_exact", "bfloat16", 240),
    Stage("device-steps", "Device-resident steps against host steps", "space_eval.gpu_worker", "device_steps", 240),
    Stage("worker", "The worker over gRPC", "space_eval.gpu_worker", "worker", 180),
    Stage("llama-1b", "Decoding at the shape of a 1B Llama", "space_eval.gpu_speed", "llama_1b", 300),
    Stage("llama-8b", "Decoding at the shape of an 8B Llama", "space_eval.gpu_speed", "llama_8b", 420),
    Stage("start-1b", "From process start to the first answer, 1B", "space_eval.gpu_worker", "start_1b", 180),
    Stage("start-8b", "From process start to the first answer, 8B", "space_eval.gpu_worker", "start_8b", 420),
)
"""In the order in which they run: what decides whether the others mean anything comes first."""

FAST_STAGES = ("attention", "exact-products")
"""Of a dry run: what a test of every change can afford."""

BY_NAME = {stage.name: stage for stage in STAGES}


def run_stage(stage: Stage, folder: Path, *, dry: bool, machine: str, seconds: float) -> Record:
    """Run a stage in a process of its own, for so many seconds at most; its record, whatever became of it."""
    file = folder / f"{stage.name}.json"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    blank = Record(stage.name, dry, machine, date)
    limit = min(stage.limit, seconds)
    if seconds < LEAST_SECONDS:
        blank.outcome, blank.why = "not run", f"{max(0.0, seconds):.0f} s were left; raise --minutes"
        blank.save(file)
        return blank
    blank.save(file)
    words = [stage.name, f"{stage.module}:{stage.function}", str(folder), f"{limit:.1f}", *(["--dry"] if dry else [])]
    begun = time.monotonic()
    process = subprocess.Popen(
        module_command("space_eval.gpu_stages", *words),
        env=_environment(stage, dry=dry),
        stdout=sys.stderr,
        start_new_session=True,
    )
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _end(process)
    record = Record.read(file) or blank
    record.machine, record.date, record.seconds = machine, date, time.monotonic() - begun
    if late:
        record.outcome, record.why = "timed out", f"stopped after {limit:.0f} s; what it had found until then stands"
    elif record.outcome == "running":
        record.outcome, record.why = "failed", f"its process ended with status {process.returncode}"
    record.save(file)
    return record


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started, which share its session."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _environment(stage: Stage, *, dry: bool) -> dict[str, str]:
    """The rooms as this process found them; a dry run sees no GPU."""
    environment = safe_environment()
    rooms = [str(Path(str(importlib.import_module(room).__file__)).parents[1]) for room in _ROOMS]
    known = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*rooms, *known]))
    environment["TQDM_DISABLE"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if stage.dry_interprets:
            environment["TRITON_INTERPRET"] = "1"
    return environment


def run_here(stage: Stage, folder: Path, *, dry: bool, limit: float) -> int:
    """The stage in this process: 0 if it passed or could not be run, else 1."""
    file = folder / f"{stage.name}.json"
    notes = Notebook(Record.read(file) or Record(stage.name, dry), file)
    record = notes.record
    try:
        stage.load()(notes, time.monotonic() + limit - min(GRACE, limit / 4))
        record.outcome = "passed"
    except StageNotRun as why:
        record.outcome, record.why = "not run", str(why)
    except StageFailed as found:
        record.outcome, record.why = "failed", str(found)
    except Exception as error:  # whatever a stage raises is its finding; the other stages go on
        traceback.print_exc()
        record.outcome, record.why = "failed", f"{type(error).__name__}: {error}"[:600]
    record.save(file)
    notes.say(f"{record.outcome} {record.why}")
    return int(record.outcome == "failed")


def _end_with(parent: int) -> None:
    """Kill this stage, and all that it started, when the check that limits its time has been killed: it would keep the
    GPU, and write over what a next check finds.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    """One stage, in this process."""
    parser = argparse.ArgumentParser(prog="python -m space_eval.gpu_stages", description="One stage of the GPU check.")
    parser.add_argument("name")
    parser.add_argument("call", metavar="MODULE:FUNCTION")
    parser.add_argument("folder", type=Path)
    parser.add_argument("limit", type=float, metavar="SECONDS")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(argv)
    if os.getpgrp() == os.getpid():  # started by `run_stage`, and not by hand
        threading.Thread(target=_end_with, args=(os.getppid(),), name="check watch", daemon=True).start()
    module, _, function = options.call.partition(":")
    stage = Stage(options.name, "", module, function, options.limit)
    return run_here(stage, options.folder, dry=options.dry, limit=options.limit)


def chosen(names: Sequence[str]) -> list[Stage]:
    """The stages asked for, in their order. Raises KeyError for an unknown one."""
    asked = {BY_NAME[name].name for name in names}
    return [stage for stage in STAGES if not names or stage.name in asked]


if __name__ == "__main__":
    sys.exit(main())
