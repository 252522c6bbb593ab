"""The step's small change on a GPU: rows, masks and the state's successor, one launch each.

Same functions as `step_state`, which spell each of them in some thirty tensor operations: at two microseconds a launch,
also inside a graph, that would be a tenth of a small model's step.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.law_tensors import Stages
from space_kernels.sampling import Choice
from space_kernels.step_state import (
    NO_SLOT,
    RESULT_FIXED,
    DeviceRows,
    MaskRows,
    Prefixes,
    StepIndex,
    StepState,
    chain_choices,
    mask_choices,
    result_width,
)
from space_kernels.step_verdict import StepVerdict
from space_kernels.tuned import Tuned
from space_kernels.verdict_triton import judge

__all__ = ["Prefixes", "Stages", "advance", "chain_choices", "judge_step", "mask_choices", "masks", "rows"]

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_FIXED: tl.constexpr = tl.constexpr(RESULT_FIXED)
_BLOCK = 128


@triton.jit
def _room(
    lives, num_knowns, num_lefts, num_drafts, max_drafts, num_pages, sequence, inside, k, BLOCK_SIZE: tl.constexpr
):
    """Where a sequence's root stands, whether it runs, and how many of its drafts do."""
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


@triton.jit
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
    start, running, number = _room(
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
    start, running, number = _room(
        lives, num_knowns, num_lefts, num_drafts, max_drafts, num_pages, row, of_batch, k, BLOCK_SIZE
    )
    tl.store(starts + row, start.to(tl.int32), of_batch)
    tl.store(num_written + row, tl.where(running, number + 1, 0).to(tl.int32), of_batch)
    tl.store(num_live + row, number, of_batch)
    tl.store(runnings + row, running.to(tl.uint8), of_batch)


def rows(state: StepState, index: StepIndex, mask_ids: Tensor | None = None) -> DeviceRows:
    """Lay the batch out: `step_state.rows`."""
    S, k, R = index.num_sequences, index.num_drafts, index.num_padded
    device = state.root.device

    def room(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    laid_out = DeviceRows(
        ids=room(R),
        positions=room(R),
        slots=room(index.num_chain_rows),
        starts=room(S, torch.int32),
        num_written=room(S, torch.int32),
        num_live=room(S),
        running=room(S, torch.bool),
    )
    has_ids = mask_ids is not None and index.most_drafts > 0
    _rows[(triton.cdiv(R, _BLOCK),)](
        state.live.view(torch.uint8),
        state.root,
        state.num_known,
        state.num_left,
        state.drafts,
        state.num_drafts,
        state.max_drafts,
        state.page_table,
        state.num_pages,
        index.owner,
        index.offset,
        index.mask,
        mask_ids if mask_ids is not None else index.mask,
        laid_out.ids,
        laid_out.positions,
        laid_out.slots,
        laid_out.starts,
        laid_out.num_written,
        laid_out.num_live,
        laid_out.running.view(torch.uint8),
        S,
        k,
        index.num_chain_rows,
        R,
        state.window,
        state.page_table.shape[1],
        state.drafts.stride(0),
        MASK_IDS=has_ids,
        BLOCK_SIZE=state.block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return laid_out


def judge_step(state: StepState, index: StepIndex, laid_out: DeviceRows, choice: Choice) -> StepVerdict:
    """`step_state.judge_step`."""
    return judge(
        choice.ids,
        choice.usable,
        state.drafts[:, : index.num_drafts],
        laid_out.num_live,
        laid_out.running,
        state.num_left,
        state.end_ids,
        state.num_eos,
    )


@triton.jit
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


def masks(state: StepState, index: StepIndex, verdict: StepVerdict) -> MaskRows:
    """The masks that the next drafts come from: `step_state.masks`."""
    S, most = index.num_sequences, index.most_drafts
    found = MaskRows(*(torch.empty(shape, dtype=torch.int64, device=state.root.device) for shape in ((S, most), S, S)))
    _masks[(S,)](
        verdict.lengths,
        verdict.end,
        state.num_left,
        state.max_drafts,
        state.max_masks,
        index.masks,
        index.mask_starts,
        found.rows,
        found.first,
        found.count,
        index.num_drafts,
        most,
        index.num_rows,
        GROUPS=triton.next_power_of_2(index.num_drafts + 1),
        PLACES=triton.next_power_of_2(max(1, most)),
        num_warps=1,
    )
    return found


@triton.jit
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


def advance(
    state: StepState,
    laid_out: DeviceRows,
    verdict: StepVerdict,
    drafts: Tensor,
    num_drafts: Tensor,
    banned_ids: Tensor,
) -> Tensor:
    """Let every sequence go on, in place; the step's result for the host: `step_state.advance`."""
    S, K = state.drafts.shape
    result = torch.empty(S, result_width(K), dtype=torch.int32, device=state.root.device)
    k = verdict.emitted.shape[1] - 1
    _advance[(S,)](
        state.live.view(torch.uint8),
        state.root,
        state.num_known,
        state.num_left,
        state.drafts,
        state.num_drafts,
        state.history,
        state.counts,
        laid_out.num_live,
        verdict.accepted,
        verdict.emitted,
        verdict.lengths,
        verdict.end,
        drafts,
        num_drafts,
        banned_ids,
        result,
        K,
        k,
        drafts.shape[1],
        len(banned_ids),
        state.vocab_size,
        drafts.stride(0),
        state.history.stride(0),
        state.drafts.stride(0),
        HISTORY=state.history.shape[1] > 0,
        COUNTS=state.counts.shape[1] > 0,
        PLACES=triton.next_power_of_2(max(K, k) + 1),
        BANNED=triton.next_power_of_2(max(1, len(banned_ids))),
        num_warps=1,
    )
    return result


def _tuned() -> tuple[Tuned, ...]:
    found = []
    state = ["roots", "num_knowns", "num_lefts", "drafts", "num_drafts", "max_drafts", "num_pages"]
    longs = [*state, "owners", "offsets", "masks", "mask_ids", "ids", "positions", "slots", "num_live"]
    layout = dict.fromkeys(("S", "k", "num_chain_rows", "num_padded", "window", "table_width"), "i32")
    of_rows = dict.fromkeys(longs, "*i64") | layout | {"draft_stride": "i32"}
    of_rows |= {"lives": "*u8", "runnings": "*u8", "page_table": "*i32", "starts": "*i32", "num_written": "*i32"}
    for size in (16, 32):
        for mask_ids in (False, True):
            constants = {"MASK_IDS": mask_ids, "BLOCK_SIZE": size, "BLOCK": _BLOCK}
            found.append(Tuned(_rows, of_rows, constants, 4))
    of_masks = dict.fromkeys(("lengths", "ends", "num_lefts", "max_drafts", "max_masks", "sizes"), "*i64")
    of_masks |= dict.fromkeys(("mask_starts", "flat_rows", "firsts", "counts"), "*i64")
    of_masks |= {"k": "i32", "most": "i32", "num_rows": "i32"}
    state = ["roots", "num_knowns", "num_lefts", "state_drafts", "num_state_drafts", "history"]
    names = [*state, "num_live", "accepteds", "emitteds", "lengths", "ends", "drafts", "num_drafts", "banned"]
    of_state = dict.fromkeys(names, "*i64") | {"lives": "*u8", "counts": "*i32", "result": "*i32"}
    numbers = ("K", "k", "num_proposed", "num_banned", "V", "draft_stride", "history_stride", "state_stride")
    of_state |= dict.fromkeys(numbers, "i32")
    for places in (2, 4, 8, 16):
        found.append(Tuned(_masks, of_masks, {"GROUPS": places, "PLACES": places}, 1))
        for kept in (False, True):
            constants = {"HISTORY": kept, "COUNTS": kept, "PLACES": places, "BANNED": 8}
            found.append(Tuned(_advance, of_state, constants, 1))
    return tuple(found)


TUNED = _tuned()
