"""Every Triton kernel compiles for this GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from space_common.process import module_command
from space_kernels.compile_check import SHARED_KIB, triton_modules

from gpu.report import Notes
from gpu.stages import num_processes

pytestmark = pytest.mark.gpu

_SHOWN = 25


def test_compile(notes: Notes, tmp_path: Path) -> None:
    """Compile each kernel in every configuration for this GPU; dry: the first ones of a small module."""
    out = tmp_path / "compiled.json"
    words: list[object] = ["--cc", 90 if notes.dry else _capability(), "--processes", num_processes(), "--out", out]
    modules = ["norm"] if notes.dry else notes.part.share(triton_modules())
    words += [word for name in modules for word in ("--module", name)]
    words += ["--first", "1"] if notes.dry else []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = module_command("space_kernels.compile_check", *words)
    status = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    assert out.is_file(), f"the compile check ended with status {status}; the log says why"
    found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    failed = [one for one in found if one["error"]]
    notes.figure("kernel configurations compiled", len(found) - len(failed))
    notes.figure("kernels that do not compile or do not fit", len(failed))
    notes.figure("configurations that spill registers", sum(one["spilled_bytes"] > 0 for one in found))
    shown = sorted(found, key=lambda one: (not one["error"], -one["spilled_bytes"], -one["shared_bytes"]))[:_SHOWN]
    head = ["kernel", "cc", "warps", "stages", "shared", "registers", "spilled", "error"]
    keys = ("kernel", "capability", "num_warps", "num_stages", "shared_bytes", "registers", "spilled_bytes", "error")
    notes.table("Kernels that fail, spill or need most", head, [[one[key] or "" for key in keys] for one in shown])
    assert not failed, f"{failed[0]['kernel']} for {failed[0]['capability']}: {failed[0]['error']}"


def _capability() -> int:
    """The newest that is known here and not newer than the GPU's."""
    major, minor = torch.cuda.get_device_capability()
    known = [capability for capability in SHARED_KIB if capability <= 10 * major + minor]
    if not known:
        pytest.skip(f"kernels need compute capability 8.0 or later; this GPU has {major}.{minor}")
    return max(known)
