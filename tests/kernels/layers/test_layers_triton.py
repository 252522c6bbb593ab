"""Norms, SwiGLU and rotary embedding on a GPU (or interpreted): equal to the reference, and rows are independent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from space_kernels.attention.attention import QKV, KVPages
from space_kernels.layers import layers
from space_kernels.layers.layers import HeadCounts, HeadNorm, angles
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from space_kernels.layers import layers_triton

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
    found, wanted = layers_triton.rms_norm(x, weight, EPS), layers.rms_norm(x, weight, EPS)
    torch.testing.assert_close(found, wanted, rtol=ulps(dtype), atol=1e-6)
    found_pair = layers_triton.add_rms_norm(x, residual, weight, EPS)
    wanted_pair = layers.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(found_pair[1], wanted_pair[1])
    torch.testing.assert_close(found_pair[0], wanted_pair[0], rtol=ulps(dtype), atol=1e-6)


def test_the_reference_is_the_definition_in_double_precision() -> None:
    x, residual, weight = (t.cpu() for t in draw(3, 96, torch.float32))
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(layers.rms_norm(x, weight, EPS).double(), wanted, rtol=1e-6, atol=1e-6)
    normed, total = layers.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, layers.rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_norm_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    x, residual, weight = draw(9, 320, dtype)
    alone, summed = layers_triton.rms_norm(x, weight, EPS), layers_triton.add_rms_norm(x, residual, weight, EPS)
    for count in (1, 4, 7):
        assert torch.equal(layers_triton.rms_norm(x[:count], weight, EPS), alone[:count])
        some = layers_triton.add_rms_norm(x[:count], residual[:count], weight, EPS)
        assert all(torch.equal(part, whole[:count]) for part, whole in zip(some, summed, strict=True))


def test_rows_may_be_a_slice_of_wider_ones() -> None:
    x, residual, weight = draw(4, 64, torch.float32)
    wide = torch.cat([x, residual], dim=1)
    assert torch.equal(layers_triton.rms_norm(wide[:, :64], weight, EPS), layers_triton.rms_norm(x, weight, EPS))


def test_rows_too_wide_for_registers_are_refused() -> None:
    x = torch.zeros(1, 40_000, device=DEVICE)
    with pytest.raises(ValueError, match="at most 32768"):
        layers_triton.rms_norm(x, x[0], EPS)


def test_no_rows_give_no_rows() -> None:
    x = torch.zeros(0, 8, device=DEVICE)
    assert layers_triton.rms_norm(x, torch.ones(8, device=DEVICE), EPS).shape == (0, 8)


def draw_gates(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    both = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner)) * 4
    return both.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 1024, 1500])
def test_the_activation_is_the_references(inner: int, dtype: torch.dtype) -> None:
    both = draw_gates(3, inner, dtype)
    tolerance = max(torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(layers_triton.swiglu(both), layers.swiglu(both), rtol=tolerance, atol=1e-6)


def test_the_reference_is_silu_of_the_front_times_the_back() -> None:
    both = draw_gates(3, 24, torch.float32).cpu()
    gate, up = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(layers.swiglu(both).double(), F.silu(gate) * up, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, where kernels are interpreted
def test_a_gate_far_below_zero_closes_and_does_not_overflow() -> None:
    both = torch.tensor([[-200.0, 200.0, 3.0, 5.0]], device=DEVICE)
    for found in (layers.swiglu(both), layers_triton.swiglu(both)):
        assert found.tolist() == [[0.0, 1000.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_activation_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    both = draw_gates(9, 96, dtype)
    both[8] = float("nan")
    whole = layers_triton.swiglu(both)
    for count in (1, 3, 8):
        assert torch.equal(layers_triton.swiglu(both[:count]), whole[:count])


STORES = [layers.rotary_store, layers_triton.rotary_store]


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
        heads, groups, width, fused, positions=torch.tensor([0, 1, 2, 40, 41, 3, 0], device=DEVICE),
        slots=torch.tensor([16, 17, -1, 79, 0], device=DEVICE),  # rows 5 and 6 are masks
        norm=HeadNorm(weights[0], weights[1], 1e-6) if normed else None,
    )  # fmt: skip


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
    whole = drawn.run(layers_triton.rotary_store)
    for count in (1, 4, 6):
        part = drawn.run(layers_triton.rotary_store, count)
        assert all(torch.equal(a, b[:count]) for a, b in zip(part[:3], whole[:3], strict=True))


def test_a_step_of_masks_alone_stores_nothing() -> None:
    drawn = case(torch.float32)
    drawn.slots = drawn.slots[:0]
    for store in STORES:
        assert all(pages.isnan().all() for pages in drawn.run(store)[3:])
