"""int8 linear layers: correct results, quantisation error, and row invariance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from space_kernels.build import cpu_library
from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.linear.cpu_linear import CompiledLinear, cpu_linear, in_turn
from space_kernels.linear.int8_linear import Int8Linear, Int8Weights
from space_kernels.linear.packed_linear import PackedLinear
from space_kernels.linear.rounded_inputs import rounded
from torch import Tensor
from torch.nn import functional as F

SHAPES = [(256, 256), (704, 256), (256, 704), (172, 64), (101, 94), (48, 2), (80, 6)]
EITHER = [*cpu_library.own_kinds(), "torch"]

Linear = Callable[..., Any]


@pytest.fixture(params=EITHER)
def linear_of(request: pytest.FixtureRequest) -> Linear:
    """Each way to build an int8 linear layer from weight and bias."""
    if request.param == "torch":
        return Int8Linear
    return partial(CompiledLinear, cpu_library.library_for(request.param), weights="int8")


def draw(out: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator) * width**-0.5
    bias, x = torch.randn(out, generator=generator), torch.randn(100, width, generator=generator)
    other = torch.randn(100, out, generator=generator)
    return weight.bfloat16(), bias.bfloat16(), x.bfloat16(), other.bfloat16()


def test_a_weight_is_off_by_half_a_step_of_its_output_at_most() -> None:
    weight = draw(3000, 64)[0]
    weight[7] = 0
    weight[9] *= 1000
    kept = Int8Weights.of(weight)
    assert kept.numbers.dtype is torch.int8
    assert int(kept.numbers.min()) == -127
    assert int(kept.numbers.max()) == 127
    steps = weight.float().abs().amax(dim=1) / 127
    error = (kept.dense() - weight.float()).abs().amax(dim=1)
    assert (error <= steps * 0.5001).all()
    assert not kept.dense()[7].any()


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_it_is_the_product_with_the_whole_numbers_scaled_and_rounded_once(
    linear_of: Linear, out: int, width: int
) -> None:
    weight, bias, x, other = draw(out, width)
    near = rounded(x.float()).double()
    wanted = F.linear(near, Int8Weights.of(weight).dense().double(), bias.double())
    wide = linear_of(weight, bias, wide=True)(x)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), wanted, atol=2e-5, rtol=0)
    linear = linear_of(weight, bias)
    assert torch.equal(linear(x), wide.bfloat16())
    assert torch.equal(linear.plus(x, other), (wide + other).bfloat16())
    assert torch.equal(linear(x.view(4, 25, width)), wide.bfloat16().view(4, 25, out))


def test_every_whole_number_is_itself(linear_of: Linear) -> None:
    numbers = torch.arange(-127, 128).repeat(2)[:508].view(127, 4)
    numbers[:, 3] = 127  # the scale of every output is 1
    linear = linear_of(numbers.bfloat16(), None)
    assert torch.equal(linear(torch.eye(4, dtype=torch.bfloat16)).T.int(), numbers.int())


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    linear_of: Linear, num_threads: int, out: int, width: int
) -> None:
    weight, bias, x, other = draw(out, width)
    linear = linear_of(weight, bias)
    whole, summed = linear(x), linear.plus(x, other)
    for rows in range(1, 65) if isinstance(linear, CompiledLinear) else (1, 2, 3, 5, 8, 13, 33, 64):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
        assert torch.equal(linear.plus(x[:rows], other[:rows]), summed[:rows]), rows


def test_gate_and_up_in_turn(library: CpuLibrary, num_threads: int) -> None:
    weight, bias, x, _ = draw(2 * 176, 64)
    gate, up = Int8Linear(weight[:176], bias[:176]), Int8Linear(weight[176:], bias[176:], wide=True)
    wanted = up.times(x, F.silu(Int8Linear(weight[:176], bias[:176], wide=True)(x)))
    both_biases = in_turn(bias[:176, None], bias[176:, None])[:, 0]
    linear = CompiledLinear(library, in_turn(weight[:176], weight[176:]), both_biases, weights="int8")
    whole = linear.swiglu(x)
    torch.testing.assert_close(whole.float(), wanted, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(gate.silu(x).float(), F.silu(gate(x).float()), atol=1e-2, rtol=2**-7)
    for rows in range(1, 40):
        assert torch.equal(linear.swiglu(x[:rows]), whole[:rows])


def test_what_is_not_a_number_stays_in_its_row(linear_of: Linear) -> None:
    weight, bias, x, _ = draw(256, 256)
    linear = linear_of(weight, bias)
    whole = linear(x)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    spoilt = linear(x)
    assert spoilt[3].isnan().all()
    assert not spoilt[7].isfinite().any()
    others = [row for row in range(len(x)) if row not in (3, 7)]
    assert torch.equal(spoilt[others], whole[others])


def test_it_is_held_in_half_the_bytes(library: CpuLibrary) -> None:
    weight, bias, x, _ = draw(704, 256)
    plain, eight = (CompiledLinear(library, weight, bias, weights=weights) for weights in ("plain", "int8"))
    assert eight.weight.nbytes * 2 == plain.weight.nbytes
    assert eight(x[:0]).shape == (0, 704)


def test_the_best_there_is_for_a_weight() -> None:
    weight, bias, *_ = draw(64, 65)
    assert type(cpu_linear(weight[:, :64], bias, weights="int8")) is CompiledLinear
    assert type(cpu_linear(weight, bias, weights="int8")) is Int8Linear  # an odd number of inputs
    assert type(cpu_linear(weight, bias)) is PackedLinear
