"""RMS norm, SwiGLU and rotary embedding with the store into the pages, on a GPU: one pass over each row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.attention.attention import QKV, KVPages
from space_kernels.build.launch import Tuned
from space_kernels.fp8 import as_kept
from space_kernels.fp8_bits import narrowed
from space_kernels.layers.layers import HeadCounts, HeadNorm

_WIDEST = 32768
"""Most elements that a program of 16 warps keeps in registers: 64 float32 per thread."""


@triton.jit
def _rms_norm(x, weight, out, x_stride, out_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    wide = tl.load(x + row * x_stride + lanes, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    gain = tl.load(weight + lanes, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + lanes, (wide * scale * gain).to(out.dtype.element_ty), inside)


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    wide = tl.load(x + row * x_stride + lanes, inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row * residual_stride + lanes, inside, other=0.0).to(tl.float32)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + row * total_stride + lanes, rounded, inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    gain = tl.load(weight + lanes, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + lanes, (wide * scale * gain).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.rms_norm`: x [..., D], weight [D] -> [..., D]. Rows may have any stride (a slice of a wider tensor).
    Raises ValueError for rows too wide for a program's registers."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block, warps = _shape(x.shape[-1])
    if len(rows):
        _rms_norm[(len(rows),)](
            rows, weight, out, rows.stride(0), out.stride(0), eps, D=x.shape[-1], BLOCK=block, num_warps=warps
        )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `layers.add_rms_norm`: x, residual [R, D] -> (normed, sum), [R, D] each."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    block, warps = _shape(x.shape[-1])
    if len(x):
        _add_rms_norm[(len(x),)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            total.stride(0),
            eps,
            D=x.shape[-1],
            BLOCK=block,
            num_warps=warps,
        )
    return out, total


def _shape(width: int) -> tuple[int, int]:
    """Return block size and warps for rows of this width: one warp per 512 elements (16 per thread), 1 to 16 warps."""
    if width > _WIDEST:
        raise ValueError(f"Rows of {width} elements do not fit a program's registers; at most {_WIDEST} do.")
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


_BLOCK = 1024
"""Elements per program, 8 per thread: 16-byte loads of bfloat16."""


@triton.jit
def _swiglu(gate_up, out, gate_up_stride, out_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < inner
    start = gate_up + row * gate_up_stride
    gate = tl.load(start + lanes, inside, other=0.0).to(tl.float32)
    up = tl.load(start + inner + lanes, inside, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + lanes, active.to(out.dtype.element_ty), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up of [R, 2·I], gate first -> [R, I]. Computed in float32, rounded to the dtype once."""
    num_rows, inner = len(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty(num_rows, inner)
    if num_rows:
        grid = (num_rows, triton.cdiv(inner, _BLOCK))
        _swiglu[grid](gate_up, out, gate_up.stride(0), out.stride(0), inner, BLOCK=_BLOCK, num_warps=4)
    return out


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
    """As `layers.rotary_store`."""
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


_NORM_TYPES = {"x_stride out_stride residual_stride total_stride": "i64:16", "eps": "fp32"}
_SWIGLU_TYPES = {"gate_up_stride out_stride": "i64:16", "inner": "i32:16"}
_ROTARY_TYPES = {"cos sin": "*fp32", "slots": "*i64", "num_slots": "i32", "eps": "fp32"}
_ROTARY_TYPES |= {"fused_stride angle_stride page_stride head_stride slot_stride": "i64:16"}
_DTYPES = ("bf16", "fp16", "fp32")


def _tuned_norms(dtype: str, width: int) -> list[Tuned]:
    block, warps = _shape(width)
    types = {"x residual weight out total": f"*{dtype}"} | _NORM_TYPES
    return [Tuned.of(kernel, types, {"D": width, "BLOCK": block}, warps) for kernel in (_rms_norm, _add_rms_norm)]


def _tuned_rotary(dtype: str, kept: str, num_heads: int, kv_heads: int, half: int, normed: bool) -> Tuned:
    types = {"fused query_weight key_weight": f"*{dtype}", "key_pages value_pages": f"*{kept}"} | _ROTARY_TYPES
    shape = {"num_heads": num_heads, "kv_heads": kv_heads, "block_size": 16, "HALF": half}
    shape |= {"BLOCK": triton.next_power_of_2(half), "HEADS": _HEADS, "NORMED": normed}
    return Tuned.of(_rotary_store, types, shape, _warps(half))


TUNED = (
    *(tuned for dtype in _DTYPES for width in (256, 4096, 5120, 16384) for tuned in _tuned_norms(dtype, width)),
    *(Tuned.of(_swiglu, {"gate_up out": f"*{dtype}"} | _SWIGLU_TYPES, {"BLOCK": _BLOCK}) for dtype in _DTYPES),
    *(
        _tuned_rotary(dtype, kept, *heads)
        for dtype, kept in (*((dtype, dtype) for dtype in _DTYPES), ("bf16", "u8"), ("fp16", "u8"))
        # 1B, 8B, Qwen3, …
        for heads in ((32, 8, 32, False), (32, 8, 64, False), (40, 8, 64, True), (32, 8, 48, False), (8, 4, 128, False))
    ),
)
