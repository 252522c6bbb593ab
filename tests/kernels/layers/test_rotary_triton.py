"""Rotary embedding and storing into the pages: reference and kernel against each other and the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from space_kernels.attention.attention import QKV, KVPages
from space_kernels.layers import rotary
from space_kernels.layers.rotary import HeadCounts, HeadNorm, angles
from torch import Tensor

pytest.importorskip("triton")
from space_kernels.layers import rotary_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter does not round to bfloat16."""

STORES = [rotary.rotary_store, rotary_triton.rotary_store]


@dataclass
class Case:
    """A fused projection of R rows, and pages whose unwritten slots hold NaN."""

    heads: int
    groups: int
    width: int
    fused: Tensor
    positions: Tensor
    slots: Tensor
    norm: HeadNorm | None
    block_size: int = 16

    def run(self, store: Callable[..., QKV], rows: int | None = None) -> list[Tensor]:
        """query, key, value, key pages, value pages: of the first rows."""
        count = len(self.fused) if rows is None else rows
        shape = (5, self.groups, self.block_size, self.width)
        pages = KVPages(*(torch.full(shape, math.nan, dtype=self.fused.dtype, device=DEVICE) for _ in range(2)))
        frequencies = 10_000.0 ** -(torch.arange(0, self.width, 2, device=DEVICE) / self.width)
        turns = angles(self.positions[:count], frequencies)
        slots = self.slots[:count]
        fused = self.fused[:count].clone()
        out = store(fused, turns, pages, slots, HeadCounts(self.heads, self.groups), self.norm)
        return [*out, *pages]


def case(dtype: torch.dtype, heads: int = 4, groups: int = 2, width: int = 16, *, normed: bool = False) -> Case:
    generator = torch.Generator().manual_seed(heads * width)
    fused = torch.randn(7, (heads + 2 * groups) * width, generator=generator).to(DEVICE, dtype)
    weights = torch.randn(2, width, generator=generator).to(DEVICE, dtype)
    return Case(
        heads,
        groups,
        width,
        fused,
        positions=torch.tensor([0, 1, 2, 40, 41, 3, 0], device=DEVICE),
        slots=torch.tensor([16, 17, -1, 79, 0], device=DEVICE),  # rows 5 and 6 are masks
        norm=HeadNorm(weights[0], weights[1], 1e-6) if normed else None,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "groups", "width", "normed"), [(4, 4, 16, False), (6, 2, 24, False), (4, 1, 64, True), (3, 1, 128, True)]
)
def test_the_kernel_is_the_reference(heads: int, groups: int, width: int, normed: bool, dtype: torch.dtype) -> None:
    drawn = case(dtype, heads, groups, width, normed=normed)
    wanted, found = (drawn.run(store) for store in STORES)
    # a normed head is rounded before it is turned: where that falls apart by one unit, so does the result
    rtol = (2 if normed else 1) * max(torch.finfo(dtype).eps, 4e-6)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * 4, equal_nan=True)


@pytest.mark.parametrize("store", STORES)
def test_each_pair_is_turned_by_its_angle(store: Callable[..., QKV]) -> None:
    drawn = case(torch.float32)
    query, key, value, _, _ = drawn.run(store)
    before = drawn.fused.view(7, 8, 16).double().cpu()
    for row, position in enumerate(drawn.positions.tolist()):
        for pair in range(8):
            angle = position * 10_000.0 ** -(2 * pair / 16)
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
            wanted = before[row, :6, [pair, pair + 8]] @ turn.T
            found = torch.cat([query, key], dim=1)[row, :, [pair, pair + 8]].double().cpu()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(value.cpu().double(), before[:, 6:])


@pytest.mark.parametrize("store", STORES)
def test_only_rows_with_a_slot_are_stored(store: Callable[..., QKV]) -> None:
    drawn = case(torch.float32)
    _, key, value, key_pages, value_pages = drawn.run(store)
    written = {slot: row for row, slot in enumerate(drawn.slots.tolist()) if slot >= 0}
    for pages, rows in ((key_pages, key), (value_pages, value)):
        for slot in range(80):
            held = pages[slot // 16, :, slot % 16]
            if slot in written:
                assert torch.equal(held, rows[written[slot]])
            else:
                assert held.isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where kernels are interpreted
@pytest.mark.parametrize("store", STORES)
def test_what_is_not_finite_is_stored_as_zero(store: Callable[..., QKV]) -> None:
    drawn = case(torch.float32)
    drawn.fused[0] = math.nan
    drawn.fused[1, -32:] = math.inf  # the values
    _, key, _, key_pages, value_pages = drawn.run(store)
    assert not key_pages[1, :, 0].any()
    assert not value_pages[1, :, :2].any()
    assert torch.equal(key_pages[1, :, 1], key[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    drawn = case(dtype, width=64, normed=True)
    whole = drawn.run(rotary_triton.rotary_store)
    for count in (1, 4, 6):
        part = drawn.run(rotary_triton.rotary_store, count)
        assert all(torch.equal(a, b[:count]) for a, b in zip(part[:3], whole[:3], strict=True))


def test_a_step_of_masks_alone_stores_nothing() -> None:
    drawn = case(torch.float32)
    drawn.slots = drawn.slots[:0]
    for store in STORES:
        assert all(pages.isnan().all() for pages in drawn.run(store)[3:])
