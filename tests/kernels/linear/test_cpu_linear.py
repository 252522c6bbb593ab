"""The compiled matmul: correct results, and row invariance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledDelta, CompiledLinear, cpu_linear, in_turn
from torch.nn import functional as F

SHAPES = [(256, 256), (704, 256), (256, 704), (172, 64), (101, 96), (48, 2)]


def draw(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator) * width**-0.5
    bias, x = torch.randn(out, generator=generator), torch.randn(200, width, generator=generator)
    other = torch.randn(200, out, generator=generator)
    return weight.bfloat16(), bias.bfloat16(), x.bfloat16(), other.bfloat16()


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_it_is_the_product_of_float32_sums_rounded_once(library: CpuLibrary, out: int, width: int) -> None:
    weight, bias, x, other = draw(out, width)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    wide = CompiledLinear(library, weight, bias, wide=True)(x)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), wanted, atol=2e-5, rtol=0)
    linear = CompiledLinear(library, weight, bias)
    assert torch.equal(linear(x), wide.bfloat16())
    assert torch.equal(linear.plus(x, other), (wide + other).bfloat16())
    assert torch.equal(linear(x.view(4, 50, width)), wide.bfloat16().view(4, 50, out))


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    library: CpuLibrary, num_threads: int, out: int, width: int
) -> None:
    weight, bias, x, other = draw(out, width)
    linear = CompiledLinear(library, weight, bias)
    whole, summed = linear(x), linear.plus(x, other)
    for rows in (*range(1, 65), 100):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
        assert torch.equal(linear.plus(x[:rows], other[:rows]), summed[:rows]), rows


def test_threads_change_no_bit(library: CpuLibrary) -> None:
    weight, bias, x, _ = draw(704, 256)
    linear = CompiledLinear(library, weight, bias)
    before, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(linear(x[:9]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("int8", [False, True])
def test_processors_that_widen_agree_on_every_bit(int8: bool) -> None:
    kinds = [kind for kind in own_kinds() if kind in ("avx512", "avx2")]
    if len(kinds) < 2:
        pytest.skip("this processor is of one kind that widens")
    weight, bias, x, _ = draw(256, 704)
    one, other = (
        CompiledLinear(library_for(kind), weight, bias, weights="int8" if int8 else "plain") for kind in kinds
    )
    for rows in (1, 3, 5, 9, 13, 70):
        assert torch.equal(one(x[:rows]), other(x[:rows])), rows


def test_gate_and_up_in_turn(library: CpuLibrary, num_threads: int) -> None:
    weight, bias, x, _ = draw(2 * 176, 64)
    gate, up = weight[:176], weight[176:]
    gate_bias, up_bias = bias[:176, None], bias[176:, None]
    linear = CompiledLinear(library, in_turn(gate, up), in_turn(gate_bias, up_bias)[:, 0])
    whole = linear.swiglu(x)
    wanted = F.silu(F.linear(x.double(), gate.double(), gate_bias[:, 0].double()))
    wanted *= F.linear(x.double(), up.double(), up_bias[:, 0].double())
    torch.testing.assert_close(whole.double(), wanted, atol=1e-5, rtol=2**-8)
    for rows in range(1, 40):
        assert torch.equal(linear.swiglu(x[:rows]), whole[:rows])
    with pytest.raises(ValueError, match="100 outputs; panels in turn need a multiple of 16"):
        in_turn(weight[:100], weight[100:200])


def test_what_is_not_a_number_stays_in_its_row(library: CpuLibrary) -> None:
    weight, bias, x, _ = draw(256, 256)
    linear = CompiledLinear(library, weight, bias)
    whole = linear(x)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    spoilt = linear(x)
    assert spoilt[3].isnan().all()
    assert not spoilt[7].isfinite().any()
    others = [row for row in range(len(x)) if row not in (3, 7)]
    assert torch.equal(spoilt[others], whole[others])


def test_no_rows_are_no_result(library: CpuLibrary) -> None:
    weight, bias, x, _ = draw(256, 256)
    assert CompiledLinear(library, weight, bias)(x[:0]).shape == (0, 256)


def test_other_numbers_are_refused_or_left_to_torch(library: CpuLibrary) -> None:
    weight, bias, x, _ = draw(256, 256)
    with pytest.raises(TypeError, match=r"takes bfloat16 rows; got torch\.float32"):
        CompiledLinear(library, weight, bias)(x.float())
    for unfit in (weight.float(), weight[:, :255]):
        with pytest.raises(ValueError, match="takes bfloat16 weights with even inputs"):
            CompiledLinear(library, unfit, None)
    assert type(cpu_linear(weight, bias)) is CompiledLinear
    assert type(cpu_linear(weight.float(), bias.float())) is not CompiledLinear
    assert type(cpu_linear(weight[:, :255], bias)) is not CompiledLinear


Pairs = list[tuple[torch.Tensor, torch.Tensor] | None]


def draw_pairs(ranks: Sequence[int | None], sizes: Sequence[int], seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[1] ** -0.5).bfloat16()

    return [
        None if rank is None else (normal(rank, 64), normal(size, rank))
        for rank, size in zip(ranks, sizes, strict=True)
    ]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("sizes", "ranks", "turns"),
    [
        ((64, 32, 40), (32, 32, 32), False),
        ((64, 32, 40), (8, None, 3), False),
        ((96, 96), (16, 40), True),
        ((96, 96), (None, 5), True),
    ],
)
def test_deltas_join_the_sums_of_their_rows_alone(
    library: CpuLibrary,
    num_threads: int,
    sizes: tuple[int, ...],
    ranks: tuple[int | None, ...],
    turns: bool,
    int8: bool,
) -> None:
    weight, _, x, other = draw(sum(sizes), 64)
    parts = weight.split(sizes)
    linear = CompiledLinear(library, in_turn(*parts) if turns else weight, None, weights="int8" if int8 else "plain")
    pairs = [draw_pairs(ranks, sizes, seed) for seed in (1, 2)]
    deltas = [CompiledDelta(library, some, sizes, 2.0, turns=turns) for some in pairs]
    dense = [torch.zeros(sum(sizes), 64) for _ in pairs]
    for whole, some in zip(dense, pairs, strict=True):
        for part, pair in zip(whole.split(sizes), some, strict=True):
            if pair is not None:
                part += 2.0 * pair[1].float() @ pair[0].float()
    if turns:
        dense = [in_turn(*whole.split(sizes)) for whole in dense]
    plain, joined = linear(x), linear.swiglu(x) if turns else linear.plus(x, other)
    alone = [linear(x, [(delta, slice(0, len(x)))]) for delta in deltas]
    for whole, found in zip(dense, alone, strict=True):
        torch.testing.assert_close(found.float(), plain.float() + x.float() @ whole.T, atol=0.08, rtol=2**-6)
    for rows in (1, 2, 3, 9, 12, 13, 16, 17, 36, 64):
        for first in {0, 1, rows // 3, rows - 1}:
            middle = (first + rows) // 2
            gated = [(deltas[0], slice(first, middle)), (deltas[1], slice(middle, rows))]
            found = linear(x[:rows], gated)
            assert torch.equal(found[:first], plain[:first]), (rows, first)
            assert torch.equal(found[first:middle], alone[0][first:middle]), (rows, first)
            assert torch.equal(found[middle:], alone[1][middle:rows]), (rows, first)
            found = linear.swiglu(x[:rows], gated) if turns else linear.plus(x[:rows], other[:rows], gated)
            assert torch.equal(found[:first], joined[:first]), (rows, first)


def test_a_delta_that_is_not_finite_stays_in_its_rows(library: CpuLibrary) -> None:
    weight, _, x, _ = draw(64, 64)
    linear = CompiledLinear(library, weight, None)
    ((a, b),) = [pair for pair in draw_pairs([4], [64], 1) if pair is not None]
    b[5, 1], a[0, 0] = torch.inf, torch.nan
    found = linear(x[:9], [(CompiledDelta(library, [(a, b)], [64], 1.0), slice(3, 9))])
    assert torch.equal(found[:3], linear(x[:3]))
    assert not found[3:].isfinite().any(dim=1).all()
