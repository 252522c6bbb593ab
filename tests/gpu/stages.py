"""The stages of the GPU check, in the order in which they run: what gives the others a meaning comes first."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """One part of the check: a test of this folder, or a suite of the other tests."""

    title: str
    file: str  # with the test; "" for a suite
    seconds: float  # limit of each slice
    suite: Callable[[bool], Sequence[str]] | None = None  # (dry) -> words for pytest
    needs: Sequence[str] = ("transformers", "safetensors", "grpc", "numpy")  # beside torch, triton and pytest
    num_slices: int = 1  # processes that share its work, one after the other

    def missing(self) -> str:
        """Why it cannot run here; "" where it can."""
        absent = [package for package in self.needs if importlib.util.find_spec(package) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


@dataclass(frozen=True)
class Slice:
    """A part of a stage's work, which one process does within the stage's limit."""

    stage: str
    number: int = 1
    count: int = 1

    @classmethod
    def all_of(cls, name: str, *, dry: bool = False) -> list[Slice]:
        """The slices of a stage; a dry run is small enough for one."""
        count = 1 if dry else ALL_STAGES[name].num_slices
        return [cls(name, number, count) for number in range(1, count + 1)]

    @classmethod
    def named(cls, name: str, *, dry: bool = False) -> list[Slice]:
        """Those that a stage's or a slice's name stands for. Raises KeyError."""
        if name in ALL_STAGES:
            return cls.all_of(name, dry=dry)
        return {str(one): [one] for stage in ALL_STAGES for one in cls.all_of(stage)}[name]

    def __str__(self) -> str:
        return self.stage if self.count == 1 else f"{self.stage}-{self.number}"

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Its share of a stage's items: each belongs to one slice."""
        return list(items[self.number - 1 :: self.count])

    def words(self, words: Sequence[str]) -> list[str]:
        """Pytest's words for its share of the files in `words`."""
        files = [word for word in words if word.endswith(".py")]
        return [*(word for word in words if word not in files), *self.share(files)]


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


LONGEST = 240.0
"""Seconds that a slice may take at most, for machines that can be had for a few minutes at a time."""

STAGES: dict[str, Stage] = {
    "compile": Stage("Every Triton kernel compiles for this GPU", "test_compile.py", LONGEST, needs=(), num_slices=2),
    "kernels": Stage("The kernels' tests on the device", "", LONGEST, _kernel_suite, needs=(), num_slices=4),
    "gpu-tests": Stage("The tests that need a GPU", "", LONGEST, _gpu_suite, num_slices=2),
    "attention": Stage("Attention against its roofline", "test_attention.py", LONGEST, needs=()),
    "exact-products": Stage("Exact products: SPACE ≡ plain to the last bit", "test_exact.py", LONGEST, num_slices=2),
    "eight-bits": Stage("Weights, keys and values of eight bits", "test_exact.py", LONGEST, num_slices=2),
    "exact-float32": Stage("IEEE float32: SPACE on, off and transformers", "test_exact.py", LONGEST, num_slices=2),
    "exact-bfloat16": Stage("The same in bfloat16, and where it ties", "test_exact.py", LONGEST),
    "device-steps": Stage("Device-resident steps against host steps", "test_worker.py", LONGEST),
    "worker": Stage("The worker over gRPC", "test_worker.py", 180),
    "llama-1b": Stage("Decoding at the shape of a 1B Llama", "test_speed.py", LONGEST, num_slices=2),
    "llama-8b": Stage("Decoding at the shape of an 8B Llama", "test_speed.py", LONGEST, num_slices=3),
    "start-1b": Stage("From process start to the first answer, 1B", "test_worker.py", 180),
    "start-8b": Stage("From process start to the first answer, 8B", "test_worker.py", LONGEST),
}

PEER_STAGES: dict[str, Stage] = {
    "weights": Stage("Random weights that every engine loads", "test_peers.py", LONGEST),
    "vllm-plain": Stage("Plain decoding beside vLLM", "test_peers.py", LONGEST, num_slices=2),
    "vllm-drafts": Stage("Drafts beside vLLM's of k = 1, 2, 3, 5", "test_peers.py", LONGEST, num_slices=4),
    "vllm-first-token": Stage("First token beside vLLM", "test_peers.py", LONGEST),
    "sglang-plain": Stage("Plain decoding beside SGLang", "test_peers.py", LONGEST, num_slices=2),
    "sglang-drafts": Stage("Drafts beside SGLang's of k = 1, 2, 3, 5", "test_peers.py", LONGEST, num_slices=4),
    "sglang-first-token": Stage("First token beside SGLang", "test_peers.py", LONGEST),
}
"""Of `make gpu-peers`: another engine and ours on one GPU, in turn."""

ALL_STAGES: Mapping[str, Stage] = ChainMap(STAGES, PEER_STAGES)

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
