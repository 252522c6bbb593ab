"""Storing a step's keys and values into the pages on a GPU: one program per chain row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from space_kernels.attention.attention import QKV, KVPages
from space_kernels.build.launch import Tuned
from space_kernels.fp8 import as_kept
from space_kernels.fp8_bits import narrowed
from space_kernels.paging.step_tables import StepTables


@triton.jit
def _kept(wide, dtype: tl.constexpr):
    """Convert float32 to the pages' dtype; uint8 pages hold fp8."""
    return narrowed(wide) if dtype == tl.uint8 else wide.to(dtype)


@triton.jit(do_not_specialize=["table_width"])
def _store_kv(
    key,
    value,
    key_pages,
    value_pages,
    owners,
    offsets,
    starts,
    num_written,
    page_table,
    key_row,
    key_head,
    value_row,
    value_head,
    page_stride,
    head_stride,
    table_width,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    sequence = tl.load(owners + row)
    offset = tl.load(offsets + row)
    if offset < tl.load(num_written + sequence):
        position = tl.load(starts + sequence) + offset
        page = tl.load(page_table + sequence.to(tl.int64) * table_width + position // BLOCK_SIZE).to(tl.int64)
        heads = tl.arange(0, HEADS)[:, None]
        lanes = tl.arange(0, BLOCK_D)[None, :]
        inside = (heads < KV_HEADS) & (lanes < D)
        slot = page * page_stride + heads * head_stride + (position % BLOCK_SIZE) * D + lanes
        wide = tl.load(key + row.to(tl.int64) * key_row + heads * key_head + lanes, inside, other=0.0).to(tl.float32)
        wide = tl.where(tl.abs(wide) < float("inf"), wide, 0.0)  # NaN compares false
        tl.store(key_pages + slot, _kept(wide, key_pages.dtype.element_ty), inside)
        wide = tl.load(value + row.to(tl.int64) * value_row + heads * value_head + lanes, inside, other=0.0)
        wide = wide.to(tl.float32)
        wide = tl.where(tl.abs(wide) < float("inf"), wide, 0.0)
        tl.store(value_pages + slot, _kept(wide, value_pages.dtype.element_ty), inside)


def store_kv(qkv: QKV, pages: KVPages, tables: StepTables) -> None:
    """Write the chain rows' keys and values to their slots; values that are not finite become 0.

    Rows and heads may have any strides; the pages of keys and of values have the same.
    """
    _, key, value = qkv
    _, kv_heads, head_dim = key.shape
    pattern = tables.pattern
    if pattern.num_chain_rows == 0:
        return
    _store_kv[(pattern.num_chain_rows,)](
        key,
        value,
        as_kept(pages.keys),
        as_kept(pages.values),
        pattern.owner,
        pattern.offset,
        tables.starts,
        tables.num_written,
        tables.page_table,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.keys.stride(0),
        pages.keys.stride(1),
        tables.page_table.stride(0),
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_SIZE=tables.block_size,
        HEADS=triton.next_power_of_2(kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=_warps(kv_heads, head_dim),
    )


def _warps(kv_heads: int, head_dim: int) -> int:
    """Return one warp per 256 elements of a row: 16 bytes per thread and access in 16 bits."""
    return min(max(triton.next_power_of_2(kv_heads) * triton.next_power_of_2(head_dim) // 256, 1), 8)


TUNED = tuple(
    Tuned(
        _store_kv,
        dict.fromkeys(("key", "value"), f"*{dtype}")
        | dict.fromkeys(("key_pages", "value_pages"), f"*{kept}")
        | dict.fromkeys(("owners", "offsets", "starts", "num_written", "page_table"), "*i32")
        | dict.fromkeys(("key_row", "key_head", "value_row", "value_head", "page_stride", "head_stride"), "i64:16")
        | {"table_width": "i32"},
        {
            "KV_HEADS": kv_heads,
            "D": head_dim,
            "BLOCK_SIZE": 16,
            "HEADS": triton.next_power_of_2(kv_heads),
            "BLOCK_D": triton.next_power_of_2(head_dim),
        },
        _warps(kv_heads, head_dim),
    )
    for dtype, kept in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "u8"))
    for kv_heads, head_dim in ((8, 64), (8, 128), (2, 64), (32, 96), (4, 256))
)
