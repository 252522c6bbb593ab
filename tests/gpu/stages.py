"""The stages of the GPU check, in the order in which they run: what gives the others a meaning comes first."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """One part of the check: a test of this folder, or a suite of the other tests."""

    title: str
    file: str  # with the test; "" for a suite
    seconds: float  # limit
    suite: Callable[[bool], Sequence[str]] | None = None  # (dry) -> words for pytest
    needs: Sequence[str] = ("transformers", "safetensors", "grpc", "numpy")  # beside torch, triton and pytest

    def missing(self) -> str:
        """Why it cannot run here; "" where it can."""
        absent = [package for package in self.needs if importlib.util.find_spec(package) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


def num_processes() -> int:
    """Processes that compile or test kernels at a time."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def kernel_tests() -> list[str]:
    """The files of tests/kernels whose tests run on the GPU where there is one. `gpu_tests` has those that need it."""
    found = []
    for file in sorted((ROOT / "tests" / "kernels").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "torch.cuda.is_available()" in text and "pytest.mark.gpu" not in text:
            found.append(str(file.relative_to(ROOT)))
    return found


def gpu_tests() -> list[str]:
    """The files with tests marked `gpu`, without this folder's."""
    return [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if file.relative_to(ROOT).parts[1] not in ("gpu", "house")
        and "pytest.mark.gpu" in file.read_text(encoding="utf-8")
    ]


def _kernel_suite(dry: bool) -> list[str]:
    return [file for file in kernel_tests() if "layers_triton" in file] if dry else kernel_tests()


def _gpu_suite(dry: bool) -> list[str]:
    return ["-m", "gpu", *([gpu_tests()[0], "--collect-only"] if dry else gpu_tests())]


STAGES: dict[str, Stage] = {
    "compile": Stage("Every Triton kernel compiles for this GPU", "test_compile.py", 400, needs=()),
    "kernels": Stage("The kernels' tests on the device", "", 600, _kernel_suite, needs=()),
    "gpu-tests": Stage("The tests that need a GPU", "", 300, _gpu_suite),
    "attention": Stage("Attention against its roofline", "test_attention.py", 240, needs=()),
    "exact-products": Stage("Exact products: SPACE ≡ plain to the last bit", "test_exact.py", 300),
    "eight-bits": Stage("Weights, keys and values of eight bits", "test_exact.py", 300),
    "exact-float32": Stage("IEEE float32: SPACE on, off and transformers", "test_exact.py", 300),
    "exact-bfloat16": Stage("The same in bfloat16, and where it ties", "test_exact.py", 240),
    "device-steps": Stage("Device-resident steps against host steps", "test_worker.py", 240),
    "worker": Stage("The worker over gRPC", "test_worker.py", 180),
    "llama-1b": Stage("Decoding at the shape of a 1B Llama", "test_speed.py", 300),
    "llama-8b": Stage("Decoding at the shape of an 8B Llama", "test_speed.py", 420),
    "start-1b": Stage("From process start to the first answer, 1B", "test_worker.py", 180),
    "start-8b": Stage("From process start to the first answer, 8B", "test_worker.py", 420),
}

FAST_STAGES = ("attention", "exact-products")  # of a dry run: what a test of every change can afford


def pytest_configure() -> None:
    """As a pytest plugin (`-p gpu.stages`), end this stage, and all that it started, with the check that started it.

    A stage that outlives its check keeps the GPU and writes over what the next check finds.
    """
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with, args=(os.getppid(),), name="check watch", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)
