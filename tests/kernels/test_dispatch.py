"""Dispatch: each device gets its implementations, errors name what is missing, and a CPU never loads Triton."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from space_kernels import dispatch
from space_kernels.attention import torch_backend as attention
from space_kernels.dispatch import ops_for
from space_kernels.layers import layers
from space_kernels.linear.cuda_linear import CudaLinear, ExactLinear
from space_kernels.linear.packed_linear import PackedLinear


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    """Clear the cached dispatch, because these tests change what is installed."""
    dispatch._ops.cache_clear()
    yield
    dispatch._ops.cache_clear()


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_gets_the_references(name: str, exact: bool) -> None:
    ops = ops_for("cpu", attention=name, exact=exact)
    assert ops.attention == "torch"
    assert ops.space_attention is attention.space_attention
    assert ops.attend is None
    assert (ops.rms_norm, ops.add_rms_norm) == (layers.rms_norm, layers.add_rms_norm)
    assert (ops.rotary_store, ops.swiglu) == (layers.rotary_store, layers.swiglu)
    assert type(ops.linear(torch.zeros(4, 4), None)) is PackedLinear


def test_a_gpu_gets_tritons_kernels_and_the_librarys_products_or_exact_ones() -> None:
    pytest.importorskip("triton")
    from space_kernels.attention import attention_triton
    from space_kernels.layers import layers_triton

    ops, exact = ops_for("cuda"), ops_for(torch.device("cuda", 1), exact=True)
    for one in (ops, exact):
        assert one.attention == "triton"
        calls = [one.space_attention, one.attend]
        assert [(call.func, call.keywords) for call in calls if isinstance(call, partial)] == [
            (function, {"exact": one is exact})
            for function in (attention_triton.space_attention, attention_triton.attend_stored)
        ]
        assert (one.rms_norm, one.add_rms_norm) == (layers_triton.rms_norm, layers_triton.add_rms_norm)
        assert (one.rotary_store, one.swiglu) == (layers_triton.rotary_store, layers_triton.swiglu)
    assert (ops.linear, exact.linear) == (CudaLinear, ExactLinear)
    assert ops_for("cuda") is ops


def test_a_gpu_may_attend_by_the_reference() -> None:
    pytest.importorskip("triton")
    ops = ops_for("cuda", attention="torch")
    assert (ops.attention, ops.space_attention, ops.attend) == ("torch", attention.space_attention, None)
    assert ops.swiglu is ops_for("cuda").swiglu
    with pytest.raises(ValueError, match="leave out --exact"):
        ops_for("cuda", attention="torch", exact=True)


def test_without_triton_a_gpu_gets_the_references_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_triton(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="space_kernels.dispatch"):
        ops = ops_for("cuda")
        ops_for("cuda")
    assert ops.space_attention is attention.space_attention
    assert (ops.rms_norm, ops.linear) == (layers.rms_norm, CudaLinear)
    [line] = caplog.messages
    assert "triton is not installed" in line
    assert "pip install triton" in line


@pytest.mark.parametrize(("attention", "exact"), [("auto", True), ("triton", False)])
def test_without_triton_what_needs_it_is_refused_with_the_cure(
    attention: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ValueError, match=r"triton is not installed.*pip install triton"):
        ops_for("cuda", attention=attention, exact=exact)


def test_an_attention_that_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no attention implementation 'fast'"):
        ops_for("cpu", attention="fast")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        ops_for("cpu", attention="triton")


def test_the_cpus_operations_leave_triton_unloaded() -> None:
    program = (
        "import sys; from space_kernels.dispatch import ops_for; ops_for('cpu'); "
        "sys.exit(any(name.partition('.')[0] == 'triton' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
