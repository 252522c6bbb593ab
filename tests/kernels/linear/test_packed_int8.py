"""Linears of eight bits as GPTQ and compressed-tensors keep them: the file's own numbers, and products by integers bit
by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from integer_products import WIDTH, Array, draw_rows, fused, rounded_groups
from integer_products import PackedCase as Case
from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.group_weights import GroupForm, GroupLinear, GroupWeights
from space_kernels.linear.packed_int8 import ByteLayout, PackedInt8
from space_kernels.linear.stored_parts import InTurn, chosen, dense
from torch import Tensor

CASES = [
    Case(ByteLayout.WORDS_OF_INPUTS),
    Case(ByteLayout.WORDS_OF_INPUTS, 128, acts=True),
    Case(ByteLayout.WORDS_OF_INPUTS, None),
    Case(ByteLayout.WORDS, 128),
    Case(ByteLayout.WORDS, 128, width=200),
    Case(ByteLayout.WORDS, None, width=100),
    Case(ByteLayout.BYTES, 64),
    Case(ByteLayout.BYTES, None),
]


@dataclass(frozen=True)
class Drawn:
    """A weight as numpy has it, and as a file does."""

    numbers: Array  # [out, in] -128 .. 127
    scale: Array  # [out, groups]
    group: Array  # [in]: of each input
    kept: PackedInt8

    @property
    def dense(self) -> Tensor:
        """[out, in] float32"""
        scale = self.scale[:, self.group].astype(np.float32)
        return torch.from_numpy(self.numbers.astype(np.float32) * scale)


def draw(case: Case, out: int = 104, *, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    size = case.group_size or case.width
    num_groups = -(-case.width // size)
    numbers = rng.integers(-128, 128, (out, case.width)).astype(np.int8)
    scale = (rng.standard_normal((out, num_groups)) * 0.01).astype(np.float32 if num_groups == 1 else np.float16)
    group = np.arange(case.width) // size
    if case.acts:
        group = np.random.default_rng(7).permutation(group)
    stored = torch.from_numpy(numbers)
    if case.layout is not ByteLayout.BYTES:
        raised = np.pad((numbers.astype(np.int16) + 128).astype(np.uint8), ((0, 0), (0, -case.width % 4)))
        stored = torch.from_numpy(raised.view(np.int32))
        stored = stored.T.contiguous() if case.layout is ByteLayout.WORDS_OF_INPUTS else stored
    more: Any = {"g_idx": torch.from_numpy(group.astype(np.int32))} if case.acts else {}
    kept = PackedInt8.of(
        "x",
        case.layout,
        stored,
        torch.from_numpy(scale),
        in_features=case.width,
        group_size=case.group_size,
        **more,
    )
    assert kept is not None
    return Drawn(numbers, scale, group, kept)


def reference(drawn: Drawn, x: Tensor) -> Tensor:
    """[R, out] float32 in numpy: integers within 32 inputs, then sums in ascending order; one scale for all comes
    last."""
    order = np.argsort(drawn.group, kind="stable")
    codes, scale = rounded_groups(x.float().numpy()[:, order])
    numbers = drawn.numbers[:, order].astype(np.int64)
    numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32))).reshape(len(numbers), -1, 32)
    products = np.einsum("rgk,ngk->rng", codes, numbers).astype(np.float32)
    one = drawn.scale.shape[1] == 1
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    for g in range(products.shape[2]):
        by = scale[:, g, None] * np.ones_like(sums)
        if not one:
            by = drawn.scale[:, drawn.group[order][32 * g]].astype(np.float32)[None] * scale[:, g, None]
        sums = fused(products[:, :, g], by, sums)
    return torch.from_numpy(sums * drawn.scale[None, :, 0] if one else sums)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_numbers_are_the_files_own_bit_by_bit(case: Case) -> None:
    drawn = draw(case)
    assert torch.equal(dense([drawn.kept]), drawn.dense)
    assert torch.equal(drawn.kept.rows(slice(5, 21)).dense(), drawn.dense[5:21])
    some = torch.tensor([3, 103, 0])
    assert torch.equal(chosen([drawn.kept, drawn.kept], some + 21), torch.cat([drawn.dense] * 2)[some + 21])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_the_reference_bit_by_bit_on_every_processor(library: CpuLibrary, case: Case) -> None:
    drawn, x = draw(case), draw_rows(case.width)
    linear = CompiledLinear(library, [drawn.kept], None, wide=True)
    whole = linear(x)
    assert torch.equal(whole, reference(drawn, x))
    for rows in (1, 2, 5, 13, 36):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    near = GroupLinear([drawn.kept], None, wide=True)(x[:40])
    torch.testing.assert_close(near, whole[:40], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(("size", "more"), [(128, 96 * WIDTH // 32 * 2), (None, 96 * 4)])
def test_it_is_held_in_eight_bits_and_its_scales(library: CpuLibrary, size: int | None, more: int) -> None:
    kept = draw(Case(ByteLayout.WORDS, size), 96).kept
    linear = CompiledLinear(library, [kept], None)
    held = linear.weight.nbytes + (0 if linear.scale is None else linear.scale.nbytes)
    assert held == kept.num_bytes == 96 * WIDTH + more


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_and_up_alternate_parts_join_and_zeros_follow(library: CpuLibrary, case: Case) -> None:
    (gate, up), x = (draw(case, 32, seed=seed).kept for seed in (2, 3)), draw_rows(case.width)
    apart = [CompiledLinear(library, [one], None, wide=True)(x) for one in (gate, up)]
    pairs = CompiledLinear(library, [InTurn(gate, up)], None, wide=True)(x).view(len(x), 2, 2, 16)
    for number, alone in enumerate(apart):
        assert torch.equal(pairs[:, :, number].flatten(1), alone)
    assert torch.equal(CompiledLinear(library, [gate, up], None, wide=True)(x), torch.cat(apart, dim=1))
    padded = CompiledLinear(library, [gate.padded(16)], None, wide=True)(x[:5])
    assert torch.equal(padded, torch.cat([apart[0][:5], torch.zeros(5, 16)], dim=1))


def test_a_scale_for_each_output_is_beside_no_other_form(library: CpuLibrary) -> None:
    parts = [draw(Case(ByteLayout.BYTES, size), 32).kept for size in (None, 64)]
    with pytest.raises(ValueError, match="below others of the same form alone"):
        CompiledLinear(library, parts, None)
    with pytest.raises(ValueError, match="not quantised to INT8"):
        GroupWeights.of(torch.zeros(2, 256), GroupForm.INT8)


def test_what_is_in_no_form_is_not_kept_and_what_does_not_fit_is_named() -> None:
    numbers, layout = torch.zeros(8, 64, dtype=torch.int8), ByteLayout.BYTES
    same: Any = {"in_features": 64, "group_size": 32}
    halves = torch.ones(8, 2, dtype=torch.float16)
    assert PackedInt8.of("x", layout, numbers, torch.ones(8, 4), in_features=64, group_size=16) is None
    assert PackedInt8.of("x", layout, numbers, torch.full((8, 2), 1.0001), **same) is None
    assert PackedInt8.of("x", layout, numbers, torch.full((8, 1), 1.0001), in_features=64, group_size=None) is not None
    uneven = torch.tensor([0] * 33 + [1] * 31)
    assert PackedInt8.of("x", layout, numbers, halves, **same, g_idx=uneven) is None
    with pytest.raises(ValueError, match="4 scales for 64 inputs in groups of 32"):
        PackedInt8.of("x", layout, numbers, torch.ones(8, 4), **same)
    with pytest.raises(ValueError, match=r"its numbers are \(7, 64\) torch.int8, and \(8, 64\)"):
        PackedInt8.of("x", layout, numbers[1:], halves, **same)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    kept = draw(Case(ByteLayout.WORDS)).kept
    kept.scale[3, 0] = torch.inf
    with pytest.raises(ValueError, match=r"a scale of x \(compressed-tensors of eight bits\) is not finite"):
        kept.rows(slice(None))
