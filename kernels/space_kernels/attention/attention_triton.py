"""Attention of a SPACE step over the paged KV cache on a GPU: the function of `torch_backend` as one Triton kernel.

**Tiles.** A step gives each sequence a few rows: its chain (one row in plain decoding, k+1 with drafts, hundreds in a
prefill chunk) and its mask groups. With H query heads and G kv heads, Q = H/G queries of every row need the same keys.
So a sequence's rows and their Q queries are packed into the rows of one matrix, chain first:

    packed row   0        1        2        3        4        5        6        7        8 ...
    row, query   root 0   root 1   root 2   root 3   c_1 0    c_1 1    c_1 2    c_1 3    c_2 0 ... M0_1 0 ...

A program takes `AttentionTile.queries` packed rows, one kv head and one split of the context, and walks the pages in
blocks of `AttentionTile.keys` positions: two products on tensor cores per block and an online softmax between them.
For every draft layout (plain, full k = 5, pruned, a prefill chunk) the prefix is read from memory once. If a sequence's
rows fill several tiles, their programs are neighbours in the grid and find the prefix in the L2 cache.

**What a row sees** is an interval in each of two key spaces: positions [own - window, start + reach) in the pages, and
for a mask row the masks [first of its group, itself] among the step's own keys. A tile walks the union of its rows'
intervals, ascending, and masks per row what lies outside. Blocks beyond a tile's reach (a causal prefill) are not
visited, and unwritten slots are not read.

**Splits.** A single sequence of 32k positions would occupy one of 132 multiprocessors, so the context is split every
`SPLIT` positions, a constant. The page table's width sets the number of programs. Programs beyond a sequence's end
return at once; the others store unnormalised sums, which a second, small kernel adds up in ascending order. If the
tiles alone fill the device (large batches, prefill), one program walks all splits of its tile and adds them up in
registers instead: `walk="serial"`. The masks' keys belong to the first split. On Hopper the second kernel of a short
step is launched while the first one runs, and waits for its end. Page numbers are loaded a block ahead: the loads of
keys and values would otherwise wait for those, and no block could be fetched before the one in front is used.

**Swapped products.** Hopper's warpgroup instructions take 64 rows of their first operand and 8 to 256 columns of the
second. A decode step has 4 or 24 packed rows per sequence, so in a tile of 64 most of the work and of the registers
goes to padding. `swapped_tile` takes the keys as the rows and 16 or 32 packed rows as the columns: scores [N, M] =
K Qᵀ, then sums [D, M] += Vᵀ weights. `step_tile` chooses it by the rows of the longest sequence. It has the bits of the
usual tile, so a step of mask rows, a prefill and plain decoding may each have the tile that is fastest.

**Row invariance.** Exactness means that plain decoding, every k, every batch and a prefill give a row the same bits.
Four properties ensure it:

1. Fixed geometry. Key block and split depend on head size and dtype, never on the rows. Key blocks start at multiples
   of their size in absolute position. On tensor cores every element of a matmul is the same sum in the same order,
   wherever in the tile its row is, however wide the tile, and whichever operand comes first.
2. Masked keys have no effect. A masked key has score -inf and weight 0; a block of such keys changes neither the
   running maximum (which starts at -1e30, not -inf, to avoid inf - inf) nor the sum of weights nor the weighted values.
   So the blocks visited for other rows of the tile do not matter.
3. Integer maxima. The running maximum m is kept in units of log2 and *rounded up to an integer*. Rescaling by
   2^(m_old - m_new) is then exact: it only shifts exponents (the factor is built from bits, not by an approximate
   exp2). Sums may be rescaled once or in ten small steps, fused into multiply-adds or not, in registers or by another
   kernel: the bits are the same. Hence both walks over the splits agree bitwise, and the choice between them may depend
   on the batch. Weights are in (0, 1] as usual; the largest is above 1/2.
4. Integer sums. How a tile adds the weights of a block depends on its layout. In 16 bits each weight is therefore
   rounded to a multiple of 2^-23 first: whole numbers add up to the same in any order. This is off by 2^-24 per key at
   most, of a total above 1/2; rounding the weights to the values' dtype is off by 2^-8 or 2^-11 of each.

Bits do depend on the GPU's generation, because tensor cores differ in how they sum. In 16 bits the weights are rounded
to the values' dtype before the second matmul, as in every flash attention.

**Tile sizes** (`tile_for`). 64 packed rows is the height of Hopper's and Blackwell's warpgroup instructions; fewer
would cost as much. At 64 rows a key of D = 128 in 16 bits (512 bytes of K and V) needs 64 flop per byte, less than
tensor cores can do while the bytes arrive (A100 153, H100 295, H200 206, B200 281 flop per byte), so decoding stays
memory-bound. The key block shrinks with D so that K and V of one block are at most 32 KiB (16 KiB in float32). A
program of D = 128 holds 3 blocks in 112 KiB of shared memory on Hopper (of 227) and 2 in 56 KiB on an A100 (of 163):
two programs fit, so one computes while the other waits. The masks' keys, usually one block, are not staged. 4 warps are
one warpgroup, 16 rows each. float32 has no tensor cores in IEEE precision; its tile has 16 rows, to waste less work on
padding. D = 256 uses 8 warps, because the sums alone would fill the registers of 4.

SPLIT = 256: 8k positions of 8 kv heads make 256 programs, about two per multiprocessor, and the sums that 64 packed
rows store per split are a quarter of the size of the keys and values read. With 128 the sums cost more than the
further programs bring; with 512 a single sequence of 1k takes half as long again. Where bits need not be the same in
every step, `quick_split` takes 512 for steps that fill the device even so.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.attention import attention_kernels as kernels
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages, refuse_rare
from space_kernels.attention.attention_kernels import (
    ONE_SPLIT,
    PARALLEL,
    SERIAL,
    SPLIT,
    AttentionTile,
    combine_warps,
    padded,
    precision,
    tile_for,
)
from space_kernels.attention.attention_kernels import TUNED as _ATTENTION_SHAPES
from space_kernels.build.launch import Tuned
from space_kernels.fp8 import as_kept
from space_kernels.fp8_bits import narrowed
from space_kernels.paging.step_rows import PatternTables, StepRows, StepTables

WORKSPACE_BYTES = 1 << 28
"""Memory limit of the splits' sums, which layers reuse; beyond it one program walks all splits."""

Walk = Literal["parallel", "serial"]
"""One program per split plus a combining kernel, or one program for all splits of a tile. The bits are the same."""

_LOG2_E = 1.4426950408889634


def space_attention(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec, *, exact: bool = True) -> Tensor:
    """Write the chain rows' keys and values into the pages, then let every row attend. Returns [R, H, D].

    As `torch_backend.space_attention`, though not bit for bit; fp8 pages too. Pages may have any size; the scale must
    be positive. In 16 bits the softmax weights are rounded to the values' dtype. `exact`: a row's bits do not depend on
    the rest of the batch, nor on the room in the page table.
    """
    tables = StepTables.of(rows)
    store_kv(qkv, pages, tables)
    return attend(qkv, pages, tables, spec, split=SPLIT if exact else None)


def attend_stored(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec, *, exact: bool = True) -> Tensor:
    """As `space_attention`, for pages that already hold the step's keys and values."""
    return attend(qkv, pages, StepTables.of(rows), spec, split=SPLIT if exact else None)


def attend(
    qkv: QKV,
    pages: KVPages,
    tables: StepTables,
    spec: AttentionSpec,
    *,
    walk: Walk | None = None,
    split: int | None = SPLIT,
    tile: AttentionTile | None = None,
) -> Tensor:
    """Let every row attend pages that already hold the step's keys and values. Returns [R, H, D].

    Rows and heads may have any strides; keys and values are read for mask rows. Padding rows are 0. `walk`: None
    chooses by the sizes. `split`: positions; None: as `quick_split`. Raises ValueError for a scale that is not
    positive, a head count that kv heads do not divide, and pages whose slots are not adjacent.
    """
    options: dict[str, Any] = {"masks": tables.pattern.has_masks, "walk": walk, "split": split, "tile": tile}
    if spec.sinks is None:
        out = qkv.query.new_empty(qkv.query.shape)
        _launch(qkv, pages, tables, spec, out, None, **options)
        return out
    wide, lse = _float32_pair(qkv.query)
    _launch(qkv, pages, tables, spec, wide, lse, **options)
    return with_sinks(wide, lse, spec.sinks).to(qkv.query.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention [R, H, D] as if a key with score sinks [H] and value 0 had been there, too; lse [R, H], natural.
    Σw·v / (Σw + e^sink) = out / (1 + e^(sink - lse)); all float32. A row that sees no key stays 0."""
    seen = lse > -math.inf
    share = (sinks - torch.where(seen, lse, 0.0)).exp().add(1.0).reciprocal()
    return out * torch.where(seen, share, 0.0)[..., None]


def prefix_attention(
    query: Tensor,
    pages: KVPages,
    tables: StepTables,
    spec: AttentionSpec,
    *,
    walk: Walk | None = None,
    split: int = SPLIT,
) -> tuple[Tensor, Tensor]:
    """Attend the pages only, without mask keys: (out [R, H, D], lse [R, H]), float32, natural logarithm.
    A row that sees no key has out 0 and lse -inf. With `num_written` 0, rows see only slots of earlier steps."""
    out, lse = _float32_pair(query)
    # key and value are not read: any pointers of the right type will do
    qkv = QKV(query, pages.keys[:, :, 0], pages.values[:, :, 0])
    _launch(qkv, pages, tables, spec, out, lse, walk=walk, split=split)
    return out, lse


def in_step_attention(
    qkv: QKV, tables: StepTables, spec: AttentionSpec, *, chain: bool = True
) -> tuple[Tensor, Tensor]:
    """As `library_parts.in_step_attention`: (out [R, H, D], lse [R, H]), float32, natural logarithm."""
    out, lse = _float32_pair(qkv.query)
    _launch(qkv, None, tables, spec, out, lse, masks=tables.pattern.has_masks, chain=chain)
    return out, lse


def _float32_pair(query: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=torch.float32, device=query.device),
        torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
    )


def _launch(
    qkv: QKV,
    pages: KVPages | None,
    tables: StepTables,
    spec: AttentionSpec,
    out: Tensor,
    lse: Tensor | None,
    *,
    masks: bool = False,
    chain: bool = False,
    walk: Walk | None = None,
    split: int | None = SPLIT,
    tile: AttentionTile | None = None,
) -> None:
    refuse_rare(spec, "triton")
    query, key, value = qkv
    num_heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    pattern = tables.pattern
    tile = tile or step_tile(query, kv_heads, pages, pattern)
    tiles = pattern.tiles(num_heads // kv_heads, tile.queries)
    if split is None:
        split = quick_split(tables.capacity, len(tiles) * kv_heads, query.device)
    _check(query, kv_heads, pages, tables, spec.scale, split, tile)
    out[pattern.num_rows :].zero_()
    if lse is not None:
        lse[pattern.num_rows :].fill_(float("-inf"))
    if pattern.num_rows == 0:
        return
    num_splits = 1 if pages is None else -(-tables.capacity // split)
    how = _walk(walk, num_splits, len(tiles) * kv_heads, pattern.num_rows * num_heads * head_dim, query.device)
    of_splits = out, out, out  # not read
    if how == PARALLEL:
        shape = (num_splits, pattern.num_rows, num_heads)
        sums = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        tops = torch.empty(shape, dtype=torch.float32, device=query.device)
        totals = torch.empty_like(tops)  # allocated separately, so that both are aligned as compiled for
        of_splits = sums, tops, totals
    key_pages, value_pages = (key, value) if pages is None else pages
    inner, outer = _score_factors(spec)
    block_d = padded(head_dim)
    grid = len(tiles), kv_heads, num_splits if how == PARALLEL else 1
    # combine's programs would take the room of attend's that have not begun
    overlap = how == PARALLEL and tile.swapped and math.prod(grid) <= 2 * num_multiprocessors(query.device)
    overlap = overlap and is_hopper(query.device)
    shared: dict[str, Any] = {"HEADS": num_heads, "D": head_dim, "BLOCK_D": block_d, "SPLIT": split}
    shared |= {"WINDOW": spec.window or 0, "LSE": lse is not None, "OVERLAP": overlap}
    kernels.attend[grid](
        query,
        key,
        value,
        as_kept(key_pages),
        as_kept(value_pages),
        of_splits[0] if how == PARALLEL else out,
        out if lse is None else lse,
        of_splits[1],
        of_splits[2],
        tiles,
        pattern.chain_first,
        pattern.num_chain,
        pattern.mask_first,
        pattern.num_masks,
        pattern.offset,
        pattern.reach,
        pattern.group_first,
        tables.starts,
        tables.num_written,
        tables.page_table,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_pages.stride(0),
        key_pages.stride(1),
        tables.page_table.stride(0),
        pattern.num_rows,
        inner,
        outer,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=tables.block_size,
        M=tile.queries,
        N=tile.keys,
        CAPPED=spec.softcap is not None,
        PAGES=pages is not None,
        MASKS=masks,
        CHAIN=chain,
        WALK=how,
        PRECISION=precision(query.dtype),
        SWAP=tile.swapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shared,
    )
    if how == PARALLEL:
        kernels.combine[(pattern.num_rows, num_heads)](
            *of_splits,
            out,
            out if lse is None else lse,
            pattern.owner,
            pattern.offset,
            pattern.reach,
            tables.starts,
            tables.num_written,
            pattern.num_rows,
            num_warps=combine_warps(block_d),
            **shared,
            **({"launch_pdl": True} if overlap else {}),
        )


def step_tile(query: Tensor, kv_heads: int, pages: KVPages | None, pattern: PatternTables) -> AttentionTile:
    """Choose a tile by the rows of the longest sequence, and by whether the sequences alone fill the device."""
    head_dim, hopper = query.shape[2], is_hopper(query.device)
    packed = int(pattern.rows_per_sequence.max(initial=0)) * (query.shape[1] // kv_heads)
    swapped = kernels.swapped_tile(head_dim, query.dtype, packed)
    if hopper and swapped is not None and pages is not None and pages.keys.dtype == query.dtype:
        full = _fills(pattern.num_sequences * kv_heads, query.device)
        if packed <= kernels.LEAST_COLUMNS or not full:
            return swapped
    return tile_for(head_dim, query.dtype, hopper=hopper)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def quick_split(capacity: int, num_programs: int, device: torch.device) -> int:
    """Return twice SPLIT where programs of so many positions still fill the device: half the sums to store and add."""
    return 2 * SPLIT if num_programs * -(-capacity // (2 * SPLIT)) >= 2 * num_multiprocessors(device) else SPLIT


def _check(
    query: Tensor,
    kv_heads: int,
    pages: KVPages | None,
    tables: StepTables,
    scale: float,
    split: int,
    tile: AttentionTile,
) -> None:
    if not scale > 0:
        raise ValueError(f"The scale is {scale}; it must be positive. Negate the queries instead.")
    if query.shape[1] % kv_heads:
        raise ValueError(f"{query.shape[1]} query heads do not divide among {kv_heads} key-value heads.")
    if query.shape[0] < tables.pattern.num_rows:
        raise ValueError(f"There are {query.shape[0]} queries for the step's {tables.pattern.num_rows} rows.")
    if split % tile.keys:
        raise ValueError(f"A split of {split} positions is no multiple of a key block of {tile.keys}.")
    if pages is None:
        return
    if pages.keys.stride()[2:] != (query.shape[2], 1) or pages.values.stride() != pages.keys.stride():
        raise ValueError(
            f"Pages of keys have strides {pages.keys.stride()}, of values {pages.values.stride()}; "
            f"the slots of a page must be adjacent, and keys laid out as values."
        )


def _walk(asked: Walk | None, num_splits: int, num_programs: int, num_sums: int, device: torch.device) -> int:
    """Choose how to walk the splits: serially if programs without splits fill the device, or if the splits' sums would
    need too much memory."""
    if num_splits == 1:
        return ONE_SPLIT
    if asked is not None:
        return SERIAL if asked == "serial" else PARALLEL
    full = _fills(num_programs, device)
    return SERIAL if full or 4 * num_splits * num_sums > WORKSPACE_BYTES else PARALLEL


def _fills(num_programs: int, device: torch.device) -> bool:
    """Whether so many programs are three quarters of what the device runs at a time, two per multiprocessor."""
    return 2 * num_programs >= 3 * num_multiprocessors(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """Return the factor of raw scores inside the cap (tanh by exp2 of twice its argument), and after it, in log2."""
    if spec.softcap is None:
        return 0.0, spec.scale * _LOG2_E
    return 2 * spec.scale / spec.softcap * _LOG2_E, spec.softcap * _LOG2_E


_FLOOR: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _merge(first, first_lse, second, second_lse, out, lse, D: tl.constexpr, BLOCK_D: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_D)
    inside = lanes < D
    mine, theirs = tl.load(first_lse + at), tl.load(second_lse + at)
    peak = tl.maximum(tl.maximum(mine, theirs), _FLOOR)
    mine, theirs = tl.exp(mine - peak), tl.exp(theirs - peak)
    total = mine + theirs
    some = total > 0
    divisor = tl.where(total == 0, 1.0, total)
    one = tl.load(first + at * D + lanes, inside, other=0.0).to(tl.float32)
    other = tl.load(second + at * D + lanes, inside, other=0.0).to(tl.float32)
    # an output with weight 0 may hold garbage
    joined = tl.where(mine == 0, 0.0, one * mine) + tl.where(theirs == 0, 0.0, other * theirs)
    tl.store(out + at * D + lanes, (joined / divisor).to(out.dtype.element_ty), inside)
    tl.store(lse + at, tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As `library_parts.merge`: (out [R, H, D] of the dtype, lse [R, H]).
    lse [R, H] float32, natural logarithm of the sum of exponentials of the scores; -inf where a row saw no key."""
    num_rows, num_heads, head_dim = first.shape
    out = torch.empty(first.shape, dtype=dtype, device=first.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=first.device)
    if out.numel():
        _merge[(num_rows * num_heads,)](
            first.contiguous(),
            first_lse.contiguous(),
            second.contiguous(),
            second_lse.contiguous(),
            out,
            lse,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return out, lse


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
    Rows and heads may have any strides; the pages of keys and of values have the same."""
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


_STORE_TYPES = {
    "owners offsets starts num_written page_table": "*i32",
    "key_row key_head value_row value_head page_stride head_stride": "i64:16",
    "table_width": "i32",
}


def _tuned_merge(dtype: str, head_dim: int) -> Tuned:
    types = {"first first_lse second_lse lse": "*fp32", "second out": f"*{dtype}"}
    return Tuned.of(_merge, types, {"D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}, 1)


def _tuned_store(dtype: str, kept: str, kv_heads: int, head_dim: int) -> Tuned:
    shape = {"KV_HEADS": kv_heads, "D": head_dim, "BLOCK_SIZE": 16}
    shape |= {"HEADS": triton.next_power_of_2(kv_heads), "BLOCK_D": triton.next_power_of_2(head_dim)}
    types = {"key value": f"*{dtype}", "key_pages value_pages": f"*{kept}"} | _STORE_TYPES
    return Tuned.of(_store_kv, types, shape, _warps(kv_heads, head_dim))


TUNED = (
    *_ATTENTION_SHAPES,
    *(_tuned_merge(dtype, head_dim) for dtype in ("bf16", "fp16") for head_dim in (64, 96, 128, 256)),
    *(
        _tuned_store(dtype, kept, *heads)
        for dtype, kept in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "u8"))
        for heads in ((8, 64), (8, 128), (2, 64), (32, 96), (4, 256))
    ),
)
