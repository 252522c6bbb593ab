"""The Triton kernels that `state_triton` launches."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from space_kernels.step.state import NO_SLOT, RESULT_FIXED

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_FIXED: tl.constexpr = tl.constexpr(RESULT_FIXED)


@triton.jit
def _sequence_extent(
    lives, num_knowns, num_lefts, num_drafts, max_drafts, num_pages, sequence, inside, k, BLOCK_SIZE: tl.constexpr
):
    """Return a sequence's root position, whether it runs, and its number of live drafts."""
    live = tl.load(lives + sequence, inside, other=0) != 0
    start = tl.where(live, tl.load(num_knowns + sequence, inside, other=1) - 1, 0)
    free = tl.load(num_pages + sequence, inside, other=0) * BLOCK_SIZE - start
    running = live & (free > 0)
    number = tl.minimum(
        tl.load(num_drafts + sequence, inside, other=0), tl.load(max_drafts + sequence, inside, other=0)
    )
    number = tl.minimum(number, tl.minimum(free, tl.load(num_lefts + sequence, inside, other=0)) - 1)
    number = tl.minimum(tl.maximum(number, 0), k)
    return start, running, tl.where(running, number, 0)


@triton.jit(do_not_specialize=["S", "k", "num_chain_rows", "num_padded"])
def _rows(
    lives,
    roots,
    num_knowns,
    num_lefts,
    drafts,
    num_drafts,
    max_drafts,
    page_table,
    num_pages,
    owners,
    offsets,
    masks,
    mask_ids,
    ids,
    positions,
    slots,
    starts,
    num_written,
    num_live,
    runnings,
    S,
    k,
    num_chain_rows,
    num_padded,
    window,
    table_width,
    draft_stride,
    MASK_IDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_padded
    sequence = tl.load(owners + row, inside, other=0)
    start, running, number = _sequence_extent(
        lives, num_knowns, num_lefts, num_drafts, max_drafts, num_pages, sequence, inside, k, BLOCK_SIZE
    )
    offset = tl.load(offsets + row, inside, other=0)
    position = tl.minimum(start + offset, window - 1)
    chain = row < num_chain_rows
    is_draft = chain & (offset > 0) & (offset <= number)
    id_ = tl.where(chain & (offset == 0), tl.load(roots + sequence, inside, other=0), 0)
    id_ += tl.load(drafts + sequence * draft_stride + offset - 1, is_draft, other=0)
    if MASK_IDS:
        mask = tl.load(masks + row, inside, other=-1)
        id_ += tl.load(mask_ids + mask, mask >= 0, other=0)
    tl.store(ids + row, id_, inside)
    tl.store(positions + row, position, inside)
    writes = chain & running & (offset <= number)
    page = tl.minimum(position // BLOCK_SIZE, table_width - 1)
    block = tl.load(page_table + sequence * table_width + page, writes, other=0).to(tl.int64)
    tl.store(slots + row, tl.where(writes, block * BLOCK_SIZE + position % BLOCK_SIZE, _NO_SLOT), chain)

    of_batch = row < S
    start, running, number = _sequence_extent(
        lives, num_knowns, num_lefts, num_drafts, max_drafts, num_pages, row, of_batch, k, BLOCK_SIZE
    )
    tl.store(starts + row, start.to(tl.int32), of_batch)
    tl.store(num_written + row, tl.where(running, number + 1, 0).to(tl.int32), of_batch)
    tl.store(num_live + row, number, of_batch)
    tl.store(runnings + row, running.to(tl.uint8), of_batch)


@triton.jit(do_not_specialize=["k", "most", "num_rows"])
def _masks(
    lengths,
    ends,
    num_lefts,
    max_drafts,
    max_masks,
    sizes,
    mask_starts,
    flat_rows,
    firsts,
    counts,
    k,
    most,
    num_rows,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    accepted = tl.maximum(length - 1, 0)
    groups = tl.arange(0, GROUPS)
    inside = groups <= k
    size = tl.minimum(tl.load(sizes + groups, inside, other=0), tl.load(max_masks + sequence))
    reaches = inside & (groups <= accepted) & (size >= accepted - groups + 1)
    chosen = tl.max(tl.where(reaches, groups, -1), 0)
    group = tl.maximum(chosen, 0)
    first = accepted - group + 1
    size = tl.max(tl.where(groups == group, size, 0), 0)
    wanted = tl.minimum(tl.load(max_drafts + sequence), tl.load(num_lefts + sequence) - length - 1)
    count = tl.maximum(tl.minimum(size - first + 1, wanted), 0)
    drafts = (chosen >= 0) & (length > 0) & (tl.load(ends + sequence) == 0)
    count = tl.where(drafts, count, 0)
    places = tl.arange(0, PLACES)
    begin = tl.load(mask_starts + sequence * (k + 1) + group) + tl.where(count > 0, first - 1, 0)
    flat = begin + tl.minimum(places, tl.maximum(count - 1, 0))
    tl.store(flat_rows + sequence * most + places, tl.minimum(flat, num_rows - 1), places < most)
    tl.store(firsts + sequence, tl.where(count > 0, first, 0))
    tl.store(counts + sequence, count)


@triton.jit(do_not_specialize=["k", "num_proposed"])
def _advance(
    lives,
    roots,
    num_knowns,
    num_lefts,
    state_drafts,
    num_state_drafts,
    history,
    counts,
    num_live,
    accepteds,
    emitteds,
    lengths,
    ends,
    drafts,
    num_drafts,
    banned,
    result,
    K,
    k,
    num_proposed,
    num_banned,
    V,
    draft_stride,
    history_stride,
    state_stride,
    HISTORY: tl.constexpr,
    COUNTS: tl.constexpr,
    PLACES: tl.constexpr,
    BANNED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    length = tl.load(lengths + sequence)
    moved = length > 0
    stands = places < length
    emitted = tl.load(emitteds + sequence * (k + 1) + places, places <= k, other=0)
    num_known = tl.load(num_knowns + sequence)
    if HISTORY:
        tl.store(history + sequence * history_stride + num_known + places, emitted, stands)
    if COUNTS:
        tl.atomic_add(counts + sequence * V + emitted, tl.full([PLACES], 1, tl.int32), stands)

    of_state = state_drafts + sequence * state_stride + places
    kept = tl.load(of_state, places < K, other=0)
    width = tl.minimum(num_proposed, K)
    proposed = tl.load(drafts + sequence * draft_stride + places, places < width, other=0)
    lanes = tl.arange(0, BANNED)
    never = tl.load(banned + lanes, lanes < num_banned, other=-1)
    is_never = tl.max((proposed[:, None] == never[None, :]).to(tl.int32), 1)
    valid = (proposed >= 0) & (proposed < V) & (is_never == 0)
    num_valid = tl.min(tl.where(valid, PLACES, places), 0)
    number = tl.minimum(tl.minimum(tl.load(num_drafts + sequence), width), num_valid)
    number = tl.where(moved, number, tl.load(num_state_drafts + sequence))
    drafted = tl.where(moved, proposed, kept)
    last = tl.sum(tl.where(places == length - 1, emitted, 0), 0)
    num_known += length
    end = tl.load(ends + sequence)
    tl.debug_barrier()
    tl.store(of_state, drafted, places < K)
    tl.store(num_state_drafts + sequence, number)
    tl.store(roots + sequence, tl.where(moved, last, tl.load(roots + sequence)))
    tl.store(num_knowns + sequence, num_known)
    tl.store(num_lefts + sequence, tl.load(num_lefts + sequence) - length)
    tl.store(lives + sequence, tl.where(end == 0, tl.load(lives + sequence), 0).to(tl.uint8))

    of_result = result + sequence * (_FIXED + 2 * K + 1)
    tl.store(of_result, length.to(tl.int32))
    tl.store(of_result + 1, tl.load(accepteds + sequence).to(tl.int32))
    tl.store(of_result + 2, tl.load(num_live + sequence).to(tl.int32))
    tl.store(of_result + 3, end.to(tl.int32))
    tl.store(of_result + 4, num_known.to(tl.int32))
    tl.store(of_result + 5, number.to(tl.int32))
    tl.store(of_result + _FIXED + places, tl.where(stands, emitted, 0).to(tl.int32), places <= K)
    tl.store(of_result + _FIXED + K + 1 + places, drafted.to(tl.int32), places < K)
