"""The compile check: every kernel compiles for GPUs that are not present, and kernels that do not fit are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from space_kernels.compile_check import SHARED_KIB, triton_modules

TOO_MUCH = """
import triton
import triton.language as tl
from space_kernels.build.launch import Tuned

@triton.jit
def _square(x, out, N: tl.constexpr, ROUNDS: tl.constexpr):
    lanes = tl.arange(0, N)
    tile = tl.load(x + lanes[:, None] * N + lanes[None, :])
    total = tl.zeros([N, N], tl.float32)
    for round in range(ROUNDS):
        total += tl.dot(tile, tl.load(x + round * N * N + lanes[:, None] * N + lanes[None, :]))
    tl.store(out + lanes[:, None] * N + lanes[None, :], total)

@triton.jit
def _wrong(x):
    tl.store(x, there_is_no_such_name)

TUNED = (
    Tuned(_square, {"x": "*bf16", "out": "*fp32"}, {"N": 32, "ROUNDS": 8}),
    Tuned(_square, {"x": "*fp32", "out": "*fp32"}, {"N": 128, "ROUNDS": 8}, num_warps=8, num_stages=3),
    Tuned(_wrong, {"x": "*fp32"}),
)
"""


def check(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the check in a separate process, because this one may interpret kernels."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "space_kernels.compile_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def report(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_every_kernel_compiles_in_its_first_configuration(tmp_path: Path) -> None:
    done = check("--cc", "90", "--first", "1", "--out", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(tmp_path / "report.json")
    assert {one["module"] for one in found} == set(triton_modules())
    assert all(one["registers"] > 0 and one["error"] is None for one in found)
    assert all(one["shared_bytes"] <= SHARED_KIB[90] * 1024 for one in found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_in_every_configuration() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_that_does_not_fit_or_does_not_compile_is_named_and_the_others_are_still_checked(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "kernels_triton.py").write_text(TOO_MUCH)
    out = tmp_path / "report.json"
    done = check("--cc", "80", "--module", "broken.kernels_triton", "--out", str(out), path=tmp_path)
    assert done.returncode == 1
    fits, too_much, wrong = sorted(report(out), key=lambda one: (one["error"] is not None, one["kernel"]))
    assert fits["shared_bytes"] > 0
    assert too_much["kernel"] == "_square(fp32)[N=128, ROUNDS=8]"
    assert "bytes of shared memory; a block may have 166912. Take smaller tiles" in too_much["error"]
    assert "there_is_no_such_name" in wrong["error"]
    assert too_much["kernel"] in done.stderr
    assert "_wrong(fp32)[] for 80" in done.stderr
    assert "3 tried, 2 failed" in done.stdout


def test_a_module_that_lists_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "empty_triton.py").write_text("")
    done = check("--module", "broken.empty_triton", path=tmp_path)
    assert done.returncode != 0
    assert "broken.empty_triton lists no configurations" in done.stderr


def test_a_capability_that_is_not_known_is_refused() -> None:
    assert "capability 75 is not known here" in check("--cc", "75").stderr
