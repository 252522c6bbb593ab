"""Attention of a SPACE step over paged keys and values on a GPU: same function as `attention`, as one Triton kernel.

**Tiles.** A step gives each sequence a few rows: its chain (one row in plain decoding, k+1 with drafts, hundreds in a
prefill chunk) and its mask groups. With H query heads on G kv heads, Q = H/G queries of every row want the same keys.
So a sequence's rows and their Q queries are packed into the rows of one matrix, chain first:

    packed row   0        1        2        3        4        5        6        7        8 ...
    row, query   root 0   root 1   root 2   root 3   c_1 0    c_1 1    c_1 2    c_1 3    c_2 0 ... M0_1 0 ...

A program takes `Tile.queries` packed rows, one kv head and one split of the context, and walks the pages in blocks of
`Tile.keys` positions: two products on tensor cores per block and an online softmax between them. Whatever a sequence
lays out (plain, full k = 5, pruned, a prefill chunk), the prefix comes from memory once; where its rows fill several
tiles, their programs are neighbours in the grid and find the prefix in the L2 cache.

**What a row sees** is an interval in each of two key spaces: positions [own - window, start + reach) in the pages, and
for a mask row the masks [first of its group, itself] among the step's own keys. A tile walks the union of its rows'
intervals, ascending, and hides per row what lies outside; blocks beyond a tile's reach (a causal prefill) are not
visited, and slots nobody wrote are not read.

**Splits.** One sequence of 32k positions must not leave 131 of 132 multiprocessors idle, so the context is cut every
`SPLIT` positions. The cut is a constant. Splits of a step do not depend on its batch; the page table's width decides
how many programs there are, and those beyond a sequence's end leave at once. Each leaves its unnormalised
sums to a second, small kernel that adds them up in ascending order. Where the tiles alone fill the device (large
batches, prefill) one program walks all splits of its tile and adds them up in registers instead: `walk="serial"`.
Masks' keys belong to the first split.

**Why a row's bits do not depend on its company.** Exactness here means that plain decoding, every k, every batch and a
prefill give one row the same bits. Three things see to it:

1. Fixed geometry. Tile height, key block and split follow from head size and dtype, never from the rows. Key blocks
   begin at multiples of their size in absolute position. On tensor cores every element of a product is the same sum in
   the same order, wherever in the tile its row lies.
2. Hidden is nothing. To a row a hidden key has the score -inf and the weight 0; a block of such keys leaves the running
   maximum (which begins at -1e30, not -inf: no inf - inf), the sum of weights and the weighted values as they are.
   So it does not matter what neighbours in the tile made the program visit.
3. Whole maxima. The running maximum m is kept in units of log2 and *rounded up to an integer*. Rescaling by
   2^(m_old - m_new) is then exact: it shifts exponents and rounds nothing (the factor is made from its bits, not by an
   approximate exp2). Sums may be rescaled once or in ten small steps, fused into multiply-adds or not, in registers or
   by another kernel after a detour through memory: the bits are the same. That is why both walks over the splits agree
   bitwise, so that the choice between them may depend on the batch after all. Weights lie in (0, 1] as ever; the
   largest is above 1/2.

What is left to floating point: bits depend on the GPU's generation (its tensor cores sum in their own way), and in 16
bits the weights are rounded to the values' dtype before the second product, as in every flash attention.

**Choosing tiles** (`tile_for`). One height serves one row and a thousand, or the bits would differ. 64 packed rows is
the height of Hopper's and Blackwell's warpgroup instructions: less would cost as much. At 64 rows a key of D = 128 in
16 bits (512 bytes of K and V) asks for 64 flop per byte, below what a tensor core has ready while the bytes arrive
(A100 153, H100 295, H200 206, B200 281 flop per byte), so decoding stays bound by memory. The key block shrinks with D
such that K and V of one block are at most 32 KiB (16 KiB in float32): with 3 stages in flight 64 to 96 KiB of shared
memory, two programs per multiprocessor on Hopper and Blackwell (227 KiB), one to two on an A100 (163 KiB). 4 warps: one
warpgroup, 16 rows each. float32 has no tensor cores in IEEE precision; its tile is 16 rows, so that fewer products
are thrown away. D = 256 takes 8 warps: the sums alone would fill the registers of 4.

SPLIT = 512: 8k positions of 8 kv heads make 128 programs, about one per multiprocessor, and the sums that 64 packed
rows leave per split are an eighth as large as the keys and values they were made from.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.paging import StepRows
from space_kernels.step_tables import StepTables
from space_kernels.store_kv_triton import store_kv
from space_kernels.tuned import Tuned

SPLIT = 512
"""Positions per split of the context. Fixed: a row's sums must not depend on who else is in the step."""

WORKSPACE_BYTES = 1 << 28
"""Most memory for the sums of splits, per layer and reused by the next one: beyond, one program walks all splits."""

_FLOOR: tl.constexpr = tl.constexpr(-1e30)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_LN_2 = 0.6931471805599453
_LOG2_E = 1.4426950408889634


# Small functions are written out where a kernel needs them: Triton's interpreter takes milliseconds per call of one.
# 2^n for whole n ≤ 0, exactly, and 0 below the least normal float32: ((max(n, -127) + 127) << 23) as a float's bits.


@triton.jit
def _join(queries, keys, values, seen, state, top, total, inner, outer, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Online softmax: join a block of keys and values [N, D] to the sums of queries [M, D]. seen [M, N]

    state [M, D], total [M]: weighted values and weights, times 2^-top; top [M]: a whole number ≥ every score so far.
    """
    dtype: tl.constexpr = values.dtype
    if _INTERPRETED:  # it would multiply bfloat16 as the integers it keeps them in; the products are the same
        queries, keys, values = queries.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if CAPPED:
        less = tl.exp2(-tl.abs(scores * inner))
        tanh = (1.0 - less) / (1.0 + less)
        scores = tl.where(scores < 0, -tanh, tanh)
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(top, tl.ceil(tl.max(scores, 1) * outer))
    weights = tl.exp2(tl.fma(scores, outer, -peak[:, None]))
    shrink = ((tl.maximum(top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(dtype)
    if _INTERPRETED:
        weights = weights.to(tl.float32)
    state = tl.dot(weights, values, state * shrink[:, None], input_precision=PRECISION)
    return state, peak, total


@triton.jit
def _add(state, top, total, other_state, other_top, other_total):
    """The sums of two runs of keys; exact but for one rounding of each sum."""
    peak = tl.maximum(top, other_top)
    mine = ((tl.maximum(top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    theirs = ((tl.maximum(other_top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    state = state * mine[:, None] + other_state * theirs[:, None]
    return state, peak, total * mine + other_total * theirs


@triton.jit
def _step_keys(
    queries,
    state,
    top,
    total,
    key,
    value,
    low,
    high,
    oldest,
    newest,
    key_row,
    value_row,
    inner,
    outer,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Join the step's own keys number [oldest, newest) of each row; `key` and `value` point to number 0."""
    lanes = tl.arange(0, BLOCK_D)
    for begin in range(low // N * N, high, N):
        number = begin + tl.arange(0, N)
        inside = (number < high)[:, None] & (lanes < D)[None, :]
        place = number.to(tl.int64)[:, None]
        keys = tl.load(key + place * key_row + lanes[None, :], inside, other=0.0).to(tl.float32)
        keys = tl.where(tl.abs(keys) < float("inf"), keys, 0.0).to(key.dtype.element_ty)  # NaN compares false
        values = tl.load(value + place * value_row + lanes[None, :], inside, other=0.0).to(tl.float32)
        values = tl.where(tl.abs(values) < float("inf"), values, 0.0).to(value.dtype.element_ty)
        seen = (number[None, :] >= oldest[:, None]) & (number[None, :] < newest[:, None])
        state, top, total = _join(queries, keys, values, seen, state, top, total, inner, outer, CAPPED, PRECISION)
    return state, top, total


@triton.jit
def _finish(
    out, lse, place, heads_place, real, state, top, total, D: tl.constexpr, BLOCK_D: tl.constexpr, LSE: tl.constexpr
):
    """Weighted values over weights; 0, and the logarithm -inf, for a row that saw nothing."""
    lanes = tl.arange(0, BLOCK_D)
    some = total > 0
    divisor = tl.where(total == 0, 1.0, total)  # a row gone wrong stays NaN
    inside = real[:, None] & (lanes < D)[None, :]
    tl.store(out + place[:, None] + lanes[None, :], (state / divisor[:, None]).to(out.dtype.element_ty), inside)
    if LSE:
        found = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
        tl.store(lse + heads_place, found, real)


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def _attend(
    query,
    key,
    value,
    key_pages,
    value_pages,
    out,  # [R, H, D], or where PARTIAL the sums [splits, rows, H, D]
    lse,  # [R, H]
    tops,  # [splits, rows, H] where PARTIAL
    totals,
    tiles,
    chain_firsts,
    chain_counts,
    mask_firsts,
    mask_counts,
    offsets,
    reaches,
    group_firsts,
    starts,
    num_written,
    page_table,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    page_stride,
    head_stride,
    table_width,
    num_rows,
    inner,
    outer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    PAGES: tl.constexpr,
    MASKS: tl.constexpr,
    CHAIN: tl.constexpr,  # the step's own chain keys, from `key` and not from the pages
    WALK: tl.constexpr,  # 0: there is one split; 1: all splits in turn; 2: one split per program, sums left to _combine
    LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    packed = tl.load(tiles + 2 * tile + 1) * M + tl.arange(0, M)
    start = tl.load(starts + sequence)
    written = tl.load(num_written + sequence)
    chain_first = tl.load(chain_firsts + sequence)
    num_chain = tl.load(chain_counts + sequence)
    mask_first = tl.load(mask_firsts + sequence)
    num_own = num_chain + tl.load(mask_counts + sequence)

    local = packed // QUERIES
    real = local < num_own
    is_mask = (local >= num_chain) & real
    row = tl.where(is_mask, mask_first - num_chain, chain_first) + local  # [M] flat
    heads = head * QUERIES + packed % QUERIES
    offset = tl.load(offsets + row, real, other=0)
    reach = tl.minimum(tl.load(reaches + row, real, other=0), written)
    newest = tl.where(real, start + reach, 0)  # [M] positions [oldest, newest) of the pages are seen
    oldest = tl.zeros([M], tl.int32)
    if WINDOW:
        oldest = tl.maximum(start + offset + 1 - WINDOW, 0)
    tile_newest = tl.max(newest, 0)
    tile_oldest = tl.min(tl.where(real, oldest, 2147483647), 0)
    if WALK == 2:  # noqa: SIM102
        if (split > 0) & ((split * SPLIT >= tile_newest) | ((split + 1) * SPLIT <= tile_oldest)):
            return

    lanes = tl.arange(0, BLOCK_D)
    within = real[:, None] & (lanes < D)[None, :]
    place = query + row.to(tl.int64)[:, None] * query_row + heads[:, None] * query_head + lanes[None, :]
    queries = tl.load(place, within, other=0.0)
    state = tl.zeros([M, BLOCK_D], tl.float32)
    top = tl.full([M], _FLOOR, tl.float32)
    total = tl.zeros([M], tl.float32)

    if CHAIN:
        first = tl.zeros([M], tl.int32)
        if WINDOW:
            first = tl.maximum(offset + 1 - WINDOW, 0)
        last = tl.where(real, reach, 0)
        state, top, total = _step_keys(
            queries,
            state,
            top,
            total,
            key + chain_first.to(tl.int64) * key_row + head * key_head,
            value + chain_first.to(tl.int64) * value_row + head * value_head,
            tl.min(tl.where(real, first, 2147483647), 0),
            tl.max(last, 0),
            first,
            last,
            key_row,
            value_row,
            inner,
            outer,
            D,
            N,
            BLOCK_D,
            CAPPED,
            PRECISION,
        )
    if MASKS:
        last = tl.where(is_mask & (split == 0), local - num_chain + 1, 0)
        first = tl.load(group_firsts + row, is_mask, other=0) - mask_first
        if WINDOW:
            first = tl.maximum(first, last - WINDOW)
        high = tl.max(last, 0)
        state, top, total = _step_keys(
            queries,
            state,
            top,
            total,
            key + mask_first.to(tl.int64) * key_row + head * key_head,
            value + mask_first.to(tl.int64) * value_row + head * value_head,
            tl.minimum(tl.min(tl.where(is_mask, first, 2147483647), 0), high),
            high,
            first,
            last,
            key_row,
            value_row,
            inner,
            outer,
            D,
            N,
            BLOCK_D,
            CAPPED,
            PRECISION,
        )
    if PAGES:
        table = page_table + sequence.to(tl.int64) * table_width
        begin = tile_oldest // N * N
        end = tile_newest
        if WALK == 2:
            begin = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(end, (split + 1) * SPLIT)
        if WALK == 1:
            whole_state = tl.zeros([M, BLOCK_D], tl.float32)
            whole_top = tl.full([M], _FLOOR, tl.float32)
            whole_total = tl.zeros([M], tl.float32)
            current = 0
        for position in range(begin, end, N):
            if WALK == 1:  # noqa: SIM102
                if position // SPLIT != current:
                    whole_state, whole_top, whole_total = _add(whole_state, whole_top, whole_total, state, top, total)
                    state = tl.zeros([M, BLOCK_D], tl.float32)
                    top = tl.full([M], _FLOOR, tl.float32)
                    total = tl.zeros([M], tl.float32)
                    current = position // SPLIT
            positions = position + tl.arange(0, N)
            known = positions < end
            page = tl.load(table + positions // BLOCK_SIZE, known, other=0).to(tl.int64)
            slot = page * page_stride + head * head_stride + (positions % BLOCK_SIZE) * D
            inside = known[:, None] & (lanes < D)[None, :]
            keys = tl.load(key_pages + slot[:, None] + lanes[None, :], inside, other=0.0)
            values = tl.load(value_pages + slot[:, None] + lanes[None, :], inside, other=0.0)
            seen = (positions[None, :] >= oldest[:, None]) & (positions[None, :] < newest[:, None])
            state, top, total = _join(queries, keys, values, seen, state, top, total, inner, outer, CAPPED, PRECISION)
        if WALK == 1:
            state, top, total = _add(whole_state, whole_top, whole_total, state, top, total)

    if WALK == 2:
        of_head = (split.to(tl.int64) * num_rows + row) * HEADS + heads
        tl.store(out + of_head[:, None] * D + lanes[None, :], state, within)
        tl.store(tops + of_head, top, real)
        tl.store(totals + of_head, total, real)
    else:
        of_head = row.to(tl.int64) * HEADS + heads
        _finish(out, lse, of_head * D, of_head, real, state, top, total, D, BLOCK_D, LSE)


@triton.jit(do_not_specialize=["num_rows"])
def _combine(
    sums,  # [splits, rows, H, D] float32
    tops,  # [splits, rows, H]
    totals,
    out,  # [R, H, D]
    lse,  # [R, H]
    owners,
    offsets,
    reaches,
    starts,
    num_written,
    num_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    LSE: tl.constexpr,
):
    """Add up what a row's splits left, in ascending order."""
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    sequence = tl.load(owners + row)
    start = tl.load(starts + sequence)
    newest = start + tl.minimum(tl.load(reaches + row), tl.load(num_written + sequence))
    first = 1
    if WINDOW:
        first = tl.maximum(tl.maximum(start + tl.load(offsets + row) + 1 - WINDOW, 0) // SPLIT, 1)
    number = tl.arange(0, BLOCK_Q)
    lanes = tl.arange(0, BLOCK_D)
    real = number < QUERIES
    inside = real[:, None] & (lanes < D)[None, :]
    of_head = row.to(tl.int64) * HEADS + tl.program_id(1) * QUERIES + number
    state = tl.load(sums + of_head[:, None] * D + lanes[None, :], inside, other=0.0)
    top = tl.load(tops + of_head, real, other=_FLOOR)
    total = tl.load(totals + of_head, real, other=0.0)
    for split in tl.range(first, tl.cdiv(newest, SPLIT), num_stages=3):
        there = of_head + tl.cast(num_rows, tl.int64) * (split * HEADS)
        other = tl.load(sums + there[:, None] * D + lanes[None, :], inside, other=0.0)
        other_top = tl.load(tops + there, real, other=_FLOOR)
        other_total = tl.load(totals + there, real, other=0.0)
        state, top, total = _add(state, top, total, other, other_top, other_total)
    _finish(out, lse, of_head * D, of_head, real, state, top, total, D, BLOCK_D, LSE)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time."""

    queries: int  # packed rows
    keys: int  # positions per block
    warps: int
    stages: int  # blocks in flight


def tile_for(head_dim: int, dtype: torch.dtype) -> Tile:
    """By the rule of the module's docstring; never by rows, sequences or context."""
    wide = max(triton.next_power_of_2(head_dim), 16)
    warps = 4 if wide <= 128 else 8
    if dtype is torch.float32:
        return Tile(queries=16, keys=max(16, min(64, 2048 // wide)), warps=warps, stages=2)
    return Tile(queries=64, keys=max(32, min(64, 8192 // wide)), warps=warps, stages=3)


Walk = Literal["parallel", "serial"]
"""One program per split and a kernel that adds up, or one program for all splits of a tile. The bits are the same."""

_ONE, _SERIAL, _PARALLEL = 0, 1, 2


def space_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: StepRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the chain rows' keys and values into the pages, then let every row attend. Returns [R, H, D].

    As `attention.space_attention`, bits apart. Pages may have any size; `scale` must be positive. In 16 bits the
    softmax's weights are rounded to the values' dtype.
    """
    tables = StepTables.of(rows)
    store_kv(key, value, key_pages, value_pages, tables)
    return attend(query, key, value, key_pages, value_pages, tables, scale=scale, window=window, softcap=softcap)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: StepTables,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    walk: Walk | None = None,
    split: int = SPLIT,
) -> Tensor:
    """Let every row attend pages that hold the step's keys and values already. Returns [R, H, D].

    query [R, H, D], key and value [R, G, D] (read for mask rows), rows and heads possibly apart;
    pages [num_blocks, G, block_size, D]. Padding rows are 0. `walk`: None lets the sizes decide.
    Raises ValueError for a scale that is not positive, heads that do not divide, and slots that are apart.
    """
    out = query.new_empty(query.shape)
    _launch(
        query,
        key,
        value,
        (key_pages, value_pages),
        tables,
        out,
        None,
        scale=scale,
        window=window,
        softcap=softcap,
        masks=tables.pattern.has_masks,
        walk=walk,
        split=split,
    )
    return out


def prefix_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: StepTables,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    walk: Walk | None = None,
    split: int = SPLIT,
) -> tuple[Tensor, Tensor]:
    """What every row finds in the pages, masks left out: (out [R, H, D], lse [R, H]), float32, natural logarithm.

    A row that sees nothing there has out 0 and lse -inf. Tables with `num_written` 0 see committed slots alone.
    """
    out, lse = _float32_pair(query)
    pages = (key_pages, value_pages)
    # key and value are not read: any pointers of the right type do
    flat_keys, flat_values = key_pages[:, :, 0], value_pages[:, :, 0]
    _launch(
        query,
        flat_keys,
        flat_values,
        pages,
        tables,
        out,
        lse,
        scale=scale,
        window=window,
        softcap=softcap,
        walk=walk,
        split=split,
    )
    return out, lse


def in_step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: StepTables,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    chain: bool = True,
) -> tuple[Tensor, Tensor]:
    """What every row finds among the step's own keys: (out [R, H, D], lse [R, H]), float32, natural logarithm.

    `chain`: a row sees the chain rows of its sequence up to its reach, and a mask row its group up to itself: all that
    the slots [0, start) do not hold. Without: mask rows see their group, chain rows nothing (out 0, lse -inf).
    """
    out, lse = _float32_pair(query)
    _launch(
        query,
        key,
        value,
        None,
        tables,
        out,
        lse,
        scale=scale,
        window=window,
        softcap=softcap,
        masks=tables.pattern.has_masks,
        chain=chain,
    )
    return out, lse


@triton.jit
def _merge(
    first,
    first_lse,
    second,
    second_lse,
    out,
    lse,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
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
    # an output without a weight may be anything
    joined = tl.where(mine == 0, 0.0, one * mine) + tl.where(theirs == 0, 0.0, other * theirs)
    tl.store(out + at * D + lanes, (joined / divisor).to(out.dtype.element_ty), inside)
    tl.store(lse + at, tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each: (out [R, H, D] of the dtype, lse [R, H]).

    lse [R, H] float32, natural logarithm of the sum of exponentials of the scores; -inf where a row saw nothing.
    """
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


def _float32_pair(query: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=torch.float32, device=query.device),
        torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
    )


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor] | None,
    tables: StepTables,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    masks: bool = False,
    chain: bool = False,
    walk: Walk | None = None,
    split: int = SPLIT,
) -> None:
    num_heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    pattern = tables.pattern
    tile = tile_for(head_dim, query.dtype)
    _check(query, kv_heads, pages, tables, scale, split, tile)
    out[pattern.num_rows :].zero_()
    if lse is not None:
        lse[pattern.num_rows :].fill_(float("-inf"))
    if pattern.num_rows == 0:
        return
    tiles = pattern.tiles(num_heads // kv_heads, tile.queries)
    num_splits = 1 if pages is None else -(-tables.capacity // split)
    how = _walk(walk, num_splits, len(tiles) * kv_heads, pattern.num_rows * num_heads * head_dim, query.device)
    of_splits = out, out, out  # not read
    if how == _PARALLEL:
        shape = (num_splits, pattern.num_rows, num_heads)
        sums = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        tops, totals = torch.empty((2, *shape), dtype=torch.float32, device=query.device)
        of_splits = sums, tops, totals
    key_pages, value_pages = (key, value) if pages is None else pages
    inner, outer = _score_factors(scale, softcap)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    shared: dict[str, Any] = {"HEADS": num_heads, "KV_HEADS": kv_heads, "D": head_dim, "BLOCK_D": block_d}
    shared |= {"SPLIT": split, "WINDOW": window or 0, "LSE": lse is not None}
    _attend[(len(tiles), kv_heads, num_splits if how == _PARALLEL else 1)](
        query,
        key,
        value,
        key_pages,
        value_pages,
        of_splits[0] if how == _PARALLEL else out,
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
        BLOCK_SIZE=tables.block_size,
        M=tile.queries,
        N=tile.keys,
        CAPPED=softcap is not None,
        PAGES=pages is not None,
        MASKS=masks,
        CHAIN=chain,
        WALK=how,
        PRECISION=_precision(query.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shared,
    )
    if how == _PARALLEL:
        block_q = triton.next_power_of_2(num_heads // kv_heads)
        _combine[(pattern.num_rows, kv_heads)](
            *of_splits,
            out,
            out if lse is None else lse,
            pattern.owner,
            pattern.offset,
            pattern.reach,
            tables.starts,
            tables.num_written,
            pattern.num_rows,
            BLOCK_Q=block_q,
            num_warps=_combine_warps(block_q, block_d),
            **shared,
        )


def _check(
    query: Tensor,
    kv_heads: int,
    pages: tuple[Tensor, Tensor] | None,
    tables: StepTables,
    scale: float,
    split: int,
    tile: Tile,
) -> None:
    if not scale > 0:
        raise ValueError(f"The scale is {scale}; it must be positive. Negate the queries instead.")
    if query.shape[1] % kv_heads:
        raise ValueError(f"{query.shape[1]} query heads do not divide among {kv_heads} key-value heads.")
    if query.shape[0] < tables.pattern.num_rows:
        raise ValueError(f"There are {query.shape[0]} queries for the step's {tables.pattern.num_rows} rows.")
    if split % tile.keys:
        raise ValueError(f"A split of {split} positions is no multiple of a key block of {tile.keys}.")
    if pages is not None and (pages[0].stride()[2:] != (query.shape[2], 1) or pages[1].stride() != pages[0].stride()):
        raise ValueError(
            f"Pages of keys have strides {pages[0].stride()}, of values {pages[1].stride()}; "
            f"the slots of a page must be adjacent, and keys laid out as values."
        )


def _walk(asked: Walk | None, num_splits: int, num_programs: int, num_sums: int, device: torch.device) -> int:
    """Who walks the splits. One program all of them where programs without splits fill the device twice over, or where
    the sums would take too much memory."""
    if num_splits == 1:
        return _ONE
    if asked is not None:
        return _SERIAL if asked == "serial" else _PARALLEL
    full = num_programs >= 2 * _num_multiprocessors(device)
    return _SERIAL if full or 4 * num_splits * num_sums > WORKSPACE_BYTES else _PARALLEL


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What products are multiplied with before the cap (in log2 units of its tanh's square), and after it, in log2."""
    if softcap is None:
        return 0.0, scale * _LOG2_E
    return 2 * scale / softcap * _LOG2_E, softcap * _LOG2_E


def _precision(dtype: torch.dtype) -> str | None:
    return "ieee" if dtype is torch.float32 else None


def _combine_warps(block_q: int, block_d: int) -> int:
    """A warp per 256 sums: two 16-byte loads per thread and split."""
    return min(max(block_q * block_d // 256, 1), 4)


_POINTERS = ("query", "key", "value", "key_pages", "value_pages")
_TABLES = (
    *("tiles", "chain_firsts", "chain_counts", "mask_firsts", "mask_counts", "offsets", "reaches", "group_firsts"),
    *("starts", "num_written", "page_table"),
)
_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "page_stride", "head_stride")
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _tuned_attend(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    walk: int,
    *,
    masks: bool = True,
    chain: bool = False,
    pages: bool = True,
    window: int = 0,
    capped: bool = False,
) -> Tuned:
    tile = tile_for(head_dim, dtype)
    lse = not pages
    return Tuned(
        _attend,
        dict.fromkeys(_POINTERS, f"*{_TYPES[dtype]}")
        | {"out": "*fp32" if walk == _PARALLEL or lse else f"*{_TYPES[dtype]}", "lse": "*fp32"}
        | {"tops": "*fp32", "totals": "*fp32"}
        | dict.fromkeys(_TABLES, "*i32")
        | dict.fromkeys(_STRIDES, "i32:16")
        | {"table_width": "i32", "num_rows": "i32", "inner": "fp32", "outer": "fp32"},
        {
            "HEADS": heads[0],
            "KV_HEADS": heads[1],
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_SIZE": 16,
            "M": tile.queries,
            "N": tile.keys,
            "SPLIT": SPLIT,
            "WINDOW": window,
            "CAPPED": capped,
            "PAGES": pages,
            "MASKS": masks,
            "CHAIN": chain,
            "WALK": walk,
            "LSE": lse,
            "PRECISION": _precision(dtype),
        },
        tile.warps,
        tile.stages,
    )


def _tuned_combine(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> Tuned:
    block_q, block_d = triton.next_power_of_2(heads[0] // heads[1]), triton.next_power_of_2(head_dim)
    return Tuned(
        _combine,
        dict.fromkeys(("sums", "tops", "totals", "lse"), "*fp32")
        | {"out": f"*{_TYPES[dtype]}"}
        | dict.fromkeys(("owners", "offsets", "reaches", "starts", "num_written"), "*i32")
        | {"num_rows": "i32"},
        {
            "HEADS": heads[0],
            "KV_HEADS": heads[1],
            "D": head_dim,
            "BLOCK_Q": block_q,
            "BLOCK_D": block_d,
            "SPLIT": SPLIT,
            "WINDOW": 0,
            "LSE": False,
        },
        _combine_warps(block_q, block_d),
    )


_8B = ((32, 8), 128)
_SHAPES = (_8B, ((32, 8), 64), ((32, 32), 128), ((14, 2), 64), ((32, 32), 96), ((8, 4), 256), ((8, 1), 128))

TUNED = (
    *(_tuned_attend(torch.bfloat16, *_8B, walk) for walk in (_PARALLEL, _SERIAL, _ONE)),
    *(_tuned_attend(torch.bfloat16, *shape, walk) for shape in _SHAPES[1:] for walk in (_PARALLEL, _SERIAL)),
    *(_tuned_attend(torch.float16, *_8B, walk) for walk in (_PARALLEL, _SERIAL)),
    *(_tuned_attend(torch.float32, (8, 4), dim, walk) for dim in (32, 64, 128, 256) for walk in (_PARALLEL, _SERIAL)),
    _tuned_attend(torch.bfloat16, *_8B, _PARALLEL, masks=False),
    _tuned_attend(torch.bfloat16, *_8B, _SERIAL, window=4096),
    _tuned_attend(torch.bfloat16, (8, 4), 256, _PARALLEL, window=4096, capped=True),
    _tuned_attend(torch.bfloat16, *_8B, _ONE, pages=False, chain=True),
    _tuned_attend(torch.bfloat16, *_8B, _ONE, pages=False),
    *(_tuned_combine(torch.bfloat16, *shape) for shape in _SHAPES),
    Tuned(
        _merge,
        dict.fromkeys(("first", "first_lse", "second", "second_lse", "lse"), "*fp32") | {"out": "*bf16"},
        {"D": 128, "BLOCK_D": 128},
        1,
    ),
)
