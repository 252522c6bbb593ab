"""Linears of four bits as AWQ, GPTQ and compressed-tensors pack them: the numbers, and products by integers bit by
bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from integer_products import WIDTH, Array, draw_rows, fused, rounded_groups
from integer_products import PackedCase as Case
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledDelta, CompiledLinear, cpu_linear
from space_kernels.linear.group_weights import GroupForm, GroupLinear, GroupWeights
from space_kernels.linear.packed_int4 import Layout, PackedInt4
from space_kernels.linear.stored_parts import InTurn, chosen, dense
from torch import Tensor
from torch.nn import functional as F

CASES = [
    Case(Layout.AWQ),
    Case(Layout.AWQ, 64),
    Case(Layout.AWQ, 128),
    Case(Layout.AWQ, None),
    Case(Layout.GPTQ),
    Case(Layout.GPTQ, 64, acts=True),
    Case(Layout.GPTQ, 128),
    Case(Layout.GPTQ, 128, acts=True),
    Case(Layout.GPTQ, 128, acts=True, width=200),
    Case(Layout.GPTQ, None),
    Case(Layout.ROWS),
    Case(Layout.ROWS, 128),
    Case(Layout.ROWS, 192),
    Case(Layout.ROWS, None, width=96),
]


@dataclass(frozen=True)
class Drawn:
    """A weight as numpy has it, and as a file does."""

    numbers: Array  # [out, in] 0 .. 15
    zero: Array  # [out, groups]
    scale: Array  # [out, groups] float16
    group: Array  # [in]: of each input
    kept: PackedInt4

    @property
    def dense(self) -> Array:
        """[out, in] float32"""
        steps = self.numbers.astype(np.float32) - self.zero[:, self.group].astype(np.float32)
        found: Array = steps * self.scale[:, self.group].astype(np.float32)
        return found


def words_of(values: Array, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """[rows, n] -> [rows, ⌈n/8⌉] int32: nibble k of a word has the value order[k] of eight."""
    whole = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).reshape(len(values), -1, 8).astype(np.uint32)
    found = np.zeros(whole.shape[:2], dtype=np.uint32)
    for nibble, value in enumerate(order):
        found |= whole[:, :, value] << np.uint32(4 * nibble)
    return torch.from_numpy(found.view(np.int32))


def draw(case: Case, out: int = 104, *, seed: int = 0, order_seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    size = case.group_size or case.width
    num_groups = -(-case.width // size)
    numbers, zero = rng.integers(0, 16, (out, case.width)), rng.integers(0, 16, (out, num_groups))
    scale = (rng.standard_normal((out, num_groups)) * 0.01).astype(np.float16)
    group = np.arange(case.width) // size
    if case.acts:
        group = np.random.default_rng(order_seed).permutation(group)
    same: Any = {"in_features": case.width, "group_size": case.group_size}
    scales = torch.from_numpy(scale)
    if case.layout is Layout.AWQ:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        kept = PackedInt4.of("x", case.layout, words_of(numbers.T, order), scales, words_of(zero.T, order), **same)
    elif case.layout is Layout.GPTQ:
        g_idx = torch.from_numpy(group.astype(np.int32))
        words, zeros = words_of(numbers).T.contiguous(), words_of((zero.T - 1) % 16)
        kept = PackedInt4.of("x", case.layout, words, scales, zeros, **same, least=1, g_idx=g_idx)
    else:
        kept = PackedInt4.of("x", case.layout, words_of(numbers), scales, words_of(zero.T), **same)
    assert kept is not None
    return Drawn(numbers, zero, scale, group, kept)


def reference(drawn: Drawn, x: Tensor) -> Array:
    """[R, out] float32 in numpy: inputs in the order of their groups, rounded 32 at a time; integers within 32, then
    sums in ascending order."""
    order = np.argsort(drawn.group, kind="stable")
    codes, scale = rounded_groups(x.float().numpy()[:, order])
    steps = (drawn.numbers - drawn.zero[:, drawn.group])[:, order]
    steps = np.pad(steps, ((0, 0), (0, -steps.shape[1] % 32))).reshape(len(steps), -1, 32)
    products = np.einsum("rgk,ngk->rng", codes, steps).astype(np.float32)
    weight_scale = drawn.scale[:, drawn.group[order][::32]].astype(np.float32)
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    for g in range(products.shape[2]):
        sums = fused(products[:, :, g], weight_scale[None, :, g] * scale[:, g, None], sums)
    return sums


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_numbers_are_the_files_own_bit_by_bit(case: Case) -> None:
    drawn = draw(case)
    wanted, kept = torch.from_numpy(drawn.dense), drawn.kept
    assert (kept.out_features, kept.in_features) == wanted.shape
    assert torch.equal(dense([kept]).view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(kept.rows(slice(5, 21)).dense(), wanted[5:21])
    some = torch.tensor([3, 103, 0])
    assert torch.equal(chosen([kept, kept], some + 21), torch.cat([wanted, wanted])[some + 21])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_the_reference_bit_by_bit_on_every_processor(library: CpuLibrary, case: Case) -> None:
    drawn, x = draw(case), draw_rows(case.width)
    linear = CompiledLinear(library, [drawn.kept], None, wide=True)
    whole = linear(x)
    assert torch.equal(whole, torch.from_numpy(reference(drawn, x)))
    for rows in (1, 2, 3, 4, 5, 6, 9, 12, 13, 36):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    near = GroupLinear([drawn.kept], None, wide=True)(x[:40])
    torch.testing.assert_close(near, whole[:40], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(("size", "bits"), [(32, 4.75), (64, 4.375), (128, 4.1875)])
def test_it_is_held_in_the_bytes_of_its_groups(library: CpuLibrary, size: int, bits: float) -> None:
    kept = draw(Case(Layout.GPTQ, size), 96).kept
    held = CompiledLinear(library, [kept], None).weight.nbytes
    assert held == kept.num_bytes == 96 * WIDTH * bits / 8
    assert held == 96 * WIDTH // 256 * kept.form.bytes_of_groups


@pytest.mark.parametrize("case", [CASES[2], CASES[7]], ids=str)
def test_gate_and_up_alternate_and_gated_rows_join(library: CpuLibrary, num_threads: int, case: Case) -> None:
    gate, up, x = draw(case, 4128, seed=2).kept, draw(case, 4128, seed=3).kept, draw_rows(WIDTH, 20)
    linear = CompiledLinear(library, [InTurn(gate, up)], None)
    apart = [CompiledLinear(library, [one], None, wide=True)(x) for one in (gate, up)]
    whole = linear.swiglu(x)
    torch.testing.assert_close(whole.float(), F.silu(apart[0]) * apart[1], atol=1e-5, rtol=2**-7)
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(*size, generator=generator).bfloat16() / 8 for size in ((8, WIDTH), (4128, 8)))
    order = linear.input_order
    assert (order is None) != case.acts
    delta = CompiledDelta(library, [(a, b), None], [4128, 4128], 2.0, turns=True, weights="packed", input_order=order)
    alone = linear.swiglu(x, [(delta, slice(0, len(x)))])
    low = x.float() @ a.float().T @ (2.0 * b.float()).T
    near = F.silu(apart[0] + low) * apart[1]
    assert (alone.float() - near).abs().max() < 0.03 * near.abs().max()
    assert not torch.equal(alone, whole)
    for rows in (1, 2, 9, 20):
        for first in {0, rows // 3, rows - 1}:
            found = linear.swiglu(x[:rows], [(delta, slice(first, rows))])
            assert torch.equal(found[:first], whole[:first])
            assert torch.equal(found[first:], alone[first:rows])


def test_inputs_of_parts_below_each_other_are_in_the_same_order(library: CpuLibrary) -> None:
    case, x = Case(Layout.GPTQ, 128, acts=True), draw_rows(WIDTH, 20)
    parts = [draw(case, 32, seed=seed).kept for seed in (1, 2)]
    joined = CompiledLinear(library, parts, None)(x)
    assert torch.equal(joined, torch.cat([CompiledLinear(library, [part], None)(x) for part in parts], dim=1))
    other = draw(case, 32, seed=3, order_seed=1).kept
    for refused in ([*parts, other], [parts[0], draw(Case(Layout.GPTQ, 128), 32).kept]):
        with pytest.raises(ValueError, match="inputs in the same order"):
            CompiledLinear(library, refused, None)


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[11]], ids=str)
def test_every_kind_of_processor_gives_the_same_bits(case: Case) -> None:
    kept, x = draw(case, 64).kept, draw_rows(WIDTH)
    first, *others = (CompiledLinear(library_for(one), [kept], None)(x) for one in own_kinds())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[11]], ids=str)
def test_outputs_of_zeros_may_follow(library: CpuLibrary, case: Case) -> None:
    kept, x = draw(case, 56).kept, draw_rows(WIDTH, 5)
    padded = CompiledLinear(library, [kept.padded(8)], None, wide=True)(x)
    assert torch.equal(padded[:, :56], CompiledLinear(library, [kept], None, wide=True)(x))
    assert not padded[:, 56:].any()


def test_scales_that_float16_has_may_be_of_another_dtype() -> None:
    drawn = draw(Case(Layout.ROWS))
    kept = drawn.kept

    def remade(scale: Tensor) -> PackedInt4 | None:
        return PackedInt4.of("x", Layout.ROWS, kept.words, scale, kept.zeros, in_features=WIDTH, group_size=32)

    wide = remade(kept.scale.float())
    assert wide is not None
    assert torch.equal(wide.rows(slice(None)).dense(), torch.from_numpy(drawn.dense))
    assert remade(kept.scale.float() * 1.0001) is None
    assert remade(torch.full_like(kept.scale, 2.0**-30, dtype=torch.bfloat16)) is None


def test_groups_that_are_in_no_form_are_not_kept() -> None:
    words, scale = torch.zeros(64 // 8, 8, dtype=torch.int32), torch.ones(8, 4, dtype=torch.float16)
    zeros = torch.zeros(4, 1, dtype=torch.int32)
    assert PackedInt4.of("x", Layout.GPTQ, words, scale, zeros, in_features=64, group_size=16) is None
    uneven = torch.tensor([0] * 33 + [1] * 31)
    scale, zeros = scale[:, :2], zeros[:2]
    same: Any = {"in_features": 64, "group_size": 32}
    assert PackedInt4.of("x", Layout.GPTQ, words, scale, zeros, **same, g_idx=uneven) is None
    with pytest.raises(ValueError, match="4 scales for 64 inputs in groups of 32"):
        PackedInt4.of("x", Layout.GPTQ, words, torch.ones(8, 4), zeros, **same)
    with pytest.raises(ValueError, match=r"its words are \(7, 8\) torch.int32"):
        PackedInt4.of("x", Layout.GPTQ, words[1:], scale, zeros, **same)
    with pytest.raises(ValueError, match="words of zero points for 2 groups"):
        PackedInt4.of("x", Layout.GPTQ, words, scale, zeros[:1], **same)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    kept = draw(Case(Layout.AWQ)).kept
    kept.scale[3, 0] = torch.inf
    with pytest.raises(ValueError, match=r"a scale of x \(AWQ\) is not finite"):
        kept.rows(slice(None))
    with pytest.raises(ValueError, match="not quantised to U4_64"):
        GroupWeights.of(torch.zeros(2, 256), GroupForm.U4_64)


def test_the_best_there_is_for_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = draw(CASES[0], 16).kept
    assert type(cpu_linear([kept], None)) is CompiledLinear
    monkeypatch.setattr("space_kernels.linear.cpu_linear.cpu_library", lambda: None)
    assert type(cpu_linear([kept], None)) is GroupLinear
