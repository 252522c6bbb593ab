"""Linears whose weights are the blocks of a GGUF: the gguf package's numbers, and products by integers bit by bit."""

from __future__ import annotations

from ctypes import byref
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from integer_products import Array, fused, rounded_groups
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledDelta, CompiledLinear, cpu_linear
from space_kernels.linear.gguf_blocks import KINDS, Blocks
from space_kernels.linear.group_weights import E2M1, GroupForm, GroupLinear, GroupWeights
from space_kernels.linear.row_table import RowTable
from space_kernels.linear.stored_parts import InTurn, chosen, dense
from torch import Tensor
from torch.nn import functional as F

WIDTH = 512
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where a block has float16 numbers. MXFP4's have an exponent of one byte, the first."""


def draw_blocks(kind: str, rows: int, *, seed: int = 0) -> Array:
    """Random bytes [rows, bytes of WIDTH weights]; scales are finite."""
    draw = np.random.default_rng(seed)
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (rows, WIDTH // weights, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = draw.integers(115, 124, blocks.shape[:2])
    for at in HALVES.get(kind, ()):
        halves = (draw.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def held(kind: str, rows: int, *, seed: int = 0) -> Blocks:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return Blocks("x", kind, torch.from_numpy(draw_blocks(kind, rows, seed=seed)), order)


def dequantised(blocks: Blocks) -> Tensor:
    """[out, in] float32, by the gguf package."""
    numbers = quants.dequantize(blocks.data.numpy(), GGMLQuantizationType[blocks.kind])
    return torch.from_numpy(numbers)[blocks.order]


def draw_rows(count: int = 70) -> Tensor:
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(1))
    x[40:60] *= torch.logspace(-30, 30, 20)[:, None]
    return x[:count].bfloat16()


def reference(kept: GroupWeights, x: Tensor) -> Array:
    """[R, out] float32 in numpy: integers within a group, then groups in ascending order."""
    codes, scale = rounded_groups(x.float().numpy())
    whole = np.array(E2M1)[kept.numbers.numpy()] if kept.form is GroupForm.MXFP4 else kept.numbers.numpy()
    numbers = whole.astype(np.int64).reshape(len(kept.numbers), -1, 32) - kept.form.offset
    steps = None if kept.scale_steps is None else kept.scale_steps.numpy().astype(np.int64)
    num_groups = numbers.shape[1]
    if kept.form is GroupForm.Q6_K and steps is not None:
        numbers = numbers * steps.reshape(len(numbers), num_groups, 2).repeat(16, axis=2)
    products = np.einsum("rgk,ngk->rng", codes, numbers)
    shared = kept.scale.float().numpy().repeat(num_groups // kept.scale.shape[1], axis=1)
    if kept.form in (GroupForm.Q4_K, GroupForm.Q5_K) and steps is not None:
        shared = shared * steps.astype(np.float32)
    total = scale * codes.sum(axis=2).astype(np.float32)
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    for g in range(num_groups):
        sums = fused(products[:, :, g].astype(np.float32), shared[None, :, g] * scale[:, g, None], sums)
        if kept.min is not None:
            least = kept.min.float().numpy().repeat(num_groups // kept.min.shape[1], axis=1)
            if kept.min_steps is not None:
                least = least * kept.min_steps.numpy().astype(np.float32)
            sums = fused(least[None, :, g], total[:, g, None], sums)
    return sums


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_numbers_are_the_files_own_bit_by_bit(kind: str) -> None:
    blocks = held(kind, 37)
    wanted = dequantised(blocks)
    assert (blocks.out_features, blocks.in_features) == wanted.shape
    assert torch.equal(dense([blocks]).view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(blocks.rows(slice(5, 20)).dense(), wanted[5:20])
    some = torch.tensor([3, 36, 0])
    assert torch.equal(chosen([blocks, blocks], some + 20), torch.cat([wanted, wanted])[some + 20])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_products_are_the_reference_bit_by_bit_on_every_processor(library: CpuLibrary, kind: str) -> None:
    blocks, x = held(kind, 101), draw_rows()
    linear = CompiledLinear(library, [blocks], None, wide=True)
    whole = linear(x)
    assert torch.equal(whole, torch.from_numpy(reference(blocks.rows(slice(None)), x)))
    for rows in (1, 2, 3, 5, 9, 12, 13, 36):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    form = blocks.form
    assert linear.weight.nbytes == 112 * WIDTH // 256 * form.bytes_of_groups  # seven panels
    near = GroupLinear([blocks], None, wide=True)(x[:40])
    torch.testing.assert_close(near, whole[:40], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sums_of_the_greatest_products_are_exact(library: CpuLibrary, kind: str) -> None:
    """Numbers at both ends, and codes of 127 and -127: no sum within a group may leave the bits that it is kept in."""
    data = draw_blocks(kind, 32)
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = data.reshape(32, WIDTH // weights, size)
    halves = {at + byte for at in HALVES.get(kind, ()) for byte in (0, 1)} or {0}
    for row, byte in enumerate([0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0] * 5):
        blocks[row, :, [at for at in range(size) if at not in halves]] = byte
    ones = torch.ones(WIDTH)
    signs = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0)
    x = torch.stack([ones, -ones, signs, torch.where(torch.arange(WIDTH) % 4 < 2, 1.0, -1.0)]).bfloat16()
    held_blocks = Blocks("x", kind, torch.from_numpy(blocks.reshape(32, -1)), torch.arange(32))
    whole = CompiledLinear(library, [held_blocks], None, wide=True)(x)
    assert torch.equal(whole, torch.from_numpy(reference(held_blocks.rows(slice(None)), x)))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "Q4_1")])
def test_parts_in_several_forms_are_each_computed_in_their_own(
    library: CpuLibrary, num_threads: int, kinds: tuple[str, ...]
) -> None:
    parts = [held(kind, size, seed=size) for kind, size in zip(kinds, (96, 64, 40), strict=True)]
    x, other = draw_rows(), torch.randn(70, 200).bfloat16()
    joined = CompiledLinear(library, parts, None, wide=True)
    apart = [CompiledLinear(library, [part], None, wide=True) for part in parts]
    for rows in (1, 2, 9, 13, 70):
        assert torch.equal(joined(x[:rows]), torch.cat([linear(x[:rows]) for linear in apart], dim=1)), rows
    summed = CompiledLinear(library, parts, None).plus(x, other)
    assert torch.equal(summed, (joined(x) + other).bfloat16())
    near = GroupLinear(parts, None, wide=True)(x[:40])
    torch.testing.assert_close(near, joined(x[:40]), atol=2e-3, rtol=1e-4)
    with pytest.raises(ValueError, match="multiples of 16 outputs"):
        CompiledLinear(library, parts[::-1], None)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_gate_and_up_alternate_and_gated_rows_join(library: CpuLibrary, num_threads: int, kind: str) -> None:
    gate, up, x = held(kind, 4128, seed=2), held(kind, 4128, seed=3), draw_rows(20)
    linear = CompiledLinear(library, [InTurn(gate, up)], None)
    apart = [CompiledLinear(library, [one], None, wide=True)(x) for one in (gate, up)]
    whole = linear.swiglu(x)
    torch.testing.assert_close(whole.float(), F.silu(apart[0]) * apart[1], atol=1e-5, rtol=2**-7)
    draw = torch.Generator().manual_seed(4)
    a, b = (torch.randn(*size, generator=draw).bfloat16() / 8 for size in ((8, WIDTH), (4128, 8)))
    delta = CompiledDelta(library, [(a, b), None], [4128, 4128], 2.0, turns=True)
    alone = linear.swiglu(x, [(delta, slice(0, len(x)))])
    assert not torch.equal(alone, whole)
    for rows in (1, 2, 9, 20):
        for first in {0, rows // 3, rows - 1}:
            found = linear.swiglu(x[:rows], [(delta, slice(first, rows))])
            assert torch.equal(found[:first], whole[:first])
            assert torch.equal(found[first:], alone[first:rows])


def test_every_kind_of_processor_gives_the_same_bits() -> None:
    x = draw_rows()
    for kind in sorted(KINDS):
        blocks = held(kind, 64)
        first, *others = (CompiledLinear(library_for(one), [blocks], None)(x) for one in own_kinds())
        assert all(torch.equal(first, other) for other in others)


def test_outputs_of_zeros_may_follow(library: CpuLibrary) -> None:
    x = draw_rows(5)
    for kind in sorted(KINDS):
        blocks = held(kind, 60)
        padded = CompiledLinear(library, [blocks.padded(4)], None, wide=True)(x)
        assert torch.equal(padded[:, :60], CompiledLinear(library, [blocks], None, wide=True)(x))
        assert not padded[:, 60:].any()


def test_a_scale_that_is_not_finite_is_refused() -> None:
    blocks = held("Q4_K", 16)
    blocks.data[3, 0:2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a scale of x \(Q4_K\) is not finite"):
        blocks.rows(slice(None))
    with pytest.raises(ValueError, match="not quantised to Q4_K"):
        GroupWeights.of(torch.zeros(2, 256), GroupForm.Q4_K)


def test_the_best_there_is_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(cpu_linear([held("Q8_0", 16)], None)) is CompiledLinear
    monkeypatch.setattr("space_kernels.linear.cpu_linear.cpu_library", lambda: None)
    assert type(cpu_linear([held("Q8_0", 16)], None)) is GroupLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_looked_up_in_blocks_are_those_of_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    blocks = held(kind, 50)
    ids = torch.tensor([[3, 49, 0], [3, 17, 2]])
    assert torch.equal(RowTable(blocks, dtype).rows(ids), dequantised(blocks).to(dtype)[ids])
    with pytest.raises(IndexError, match="An id is outside of the table's 50"):
        RowTable(blocks, dtype).rows(torch.tensor([50]))


@pytest.mark.parametrize("library", own_kinds())
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_processor_kind_looks_up_the_same_rows(kind: str, library: str) -> None:
    blocks = replace(held(kind, 50), order=torch.arange(50))
    ids, found = torch.arange(50).flip(0), torch.empty(50, WIDTH, dtype=torch.bfloat16)
    table = RowTable(blocks, torch.bfloat16).struct()
    library_for(library).look_up(byref(table), ids.data_ptr(), len(ids), found.data_ptr())
    assert torch.equal(found, dequantised(blocks).bfloat16()[ids])
