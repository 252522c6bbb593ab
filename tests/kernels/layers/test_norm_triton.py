"""Norms on a GPU (or interpreted): equal to the reference, and row invariance."""

from __future__ import annotations

import pytest
import torch
from space_kernels.layers import norm

pytest.importorskip("triton")
from space_kernels.layers import norm_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter does not round to bfloat16."""
EPS = 1e-5


def draw(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, rows, width, generator=generator) * 3
    weight = torch.randn(width, generator=generator)
    return x.to(DEVICE, dtype), residual.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def ulps(dtype: torch.dtype) -> float:
    """Relative tolerance: some roundings of float32, or one of the dtype."""
    return max(torch.finfo(dtype).eps, 4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 704, 4096])
def test_a_norm_is_the_references(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, width, dtype)
    found, wanted = norm_triton.rms_norm(x, weight, EPS), norm.rms_norm(x, weight, EPS)
    torch.testing.assert_close(found, wanted, rtol=ulps(dtype), atol=1e-6)
    found_pair = norm_triton.add_rms_norm(x, residual, weight, EPS)
    wanted_pair = norm.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(found_pair[1], wanted_pair[1])
    torch.testing.assert_close(found_pair[0], wanted_pair[0], rtol=ulps(dtype), atol=1e-6)


def test_the_reference_is_the_definition_in_double_precision() -> None:
    x, residual, weight = (t.cpu() for t in draw(3, 96, torch.float32))
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(norm.rms_norm(x, weight, EPS).double(), wanted, rtol=1e-6, atol=1e-6)
    normed, total = norm.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm.rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_norm_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    x, residual, weight = draw(9, 320, dtype)
    alone, summed = norm_triton.rms_norm(x, weight, EPS), norm_triton.add_rms_norm(x, residual, weight, EPS)
    for count in (1, 4, 7):
        assert torch.equal(norm_triton.rms_norm(x[:count], weight, EPS), alone[:count])
        some = norm_triton.add_rms_norm(x[:count], residual[:count], weight, EPS)
        assert all(torch.equal(part, whole[:count]) for part, whole in zip(some, summed, strict=True))


def test_rows_may_be_a_slice_of_wider_ones() -> None:
    x, residual, weight = draw(4, 64, torch.float32)
    wide = torch.cat([x, residual], dim=1)
    assert torch.equal(norm_triton.rms_norm(wide[:, :64], weight, EPS), norm_triton.rms_norm(x, weight, EPS))


def test_rows_too_wide_for_registers_are_refused() -> None:
    x = torch.zeros(1, 40_000, device=DEVICE)
    with pytest.raises(ValueError, match="at most 32768"):
        norm_triton.rms_norm(x, x[0], EPS)


def test_no_rows_give_no_rows() -> None:
    x = torch.zeros(0, 8, device=DEVICE)
    assert norm_triton.rms_norm(x, torch.ones(8, device=DEVICE), EPS).shape == (0, 8)
