"""fp8 weights: quantisation error, and matmuls on a GPU (or interpreted)."""

from __future__ import annotations

import math

import pytest
import torch
from space_kernels.fp8 import FORMAT, GREATEST, Fp8, fp8_matmul, nearest
from space_kernels.linear.cuda_linear import Fp8Linear
from torch import Tensor

pytest.importorskip("triton")
from space_kernels.linear import linear_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter does not round to bfloat16, and multiplies matrices of it bit by bit."""


def test_a_gpu_finds_the_same_scales() -> None:
    weight = torch.randn(300, 48, generator=torch.Generator().manual_seed(2))
    weight *= 2.0 ** torch.arange(-120, 110).repeat(2)[:300, None]
    weight[::7] = GREATEST * 2.0 ** torch.arange(-40, 3)[:, None]
    here, there = Fp8.of(weight), Fp8.of(weight.to(DEVICE))
    assert all(math.frexp(scale)[0] == 0.5 for scale in there.scale.tolist())
    assert torch.equal(here.scale, there.scale.cpu())
    assert torch.equal(here.numbers.view(torch.uint8), there.numbers.cpu().view(torch.uint8))


def draw(rows: int, out: int, width: int) -> tuple[Tensor, Fp8, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=generator)
    weight, bias = torch.randn(out, width, generator=generator) * width**-0.5, torch.randn(out, generator=generator)
    kept = Fp8.of(weight)
    return x.to(DEVICE, DTYPE), Fp8(kept.numbers.to(DEVICE), kept.scale.to(DEVICE)), bias.to(DEVICE, DTYPE)


def every_number() -> Tensor:
    """[254] all that the format has."""
    found = torch.arange(256, dtype=torch.uint8).view(FORMAT)
    return found[found.float().isfinite()]


def test_a_weight_is_off_by_a_sixteenth_of_itself_at_most() -> None:
    weight = torch.randn(1100, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[7] = 0
    weight[9] *= 1e6
    weight[11] = torch.tensor([1.0, 2.0, 3.0, 448.0]).repeat(16)
    kept = Fp8.of(weight.bfloat16())
    dense, wanted = kept.dense(), weight.bfloat16().float()
    least = kept.scale[:, None] * 2**-10  # half a step of the smallest numbers
    assert ((dense - wanted).abs() <= torch.maximum(wanted.abs() / 16, least)).all()
    assert torch.equal(dense, dense.bfloat16().float())
    assert torch.equal(dense[11], weight[11])
    assert not dense[7].any()


def test_scales_are_powers_of_two_that_cut_nothing_off() -> None:
    weight = torch.randn(200, 32, generator=torch.Generator().manual_seed(1)) * 3e-3
    weight[0] = GREATEST * 2**-9
    kept = Fp8.of(weight)
    assert all(math.frexp(scale)[0] == 0.5 for scale in kept.scale.tolist())
    greatest = kept.numbers.float().abs().amax(dim=1)
    assert (greatest >= GREATEST / 2).all()
    assert (weight.abs().amax(dim=1) <= GREATEST * kept.scale).all()
    assert greatest[0] == GREATEST


def test_what_is_not_a_number_is_not_hidden() -> None:
    weight = torch.ones(3, 4)
    weight[1, 2], weight[2, 0] = math.nan, math.inf
    dense = Fp8.of(weight).dense()
    assert torch.equal(dense[0], weight[0])
    assert dense[1].isnan().all()
    assert dense[2].isnan().all()


def test_the_nearest_number_is_the_even_one_of_two_and_the_greatest_beyond_it() -> None:
    numbers = every_number().float()
    assert torch.equal(nearest(numbers).float(), numbers)
    ladder = numbers[(numbers >= 0) & (numbers.signbit().logical_not())].sort().values
    between = (ladder[1:] + ladder[:-1]) / 2
    even = torch.where(torch.arange(len(between)) % 2 == 0, ladder[:-1], ladder[1:])
    assert torch.equal(nearest(between).float(), even)
    assert torch.equal(nearest(-between).float(), -even)
    assert nearest(torch.tensor([1e9, -1e9, 460.0])).tolist() == [GREATEST, -GREATEST, GREATEST]


def test_every_number_is_itself_in_the_kernel() -> None:
    numbers = every_number()
    weight = numbers.view(127, 2).repeat(1, 8).to(DEVICE)
    x = torch.eye(16, dtype=DTYPE, device=DEVICE)
    found = linear_triton.fp8_matmul(x, weight, torch.ones(127, device=DEVICE), None)
    assert torch.equal(found.T.float(), weight.float())


@pytest.mark.parametrize(("out", "width"), [(24, 40), (96, 64), (70, 600)])
def test_a_product_is_that_of_its_definition(out: int, width: int) -> None:
    x, kept, bias = draw(5, out, width)
    product = x.double() @ kept.dense().double().T
    tolerance = torch.finfo(DTYPE).eps
    for given, wanted in ((None, product), (bias, product + bias.double())):
        for how in (linear_triton.fp8_matmul, fp8_matmul):
            found = how(x, kept.numbers, kept.scale, given)
            assert found.dtype is DTYPE
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_whatever_the_number_of_rows() -> None:
    x, kept, bias = draw(70, 48, 96)
    whole = linear_triton.fp8_matmul(x, kept.numbers, kept.scale, bias)
    for count in (1, 2, 3, 17, 64, 65):
        found = linear_triton.fp8_matmul(x[:count], kept.numbers, kept.scale, bias)
        assert torch.equal(found, whole[:count]), count


def test_parts_summed_apart_or_one_after_the_other_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kept, bias = draw(6, 24, 1100)
    assert linear_triton.LinearTile.of(24, 1100, DTYPE).parts > 1
    apart = linear_triton.fp8_matmul(x, kept.numbers, kept.scale, bias)
    monkeypatch.setattr(linear_triton, "_FEW_ROWS", 0)
    assert torch.equal(linear_triton.fp8_matmul(x, kept.numbers, kept.scale, bias), apart)


def test_linears_one_below_the_other() -> None:
    x, upper, bias = draw(6, 24, 40)
    lower = Fp8(draw(6, 8, 40)[1].numbers, upper.scale[:8] * 4)
    linears = [Fp8Linear(upper, bias), Fp8Linear(lower, bias[:8])]
    both = Fp8Linear.joined(linears)
    assert both.numbers.dtype is FORMAT
    assert torch.equal(both(x.view(2, 3, 40)), torch.cat([linear(x.view(2, 3, 40)) for linear in linears], dim=-1))
    assert both(x[:0]).shape == (0, 32)
