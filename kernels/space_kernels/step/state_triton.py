"""The functions of `state` as Triton kernels, one launch each. The reference needs about thirty tensor operations for
each. At two microseconds per launch, even inside a CUDA graph, that would be a tenth of a small model's step."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.step import state as step_state
from space_kernels.step.state import (
    NO_SLOT,
    RESULT_FIXED,
    DeviceMaskRows,
    DeviceRows,
    StepIndex,
    StepState,
    result_width,
)
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.verification import EndCode, StepVerification

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_FIXED: tl.constexpr = tl.constexpr(RESULT_FIXED)
_BLOCK = 128


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


_NONE: tl.constexpr = tl.constexpr(int(EndCode.NONE))
_EOS: tl.constexpr = tl.constexpr(int(EndCode.EOS))
_STOP_ID: tl.constexpr = tl.constexpr(int(EndCode.STOP_ID))
_LENGTH: tl.constexpr = tl.constexpr(int(EndCode.LENGTH))
_ERROR: tl.constexpr = tl.constexpr(int(EndCode.ERROR))


@triton.jit
def _leading(holds, places, PLACES: tl.constexpr):
    """Return the number of leading places where `holds` is true."""
    return tl.min(tl.where(holds, PLACES, places), 0)


@triton.jit(do_not_specialize=["k"])
def _verify(
    samples,
    valids,
    drafts,
    num_lives,
    runnings,
    num_lefts,
    end_ids,
    num_eos,
    accepteds,
    emitteds,
    lengths,
    ends,
    k,
    E,
    draft_stride,
    end_stride,
    ENDS: tl.constexpr,
    PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    inside = places <= k
    sample = tl.load(samples + sequence * (k + 1) + places, inside, other=-1).to(tl.int64)
    draft = tl.load(drafts + sequence * draft_stride + places, places < k, other=-1).to(tl.int64)
    num_live = tl.load(num_lives + sequence)
    accepted = _leading((sample == draft) & (places < k) & (places < num_live), places, PLACES)
    length = accepted + 1
    fit = _leading((tl.load(valids + sequence * (k + 1) + places, inside, other=0) != 0) & inside, places, PLACES)
    made = tl.minimum(length, fit)
    lanes = tl.arange(0, ENDS)
    end_id = tl.load(end_ids + sequence * end_stride + lanes, lanes < E, other=-1)
    is_end = sample[:, None] == end_id[None, :]
    is_end = is_end & (end_id >= 0)[None, :]
    eos = tl.max((is_end & (lanes < tl.load(num_eos + sequence))[None, :]).to(tl.int32), 1)
    ended = tl.max(is_end.to(tl.int32), 1)
    last = places + 1 >= tl.load(num_lefts + sequence)
    goes_on = _leading((ended == 0) & (last == 0) & inside, places, PLACES)
    running = tl.load(runnings + sequence) != 0
    length = tl.where(running, tl.minimum(made, goes_on + 1), 0)
    here = places == goes_on
    is_eos, is_stop = tl.max(tl.where(here, eos, 0), 0), tl.max(tl.where(here, ended, 0), 0)
    why = tl.where(is_eos != 0, _EOS, tl.where(is_stop != 0, _STOP_ID, _LENGTH))
    end = tl.where(length > goes_on, why, _NONE)
    end = tl.where(running & (fit == 0), _ERROR, end)
    accepted = tl.minimum(accepted, length)
    tl.store(ends + sequence, end.to(tl.int64))
    tl.store(accepteds + sequence, accepted.to(tl.int64))
    tl.store(lengths + sequence, length.to(tl.int64))
    tl.store(emitteds + sequence * (k + 1) + places, tl.where(places < length, sample, 0), inside)


def verify_sequences(
    samples: Tensor,
    valid: Tensor,
    drafts: Tensor,
    num_live: Tensor,
    running: Tensor,
    num_left: Tensor,
    end_ids: Tensor,
    num_eos: Tensor,
) -> StepVerification:
    """As `verification.verify_sequences`; drafts and end_ids may have any row stride."""
    S, k = drafts.shape
    accepted, lengths, end = (torch.empty(S, dtype=torch.int64, device=samples.device) for _ in range(3))
    emitted = samples.new_empty(S, k + 1)
    E = end_ids.shape[1]
    if S:
        _verify[(S,)](
            samples.contiguous(),
            valid.contiguous().view(torch.uint8),
            drafts,
            num_live,
            running.view(torch.uint8),
            num_left,
            end_ids,
            num_eos,
            accepted,
            emitted,
            lengths,
            end,
            k,
            E,
            drafts.stride(0),
            end_ids.stride(0),
            ENDS=triton.next_power_of_2(max(1, E)),
            PLACES=_places(k),
            num_warps=1,
        )
    return StepVerification(accepted, emitted, lengths, end)


def _places(k: int) -> int:
    """Return the block size: places for a root and k drafts, and one more."""
    return triton.next_power_of_2(k + 2)


@triton.jit(do_not_specialize=["k", "width"])
def _synthetic_accept(
    chances,
    ids,
    lucks,
    others,
    counts,
    num_knowns,
    num_prompts,
    emitteds,
    lengths,
    firsts,
    drafts,
    synthetically_accepted,
    k,
    width,
    deepest,
    known_stride,
    draft_stride,
    PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    count, length = tl.load(counts + sequence), tl.load(lengths + sequence)
    begin = tl.load(num_knowns + sequence) - tl.load(num_prompts + sequence)
    of_sequence = sequence * known_stride
    stands = (places <= k) & (places < length)
    emitted = tl.load(emitteds + sequence * (k + 1) + places, stands, other=0)
    expected = tl.load(ids + of_sequence + begin + places, stands & (begin + places < count), other=-1).to(tl.int64)
    strays = tl.max(tl.where(stands & (expected != emitted), 1, 0), 0)

    at = begin + length + places
    inside = places < width
    known = inside & (at < tl.where(strays == 0, count, 0))
    right = tl.load(ids + of_sequence + at, known, other=0).to(tl.int64)
    other = tl.load(others + of_sequence + at, known, other=0).to(tl.int64)
    luck = tl.load(lucks + of_sequence + at, known, other=0.0).to(tl.float64)
    depth = tl.minimum(tl.maximum(tl.load(firsts + sequence) + places, 1), deepest)
    is_accepted = luck < tl.load(chances + depth - 1)
    draft = tl.load(drafts + sequence * draft_stride + places, inside, other=0)
    tl.store(
        synthetically_accepted + sequence * width + places,
        tl.where(known, tl.where(is_accepted, right, other), draft),
        inside,
    )


def synthetic_accept(
    synthetic_tensors: SyntheticAcceptanceTensors,
    num_known: Tensor,
    num_prompt: Tensor,
    verification: StepVerification,
    first: Tensor,
    drafts: Tensor,
) -> Tensor:
    """As `synthetic_acceptance.synthetic_accept`."""
    S, width = drafts.shape
    k = verification.emitted.shape[1] - 1
    synthetically_accepted = torch.empty(S, width, dtype=torch.int64, device=drafts.device)
    _synthetic_accept[(S,)](
        synthetic_tensors.chances,
        synthetic_tensors.ids,
        synthetic_tensors.luck,
        synthetic_tensors.others,
        synthetic_tensors.counts,
        num_known,
        num_prompt,
        verification.emitted,
        verification.lengths,
        first,
        drafts,
        synthetically_accepted,
        k,
        width,
        len(synthetic_tensors.chances),
        synthetic_tensors.ids.stride(0),
        drafts.stride(0),
        PLACES=triton.next_power_of_2(max(k + 1, width)),
        num_warps=1,
    )
    return synthetically_accepted


def rows(state: StepState, index: StepIndex, mask_ids: Tensor | None = None) -> DeviceRows:
    """As `state.rows`."""
    S, k, R = index.num_sequences, index.num_drafts, index.num_padded
    device = state.root.device

    def empty(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    laid_out = DeviceRows(
        ids=empty(R),
        positions=empty(R),
        slots=empty(index.num_chain_rows),
        starts=empty(S, torch.int32),
        num_written=empty(S, torch.int32),
        num_live=empty(S),
        running=empty(S, torch.bool),
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


verify_step = partial(step_state.verify_step, verify=verify_sequences)
"""As `state.verify_step`."""


def masks(state: StepState, index: StepIndex, verification: StepVerification) -> DeviceMaskRows:
    """As `state.masks`."""
    S, most = index.num_sequences, index.most_drafts
    found = DeviceMaskRows(
        *(torch.empty(shape, dtype=torch.int64, device=state.root.device) for shape in ((S, most), S, S))
    )
    _masks[(S,)](
        verification.lengths,
        verification.end,
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


def advance(
    state: StepState,
    laid_out: DeviceRows,
    verification: StepVerification,
    drafts: Tensor,
    num_drafts: Tensor,
    banned_ids: Tensor,
) -> Tensor:
    """As `state.advance`."""
    S, K = state.drafts.shape
    result = torch.empty(S, result_width(K), dtype=torch.int32, device=state.root.device)
    k = verification.emitted.shape[1] - 1
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
        verification.accepted,
        verification.emitted,
        verification.lengths,
        verification.end,
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


_VERIFY_TYPES = {
    "samples drafts num_lives num_lefts end_ids num_eos accepteds emitteds lengths ends": "*i64",
    "valids runnings": "*u8",
    "k E draft_stride end_stride": "i32",
}
_SYNTHETIC_TYPES = {
    "ids others": "*i32",
    "counts num_knowns num_prompts emitteds lengths firsts drafts synthetically_accepted": "*i64",
    "k width deepest known_stride draft_stride": "i32",
    "chances": "*fp64",
    "lucks": "*fp32",
}
_ROWS_TYPES = {
    "roots num_knowns num_lefts drafts num_drafts max_drafts num_pages owners offsets masks mask_ids": "*i64",
    "ids positions slots num_live": "*i64",
    "S k num_chain_rows num_padded window table_width draft_stride": "i32",
    "lives runnings": "*u8",
    "page_table starts num_written": "*i32",
}
_MASKS_TYPES = {
    "lengths ends num_lefts max_drafts max_masks sizes mask_starts flat_rows firsts counts": "*i64",
    "k most num_rows": "i32",
}
_ADVANCE_TYPES = {
    "roots num_knowns num_lefts state_drafts num_state_drafts history num_live accepteds emitteds": "*i64",
    "lengths ends drafts num_drafts banned": "*i64",
    "lives": "*u8",
    "counts result": "*i32",
    "K k num_proposed num_banned V draft_stride history_stride state_stride": "i32",
}
TUNED = (
    *(
        Tuned.of(_rows, _ROWS_TYPES, {"MASK_IDS": mask_ids, "BLOCK_SIZE": size, "BLOCK": _BLOCK})
        for size in (16, 32)
        for mask_ids in (False, True)
    ),
    *(Tuned.of(_verify, _VERIFY_TYPES, {"ENDS": 16, "PLACES": places}, 1) for places in (2, 4, 8, 16)),
    *(Tuned.of(_synthetic_accept, _SYNTHETIC_TYPES, {"PLACES": places}, 1) for places in (2, 4, 8, 16)),
    *(Tuned.of(_masks, _MASKS_TYPES, {"GROUPS": places, "PLACES": places}, 1) for places in (2, 4, 8, 16)),
    *(
        Tuned.of(_advance, _ADVANCE_TYPES, {"HISTORY": kept, "COUNTS": kept, "PLACES": places, "BANNED": 8}, 1)
        for places in (2, 4, 8, 16)
        for kept in (False, True)
    ),
)
