"""The row-invariant matmul on a GPU (or interpreted): correct results, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from space_kernels.linear.cuda_linear import CudaLinear, ExactLinear
from torch import Tensor

pytest.importorskip("triton")
from space_kernels.linear import linear_triton
from space_kernels.linear.linear_triton import LinearTile, row_invariant_matmul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter does not round to bfloat16, and multiplies matrices of it bit by bit."""


def draw(rows: int, out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator)
    weight, bias = torch.randn(out, width, generator=generator) * width**-0.5, torch.randn(out, generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(24, 40), (96, 64), (70, 600)])
def test_a_product_is_that_of_double_precision(out: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(5, out, width, dtype)
    product = x.double() @ weight.double().T
    tolerance = max(torch.finfo(dtype).eps, 2e-6)
    for given, wanted in ((None, product), (bias, product + bias.double())):
        found = row_invariant_matmul(x, weight, given)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("dots_round_once")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(dtype: torch.dtype) -> None:
    x, weight, bias = draw(70, 48, 96, dtype)
    whole = row_invariant_matmul(x, weight, bias)
    for count in (1, 2, 3, 17, 64, 65):
        assert torch.equal(row_invariant_matmul(x[:count], weight, bias), whole[:count]), count
    assert torch.equal(row_invariant_matmul(x[5:9], weight, bias), whole[5:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_summed_apart_or_one_after_the_other_are_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = draw(6, 24, 1100, dtype)
    assert LinearTile.of(24, 1100, dtype).parts > 1
    apart = row_invariant_matmul(x, weight, bias)
    monkeypatch.setattr(linear_triton, "_FEW_ROWS", 0)
    assert torch.equal(row_invariant_matmul(x, weight, bias), apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(6144, 4096), (4096, 14336), (128256, 4096), (8, 8), (2048, 2048)])
def test_the_parts_of_a_tile_cover_every_input_once(out: int, width: int, dtype: torch.dtype) -> None:
    tile = LinearTile.of(out, width, dtype)
    assert tile.part_depth % tile.depth == 0
    assert (tile.parts - 1) * tile.part_depth < width <= tile.parts * tile.part_depth


def test_both_layers_keep_the_shape_in_front() -> None:
    x, weight, bias = draw(6, 24, 40, torch.float32)
    wanted = torch.nn.functional.linear(x, weight, bias)
    for kind in (CudaLinear, ExactLinear):
        found = kind(weight, bias)(x.view(2, 3, 40))
        torch.testing.assert_close(found.view(6, 24), wanted, rtol=1e-5, atol=1e-5)
    assert ExactLinear(weight, None)(x[:0]).shape == (0, 24)
