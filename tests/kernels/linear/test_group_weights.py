"""Linears whose weights are in groups of 32: an independent reference bit by bit, and row invariance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from integer_products import Array, fused, rounded_groups
from space_kernels.build import cpu_library
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledDelta, CompiledLinear, cpu_linear, in_turn
from space_kernels.linear.group_weights import GroupForm, GroupLinear, GroupWeights
from space_kernels.linear.int8_linear import Int8Weights
from space_kernels.linear.rounded_inputs import round_rows
from torch import Tensor
from torch.nn import functional as F

SHAPES = [(256, 704), (172, 64), (101, 94), (48, 2)]
FORMS = [GroupForm.Q4_0, GroupForm.Q4_1, GroupForm.Q8_0]
EITHER = [*cpu_library.own_kinds(), "torch"]

Linear = Callable[..., Any]


@pytest.fixture(params=EITHER)
def linear_of(request: pytest.FixtureRequest) -> Linear:
    """Each way to build a linear layer in groups from weight and bias."""
    if request.param == "torch":
        return lambda weight, bias, form, **options: GroupLinear(weight, bias, form=form, **options)
    made = partial(CompiledLinear, library_for(request.param))
    return lambda weight, bias, form, **options: made(weight, bias, weights=form, **options)


def draw(out: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator) * width**-0.5
    bias, x = torch.randn(out, generator=generator), torch.randn(100, width, generator=generator)
    x[40:60] *= torch.logspace(-30, 30, 20)[:, None]
    other = torch.randn(100, out, generator=generator)
    return weight.bfloat16(), bias.bfloat16(), x.bfloat16(), other.bfloat16()


def reference(kept: GroupWeights, x: Tensor) -> Array:
    """[R, out] float32 in numpy, by the definition: integers within a group, then groups in ascending order."""
    groups = kept.scale.shape[1]
    codes, scale = rounded_groups(x.float().numpy())
    numbers = kept.numbers.numpy().astype(np.int64).reshape(-1, groups, 32) - kept.form.offset
    products = np.einsum("rgk,ngk->rng", codes, numbers)
    total = scale * codes.sum(axis=2).astype(np.float32)
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    weight_scale = kept.scale.float().numpy()
    for g in range(groups):
        both = weight_scale[None, :, g] * scale[:, g, None]
        sums = fused(products[:, :, g].astype(np.float32), both, sums)
        if kept.min is not None:
            sums = fused(kept.min.float().numpy()[None, :, g], total[:, g, None], sums)
    return sums


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_it_is_the_reference_bit_by_bit_on_every_processor(
    library: CpuLibrary, out: int, width: int, form: GroupForm
) -> None:
    weight, bias, x, other = draw(out, width)
    kept = GroupWeights.of(weight, form)
    wanted = torch.from_numpy(reference(kept, x)) + bias.float()
    for given in (weight, [kept]):
        wide = CompiledLinear(library, given, bias, wide=True, weights=form)(x)
        assert wide.dtype is torch.float32
        assert torch.equal(wide, wanted)
    linear = CompiledLinear(library, [kept], bias)
    assert torch.equal(linear(x), wide.bfloat16())
    assert torch.equal(linear.plus(x, other), (wide + other).bfloat16())
    assert torch.equal(linear(x.view(4, 25, width)), wide.bfloat16().view(4, 25, out))


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_int8_is_the_definition_bit_by_bit_on_every_processor(library: CpuLibrary, out: int, width: int) -> None:
    weight, bias, x, _ = draw(out, width)
    kept = Int8Weights.of(weight)
    codes, scale = (one.numpy() for one in round_rows(x))
    numbers = F.pad(kept.numbers.long(), (0, -width % 32)).view(out, -1, 32).numpy()
    products = np.einsum("rgk,ngk->rng", codes.astype(np.int64), numbers).astype(np.float32)
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    for g in range(products.shape[2]):
        sums = fused(products[:, :, g], scale[:, g, None], sums)
    wanted = torch.from_numpy(sums) * kept.scale + bias.float()
    assert torch.equal(CompiledLinear(library, weight, bias, wide=True, weights="int8")(x), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_it_is_near_the_product_with_the_weights(linear_of: Linear, out: int, width: int, form: GroupForm) -> None:
    weight, bias, x, _ = draw(out, width)
    x = x[:40]
    found = linear_of(weight, bias, form, wide=True)(x)
    dense = GroupWeights.of(weight, form).dense()
    codes, scale = round_rows(x)
    near = (codes * scale[:, :, None]).flatten(1)[:, :width]
    torch.testing.assert_close(
        found.double(), F.linear(near.double(), dense.double(), bias.double()), atol=2e-5, rtol=0
    )
    torch.testing.assert_close(found, F.linear(x.float(), dense, bias.float()), atol=0.08, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_off_by_a_step_of_its_group_at_most(form: GroupForm) -> None:
    weight = draw(3000, 94)[0].float()
    weight[7] = 0
    weight[9] *= 1000
    kept = GroupWeights.of(weight, form)
    assert not kept.dense()[7].any()
    error = F.pad((kept.dense() - weight).abs(), (0, 2)).view(3000, 3, 32).amax(2)
    half = 1.0 if form is GroupForm.Q4_0 else 0.52  # of Q4_0 the other end of the range is clipped
    assert (error <= kept.scale.float().abs() * half + 1e-7).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_ggufs_blocks_are_the_same_numbers(form: GroupForm) -> None:
    weight = draw(64, 128)[0].float()
    kept = GroupWeights.of(weight, form)
    kind = GGMLQuantizationType[form.name]
    theirs = quants.dequantize(quants.quantize(weight.numpy(), kind), kind)
    torch.testing.assert_close(
        kept.dense(), torch.from_numpy(theirs), atol=4e-3 if form is GroupForm.Q8_0 else 0.04, rtol=0
    )


def test_weights_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="beyond float16's range"):
        GroupWeights.of(torch.full((2, 32), 1e8), GroupForm.Q4_1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    linear_of: Linear, num_threads: int, out: int, width: int, form: GroupForm
) -> None:
    weight, bias, x, other = draw(out, width)
    linear = linear_of(weight, bias, form)
    whole, summed = linear(x), linear.plus(x, other)
    for rows in range(1, 65) if isinstance(linear, CompiledLinear) else (1, 2, 3, 5, 8, 13, 33, 64):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
        assert torch.equal(linear.plus(x[:rows], other[:rows]), summed[:rows]), rows


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_processor_gives_the_same_bits(num_threads: int, form: GroupForm) -> None:
    weight, bias, x, _ = draw(256, 704)
    linears = [CompiledLinear(library_for(kind), weight, bias, weights=form) for kind in own_kinds()]
    for rows in (1, 2, 3, 5, 9, 13, 36, 70):
        first, *others = (linear(x[:rows]) for linear in linears)
        assert all(torch.equal(first, other) for other in others), rows


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_in_turn(library: CpuLibrary, num_threads: int, form: GroupForm) -> None:
    weight, _, x, _ = draw(2 * 176, 64)
    x = x[:40]
    gate, up = (CompiledLinear(library, part, None, wide=True, weights=form) for part in weight.split(176))
    wanted = F.silu(gate(x)) * up(x)
    linear = CompiledLinear(library, in_turn(weight[:176], weight[176:]), None, weights=form)
    whole = linear.swiglu(x)
    torch.testing.assert_close(whole.float(), wanted, atol=1e-5, rtol=2**-8)
    for rows in range(1, 40):
        assert torch.equal(linear.swiglu(x[:rows]), whole[:rows])


@pytest.mark.parametrize("form", FORMS)
def test_deltas_join_the_sums_of_their_rows_alone(library: CpuLibrary, num_threads: int, form: GroupForm) -> None:
    weight, _, x, other = draw(136, 64)
    x[40:60] = x[:20]
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(8, 64, generator=generator) / 8, torch.randn(136, 8, generator=generator)
    delta = CompiledDelta(library, [(a.bfloat16(), b.bfloat16())], [136], 2.0)
    linear = CompiledLinear(library, weight, None, weights=form)
    plain, joined = linear(x), linear.plus(x, other)
    alone = linear(x, [(delta, slice(0, len(x)))])
    dense = 2.0 * b.bfloat16().float() @ a.bfloat16().float()
    torch.testing.assert_close(alone.float(), plain.float() + x.float() @ dense.T, atol=0.15, rtol=2**-6)
    for rows in (1, 2, 3, 9, 12, 13, 16, 17, 36, 64):
        for first in {0, 1, rows // 3, rows - 1}:
            found = linear(x[:rows], [(delta, slice(first, rows))])
            assert torch.equal(found[:first], plain[:first]), (rows, first)
            assert torch.equal(found[first:], alone[first:rows]), (rows, first)
            found = linear.plus(x[:rows], other[:rows], [(delta, slice(first, rows))])
            assert torch.equal(found[:first], joined[:first]), (rows, first)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_in_its_row(linear_of: Linear, form: GroupForm) -> None:
    weight, bias, x, _ = draw(256, 256)
    linear = linear_of(weight, bias, form)
    whole = linear(x)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    spoilt = linear(x)
    assert not spoilt[3].isfinite().any()
    assert not spoilt[7].isfinite().any()
    others = [row for row in range(len(x)) if row not in (3, 7)]
    assert torch.equal(spoilt[others], whole[others])


@pytest.mark.parametrize("form", FORMS)
def test_it_is_held_in_the_bytes_of_its_groups(library: CpuLibrary, form: GroupForm) -> None:
    weight, bias, x, _ = draw(704, 256)
    linear = CompiledLinear(library, weight, bias, weights=form)
    assert linear.weight.nbytes == 704 * 256 // 256 * form.bytes_of_groups
    assert linear(x[:0]).shape == (0, 704)


def test_the_best_there_is_for_a_weight() -> None:
    weight, bias, *_ = draw(64, 65)
    assert type(cpu_linear(weight[:, :64], bias, weights="int4")) is CompiledLinear
    assert type(cpu_linear(weight, bias, weights="int4")) is GroupLinear  # an odd number of inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_compiled_or_by_torch_weights_become_the_same_numbers(out: int, width: int, form: GroupForm) -> None:
    weight = draw(out, width)[0]
    weight[3] = 0
    weight[5] *= 1e-6
    one, other = GroupWeights.of(weight, form), GroupWeights.of(weight.float(), form)  # float32 is left to torch
    assert torch.equal(one.numbers, other.numbers)
    assert torch.equal(one.scale, other.scale)
    if one.min is not None and other.min is not None:
        assert torch.equal(one.min, other.min)
