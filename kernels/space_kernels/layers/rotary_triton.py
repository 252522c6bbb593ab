"""Rotary embedding and storing into the pages on a GPU: one pass over the fused projection, in place."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.attention.attention import QKV, KVPages
from space_kernels.build.launch import Tuned
from space_kernels.fp8 import as_kept
from space_kernels.fp8_bits import narrowed
from space_kernels.layers.rotary import HeadCounts, HeadNorm

_HEADS = 4
"""Heads per program: a row of 48 heads (8B: 32 + 2·8) is 12 programs, enough to fill a GPU from 16 rows on."""


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # NaN compares false


@triton.jit
def _normed(first, second, weight, lanes, inside, eps, HALF: tl.constexpr, dtype: tl.constexpr):
    """Norm heads given as two halves [heads, HALF'], rounded to the dtype."""
    squares = tl.sum(first * first + second * second, 1) / (2 * HALF)
    scale = tl.rsqrt(squares + eps)[:, None]
    before = tl.load(weight + lanes, inside, other=0.0).to(tl.float32)[None, :]
    behind = tl.load(weight + HALF + lanes, inside, other=0.0).to(tl.float32)[None, :]
    return (first * scale * before).to(dtype).to(tl.float32), (second * scale * behind).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_slots"])
def _rotary_store(
    fused,
    cos,
    sin,
    key_pages,
    value_pages,
    slots,
    query_weight,
    key_weight,
    fused_stride,
    angle_stride,
    page_stride,
    head_stride,
    slot_stride,
    num_slots,
    eps,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    whole = (head < num_heads + 2 * kv_heads)[:, None] & inside[None, :]
    place = fused + row * fused_stride + head[:, None] * (2 * HALF) + lanes[None, :]
    dtype = fused.dtype.element_ty
    first = tl.load(place, whole, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, whole, other=0.0).to(tl.float32)

    is_query = (head < num_heads)[:, None]
    is_value = (head >= num_heads + kv_heads)[:, None]
    if NORMED:
        q_first, q_second = _normed(first, second, query_weight, lanes, inside, eps, HALF, dtype)
        k_first, k_second = _normed(first, second, key_weight, lanes, inside, eps, HALF, dtype)
        first = tl.where(is_query, q_first, tl.where(is_value, first, k_first))
        second = tl.where(is_query, q_second, tl.where(is_value, second, k_second))
    c = tl.load(cos + row * angle_stride + lanes, inside, other=0.0)[None, :]
    s = tl.load(sin + row * angle_stride + lanes, inside, other=0.0)[None, :]
    turned_first = tl.where(is_value, first, first * c - second * s).to(dtype)
    turned_second = tl.where(is_value, second, second * c + first * s).to(dtype)
    tl.store(place, turned_first, whole & ~is_value)
    tl.store(place + HALF, turned_second, whole & ~is_value)

    slot = tl.load(slots + row, row < num_slots, other=-1)
    if slot >= 0:
        group = (head - num_heads) % kv_heads
        block, offset = slot // block_size, slot % block_size
        at = block * page_stride + group[:, None].to(tl.int64) * head_stride + offset * slot_stride + lanes[None, :]
        kept_first = _finite(turned_first.to(tl.float32))
        kept_second = _finite(turned_second.to(tl.float32))
        if key_pages.dtype.element_ty == tl.uint8:
            kept_first, kept_second = narrowed(kept_first), narrowed(kept_second)
        else:
            kept_first, kept_second = kept_first.to(dtype), kept_second.to(dtype)
        is_key = (~is_query) & (~is_value)
        tl.store(key_pages + at, kept_first, whole & is_key)
        tl.store(key_pages + at + HALF, kept_second, whole & is_key)
        tl.store(value_pages + at, kept_first, whole & is_value)
        tl.store(value_pages + at + HALF, kept_second, whole & is_value)


def rotary_store(
    fused: Tensor,
    angles: tuple[Tensor, Tensor],
    pages: KVPages,
    slots: Tensor,
    heads: HeadCounts,
    norm: HeadNorm | None = None,
) -> QKV:
    """As `rotary.rotary_store`."""
    num_heads, kv_heads = heads
    cos, sin = angles
    num_rows, all_heads = len(fused), num_heads + 2 * kv_heads
    rows = fused.view(num_rows, all_heads, -1)
    half = rows.shape[2] // 2
    if num_rows:
        _rotary_store[(num_rows, triton.cdiv(all_heads, _HEADS))](
            fused,
            cos,
            sin,
            as_kept(pages.keys),
            as_kept(pages.values),
            slots,
            fused if norm is None else norm.query_weight,
            fused if norm is None else norm.key_weight,
            fused.stride(0),
            cos.stride(0),
            pages.keys.stride(0),
            pages.keys.stride(1),
            pages.keys.stride(2),
            len(slots),
            0.0 if norm is None else norm.eps,
            num_heads=num_heads,
            kv_heads=kv_heads,
            block_size=pages.keys.shape[2],
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            HEADS=_HEADS,
            NORMED=norm is not None,
            num_warps=_warps(half),
        )
    query, key, value = torch.split(rows, [num_heads, kv_heads, kv_heads], dim=1)
    return QKV(query, key, value)


def _warps(half: int) -> int:
    """Return one warp per 128 pairs of a program's heads: 4 pairs per thread."""
    return min(max(_HEADS * triton.next_power_of_2(half) // 128, 1), 4)


_TENSORS = ("fused", "query_weight", "key_weight")
_STRIDES = ("fused_stride", "angle_stride", "page_stride", "head_stride", "slot_stride")

TUNED = tuple(
    Tuned(
        _rotary_store,
        dict.fromkeys(_TENSORS, f"*{dtype}")
        | dict.fromkeys(("key_pages", "value_pages"), f"*{kept}")
        | {"cos": "*fp32", "sin": "*fp32", "slots": "*i64", "num_slots": "i32", "eps": "fp32"}
        | dict.fromkeys(_STRIDES, "i64:16"),
        {
            "num_heads": num_heads,
            "kv_heads": kv_heads,
            "block_size": 16,
            "HALF": half,
            "BLOCK": triton.next_power_of_2(half),
            "HEADS": _HEADS,
            "NORMED": normed,
        },
        _warps(half),
    )
    for dtype, kept in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "u8"), ("fp16", "u8"))
    for num_heads, kv_heads, half, normed in (
        (32, 8, 32, False),  # 1B
        (32, 8, 64, False),  # 8B
        (40, 8, 64, True),  # Qwen3
        (32, 8, 48, False),
        (8, 4, 128, False),
    )
)
