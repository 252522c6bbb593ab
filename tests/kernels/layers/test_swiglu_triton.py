"""The SwiGLU activation on a GPU (or interpreted): equal to the reference, and rows are independent."""

from __future__ import annotations

import pytest
import torch
from space_kernels.layers import activation as swiglu
from torch.nn import functional as F

pytest.importorskip("triton")
from space_kernels.layers import swiglu_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter does not round to bfloat16."""


def draw(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    both = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner)) * 4
    return both.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 1024, 1500])
def test_the_activation_is_the_references(inner: int, dtype: torch.dtype) -> None:
    both = draw(3, inner, dtype)
    tolerance = max(torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(swiglu_triton.swiglu(both), swiglu.swiglu(both), rtol=tolerance, atol=1e-6)


def test_the_reference_is_silu_of_the_front_times_the_back() -> None:
    both = draw(3, 24, torch.float32).cpu()
    gate, up = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(swiglu.swiglu(both).double(), F.silu(gate) * up, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, where kernels are interpreted
def test_a_gate_far_below_zero_closes_and_does_not_overflow() -> None:
    both = torch.tensor([[-200.0, 200.0, 3.0, 5.0]], device=DEVICE)
    for found in (swiglu.swiglu(both), swiglu_triton.swiglu(both)):
        assert found.tolist() == [[0.0, 1000.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    both = draw(9, 96, dtype)
    both[8] = float("nan")
    whole = swiglu_triton.swiglu(both)
    for count in (1, 3, 8):
        assert torch.equal(swiglu_triton.swiglu(both[:count]), whole[:count])
