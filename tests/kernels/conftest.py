"""Fixtures: each compiled library that this processor can run, and an interpreter that sums as a device does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from space_kernels.build import cpu_library
from space_kernels.build.cpu_library import CpuLibrary


@pytest.fixture(params=cpu_library.own_kinds())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return cpu_library.library_for(request.param)


@pytest.fixture
def dots_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 tiles in Triton's interpreter, as if summed exactly: numpy's library sums a row otherwise by
    its place in the tile, on processors with registers of 256 bits. A device does not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return plain(self, a, b, d, *settings)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
