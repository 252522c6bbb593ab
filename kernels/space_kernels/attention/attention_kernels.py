"""The Triton kernels of fused attention; `attention_triton` explains and launches them."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from space_kernels.build.launch import Tuned
from space_kernels.fp8_bits import widened

SPLIT = 256
"""Positions per split of the context. Fixed, so that a row's sums do not depend on the rest of the batch."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The tile of one program."""

    queries: int  # packed rows
    keys: int  # positions per block
    warps: int
    stages: int  # blocks in flight
    swapped: bool = False  # keys are the rows of the products with the pages, packed rows their columns


def tile_for(head_dim: int, dtype: torch.dtype, *, hopper: bool = False) -> AttentionTile:
    """Choose the tile by head size, dtype and device alone, never by rows, sequences or context."""
    wide = padded(head_dim)
    warps = 4 if wide <= 128 else 8
    if dtype is torch.float32:
        return AttentionTile(queries=16, keys=max(16, min(64, 2048 // wide)), warps=warps, stages=2)
    return AttentionTile(
        queries=64, keys=max(32, min(64, 8192 // wide)), warps=warps, stages=3 if hopper and wide <= 128 else 2
    )


LEAST_COLUMNS = 16
"""Packed rows of the smallest swapped tile."""


def swapped_tile(head_dim: int, dtype: torch.dtype, packed: int) -> AttentionTile | None:
    """Return the tile for sequences of at most `packed` packed rows that has the bits of `tile_for`, in less time on
    Hopper; None if there is none. It needs pages of the queries' dtype."""
    if dtype is torch.float32 or padded(head_dim) not in (64, 128) or packed > 32:
        return None
    return AttentionTile(
        queries=LEAST_COLUMNS if packed <= LEAST_COLUMNS else 32, keys=64, warps=4, stages=3, swapped=True
    )


def padded(head_dim: int) -> int:
    """Return the head size padded to a power of two, at least a tensor core's depth of 16."""
    return max(1 << (head_dim - 1).bit_length(), 16)


def combine_warps(block_d: int) -> int:
    """Return one warp per 128 lanes: a 16-byte load per thread and split."""
    return max(block_d // 128, 1)


def precision(dtype: torch.dtype) -> str | None:
    """Return "ieee" for float32; None (the tensor cores' default) for 16 bits."""
    return "ieee" if dtype is torch.float32 else None


_FLOOR: tl.constexpr = tl.constexpr(-1e30)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_AT_ONCE: tl.constexpr = tl.constexpr(1 if triton.knobs.runtime.interpret else 16)  # splits that `combine` loads

ONE_SPLIT, SERIAL, PARALLEL = 0, 1, 2
"""How the splits of the context are processed: a single split; all by one program in turn; one program each, whose
sums `combine` adds up."""

# Small functions are inlined by hand, because Triton's interpreter takes milliseconds per call.
# 2^n for whole n ≤ 0, exactly, and 0 below the least normal float32: ((max(n, -127) + 127) << 23) as a float's bits.


@triton.jit
def _join(
    queries,
    keys,
    values,
    seen,
    state,
    top,
    total,
    inner,
    outer,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Online softmax: add a block of keys and values [N, D] to the sums of queries [M, D]. seen [M, N]
    state [M, D], total [M]: weighted values and weights, times 2^-top; top [M]: a whole number ≥ every score so far.
    SWAP: seen is [N, M] and state [D, M]"""
    dtype: tl.constexpr = values.dtype
    KEYS: tl.constexpr = 0 if SWAP else 1
    if _INTERPRETED:  # the interpreter stores bfloat16 as integers and would multiply those; the products are the same
        queries, keys, values = queries.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    if SWAP:
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    else:
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if CAPPED:
        less = tl.exp2(-tl.abs(scores * inner))
        tanh = (1.0 - less) / (1.0 + less)
        scores = tl.where(scores < 0, -tanh, tanh)
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(top, tl.ceil(tl.max(scores, KEYS) * outer))
    weights = tl.exp2(tl.fma(scores, outer, -tl.expand_dims(peak, KEYS)))
    shrink = ((tl.maximum(top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    if dtype == tl.float32:
        total = total * shrink + tl.sum(weights, KEYS)
    else:  # in whole multiples of 2^-23, which add up to the same bits in any order: tiles differ in theirs
        digits = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
        total = total * shrink + tl.sum(digits, KEYS).to(tl.float32) * (1.0 / 8388608)
    weights = weights.to(dtype)
    if _INTERPRETED:
        weights = weights.to(tl.float32)
    state = state * tl.expand_dims(shrink, KEYS)
    if SWAP:
        state = tl.dot(tl.trans(values), weights, state, input_precision=PRECISION)
    else:
        state = tl.dot(weights, values, state, input_precision=PRECISION)
    return state, peak, total


@triton.jit
def _add(state, top, total, other_state, other_top, other_total, SWAP: tl.constexpr):
    """Add the sums of two sets of keys; exact except for one rounding of each sum."""
    LANES: tl.constexpr = 0 if SWAP else 1
    peak = tl.maximum(top, other_top)
    mine = ((tl.maximum(top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    theirs = ((tl.maximum(other_top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    state = state * tl.expand_dims(mine, LANES) + other_state * tl.expand_dims(theirs, LANES)
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
    STAGES: tl.constexpr,
):
    """Add the step's own keys [oldest, newest) to each row's sums; `key` and `value` point to the step's key 0."""
    lanes = tl.arange(0, BLOCK_D)
    for begin in tl.range(low // N * N, high, N, num_stages=STAGES):
        number = begin + tl.arange(0, N)
        inside = (number < high)[:, None] & (lanes < D)[None, :]
        place = number.to(tl.int64)[:, None]
        keys = tl.load(key + place * key_row + lanes[None, :], inside, other=0.0).to(tl.float32)
        keys = tl.where(tl.abs(keys) < float("inf"), keys, 0.0).to(key.dtype.element_ty)  # NaN compares false
        values = tl.load(value + place * value_row + lanes[None, :], inside, other=0.0).to(tl.float32)
        values = tl.where(tl.abs(values) < float("inf"), values, 0.0).to(value.dtype.element_ty)
        seen = (number[None, :] >= oldest[:, None]) & (number[None, :] < newest[:, None])
        state, top, total = _join(
            queries, keys, values, seen, state, top, total, inner, outer, CAPPED, PRECISION, False
        )
    return state, top, total


@triton.jit
def _finish(
    out, lse, place, heads_place, real, state, top, total, D: tl.constexpr, BLOCK_D: tl.constexpr, LSE: tl.constexpr
):
    """Divide the weighted values by the weights and store; a row that saw no key gets 0 and lse -inf."""
    lanes = tl.arange(0, BLOCK_D)
    some = total > 0
    divisor = tl.where(total == 0, 1.0, total)  # a NaN row stays NaN
    inside = real[:, None] & (lanes < D)[None, :]
    tl.store(out + place[:, None] + lanes[None, :], (state / divisor[:, None]).to(out.dtype.element_ty), inside)
    if LSE:
        found = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * _LN_2, float("-inf"))
        tl.store(lse + heads_place, found, real)


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def attend(
    query,
    key,
    value,
    key_pages,
    value_pages,
    out,  # [R, H, D]; with WALK 2 the sums [splits, rows, H, D]
    lse,  # [R, H]
    tops,  # [splits, rows, H] with WALK 2
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
    CHAIN: tl.constexpr,  # read the step's own chain keys from `key` instead of the pages
    WALK: tl.constexpr,  # 0: a single split; 1: all splits in turn; 2: one split per program, added up by `combine`
    LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,  # as `AttentionTile.swapped`
    OVERLAP: tl.constexpr,  # `combine` is launched meanwhile, and waits
):
    if OVERLAP:
        gdc_launch_dependents()
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    packed = tl.load(tiles + 2 * tile + 1) * M + tl.arange(0, M)
    start = tl.load(starts + sequence)
    written = tl.load(num_written + sequence)
    if WALK == 2:  # noqa: SIM102
        if (split > 0) & (split * SPLIT >= start + written):
            return
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
            STAGES=3,
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
            STAGES=1,  # usually a single block, so staging would only cost shared memory
        )
    if PAGES:
        if SWAP:
            state = tl.trans(state)
        TALL: tl.constexpr = BLOCK_D if SWAP else M
        WIDE: tl.constexpr = M if SWAP else BLOCK_D
        table = page_table + sequence.to(tl.int64) * table_width
        begin = tile_oldest // N * N
        end = tile_newest
        if WALK == 2:
            begin = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(end, (split + 1) * SPLIT)
        if WALK == 1:
            whole_state = tl.zeros([TALL, WIDE], tl.float32)
            whole_top = tl.full([M], _FLOOR, tl.float32)
            whole_total = tl.zeros([M], tl.float32)
            current = 0
        ahead = begin + tl.arange(0, N)
        page = tl.load(table + ahead // BLOCK_SIZE, ahead < end, other=0)
        for position in range(begin, end, N):
            if WALK == 1:  # noqa: SIM102
                if position // SPLIT != current:
                    whole_state, whole_top, whole_total = _add(
                        whole_state, whole_top, whole_total, state, top, total, SWAP
                    )
                    state = tl.zeros([TALL, WIDE], tl.float32)
                    top = tl.full([M], _FLOOR, tl.float32)
                    total = tl.zeros([M], tl.float32)
                    current = position // SPLIT
            positions = position + tl.arange(0, N)
            slot = page.to(tl.int64) * page_stride + head * head_stride + (positions % BLOCK_SIZE) * D
            inside = (positions < end)[:, None] & (lanes < D)[None, :]
            keys = tl.load(key_pages + slot[:, None] + lanes[None, :], inside, other=0)
            values = tl.load(value_pages + slot[:, None] + lanes[None, :], inside, other=0)
            ahead = positions + N  # a block ahead, so that no block waits for its page numbers
            page = tl.load(table + ahead // BLOCK_SIZE, ahead < end, other=0)
            if key_pages.dtype.element_ty == tl.uint8:
                keys, values = widened(keys, query.dtype.element_ty), widened(values, query.dtype.element_ty)
            at = tl.expand_dims(positions, 1 if SWAP else 0)
            seen = at < tl.expand_dims(newest, 0 if SWAP else 1)
            if WINDOW:
                seen = seen & (at >= tl.expand_dims(oldest, 0 if SWAP else 1))
            state, top, total = _join(
                queries, keys, values, seen, state, top, total, inner, outer, CAPPED, PRECISION, SWAP
            )
        if WALK == 1:
            state, top, total = _add(whole_state, whole_top, whole_total, state, top, total, SWAP)
        if SWAP:
            state = tl.trans(state)

    if WALK == 2:
        of_head = (split.to(tl.int64) * num_rows + row) * HEADS + heads
        tl.store(out + of_head[:, None] * D + lanes[None, :], state, within)
        tl.store(tops + of_head, top, real)
        tl.store(totals + of_head, total, real)
    else:
        of_head = row.to(tl.int64) * HEADS + heads
        _finish(out, lse, of_head * D, of_head, real, state, top, total, D, BLOCK_D, LSE)


@triton.jit(do_not_specialize=["num_rows"])
def combine(
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    LSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the sums of a row's splits for one head, in ascending order. Their loads do not wait for one another."""
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(owners + row)
    start = tl.load(starts + sequence)
    newest = start + tl.minimum(tl.load(reaches + row), tl.load(num_written + sequence))
    first = 1
    if WINDOW:
        first = tl.maximum(tl.maximum(start + tl.load(offsets + row) + 1 - WINDOW, 0) // SPLIT, 1)
    last = tl.cdiv(newest, SPLIT)
    lanes = tl.arange(0, BLOCK_D)
    if OVERLAP:
        gdc_wait()  # until `attend` has ended
    of_head = row.to(tl.int64) * HEADS + head
    state = tl.load(sums + of_head * D + lanes, lanes < D, other=0.0)
    top = tl.load(tops + of_head)
    total = tl.load(totals + of_head)
    for begin in range(first, last, _AT_ONCE):
        others, other_tops, other_totals = (), (), ()
        for number in tl.static_range(_AT_ONCE):
            split = begin + number
            there = of_head + tl.cast(num_rows, tl.int64) * (split * HEADS)
            width = tl.where(split < last, D, 0)
            others += (tl.load(sums + there * D + lanes, lanes < width, other=0.0),)
            other_tops += (tl.load(tops + there, width > 0, other=_FLOOR),)
            other_totals += (tl.load(totals + there, width > 0, other=0.0),)
        for number in tl.static_range(_AT_ONCE):
            peak = tl.maximum(top, other_tops[number])
            mine = ((tl.maximum(top - peak, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
            down = tl.maximum(other_tops[number] - peak, -127.0).to(tl.int32)
            theirs = ((down + 127) << 23).to(tl.float32, bitcast=True)
            state = state * mine + others[number] * theirs
            top, total = peak, total * mine + other_totals[number] * theirs
    heads = of_head + tl.arange(0, 1)
    zero = tl.zeros([1], tl.float32)
    _finish(out, lse, heads * D, heads, heads >= 0, state[None, :], top + zero, total + zero, D, BLOCK_D, LSE)


_ATTEND_TYPES = {
    "tiles chain_firsts chain_counts mask_firsts mask_counts offsets reaches group_firsts": "*i32",
    "starts num_written page_table": "*i32",
    "query_row query_head key_row key_head value_row value_head page_stride head_stride": "i32:16",
    "table_width num_rows": "i32",
    "inner outer": "fp32",
    "lse tops totals": "*fp32",
}
_COMBINE_TYPES = {
    "sums tops totals lse": "*fp32",
    "owners offsets reaches starts num_written": "*i32",
    "num_rows": "i32",
}
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


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
    fp8: bool = False,
    hopper: bool = False,
    packed: int = 64,  # rows
    split: int = SPLIT,
) -> Tuned:
    tile = (swapped_tile(head_dim, dtype, packed) if hopper else None) or tile_for(head_dim, dtype, hopper=hopper)
    lse = not pages
    types = _ATTEND_TYPES | {"query key value": _TYPES[dtype], "key_pages value_pages": "*u8" if fp8 else _TYPES[dtype]}
    types |= {"out": "*fp32" if walk == PARALLEL or lse else _TYPES[dtype]}
    shape = {"HEADS": heads[0], "KV_HEADS": heads[1], "D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_SIZE": 16}
    shape |= {"M": tile.queries, "N": tile.keys, "SPLIT": split, "WINDOW": window, "CAPPED": capped, "PAGES": pages}
    constants = shape | {"MASKS": masks, "CHAIN": chain, "WALK": walk, "LSE": lse, "PRECISION": precision(dtype)}
    constants |= {"SWAP": tile.swapped, "OVERLAP": False}
    tuned = Tuned.of(attend, types, constants, tile.warps, tile.stages)
    return _on_hopper(tuned, overlap=tile.swapped and walk == PARALLEL) if hopper else tuned


def _on_hopper(tuned: Tuned, *, overlap: bool) -> Tuned:
    return replace(tuned, constexprs={**tuned.constexprs, "OVERLAP": overlap}, capabilities=(90,))


def _tuned_combine(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> Tuned:
    block_d = padded(head_dim)
    constants = {"HEADS": heads[0], "D": head_dim, "BLOCK_D": block_d}
    constants |= {"SPLIT": SPLIT, "WINDOW": 0, "LSE": False, "OVERLAP": False}
    return Tuned.of(combine, _COMBINE_TYPES | {"out": _TYPES[dtype]}, constants, combine_warps(block_d))


_8B = ((32, 8), 128)
_SHAPES = (_8B, ((32, 8), 64), ((32, 32), 128), ((14, 2), 64), ((32, 32), 96), ((8, 4), 256), ((8, 1), 128))

TUNED = (
    *(_tuned_attend(torch.bfloat16, *_8B, walk) for walk in (PARALLEL, SERIAL, ONE_SPLIT)),
    *(_tuned_attend(torch.bfloat16, *shape, walk) for shape in _SHAPES[1:] for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.float16, *shape, walk) for shape in _SHAPES for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.float32, (8, 4), dim, walk) for dim in (32, 64, 128, 256) for walk in (PARALLEL, SERIAL)),
    _tuned_attend(torch.bfloat16, *_8B, PARALLEL, masks=False),
    _tuned_attend(torch.bfloat16, *_8B, SERIAL, window=4096),
    _tuned_attend(torch.bfloat16, (8, 4), 256, PARALLEL, window=4096, capped=True),
    _tuned_attend(torch.bfloat16, *_8B, ONE_SPLIT, pages=False, chain=True),
    _tuned_attend(torch.bfloat16, *_8B, ONE_SPLIT, pages=False),
    *(_tuned_attend(torch.bfloat16, *_8B, walk, fp8=True) for walk in (PARALLEL, SERIAL, ONE_SPLIT)),
    *(_tuned_attend(torch.float16, *_8B, walk, fp8=True) for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.bfloat16, *shape, walk, fp8=True) for shape in _SHAPES[1:] for walk in (PARALLEL, SERIAL)),
    _tuned_attend(torch.bfloat16, (8, 4), 256, PARALLEL, window=4096, capped=True, fp8=True),
    *(
        _tuned_attend(torch.bfloat16, *_8B, walk, hopper=True, fp8=fp8)
        for walk in (PARALLEL, SERIAL)
        for fp8 in (False, True)
    ),
    *(
        _tuned_attend(dtype, heads, head_dim, walk, masks=masks, hopper=True, packed=packed)
        for dtype, heads, head_dim, packed, masks in (
            (torch.bfloat16, *_8B, 16, False),
            (torch.bfloat16, *_8B, 32, False),
            (torch.bfloat16, *_8B, 32, True),
            (torch.float16, *_8B, 32, False),
            (torch.bfloat16, (14, 2), 64, 32, False),
            (torch.bfloat16, (32, 32), 96, 16, False),
        )
        for walk in (PARALLEL, ONE_SPLIT)
    ),
    _tuned_attend(torch.bfloat16, *_8B, SERIAL, masks=False, hopper=True, packed=16),
    _tuned_attend(torch.bfloat16, *_8B, PARALLEL, split=2 * SPLIT),
    _tuned_attend(torch.bfloat16, *_8B, PARALLEL, masks=False, hopper=True, packed=16, split=2 * SPLIT),
    *(_tuned_combine(torch.bfloat16, *shape) for shape in _SHAPES),
    _on_hopper(_tuned_combine(torch.bfloat16, *_8B), overlap=True),
    *(_tuned_combine(torch.float16, *shape) for shape in _SHAPES),
)
