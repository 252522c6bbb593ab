"""The state of a running batch on the device, and the functions of a step that read and update it.

    rows(state, index)                           -> inputs of the forward pass and attention for R packed rows
    chain_choices / mask_choices                 -> inputs of `device_sampling.sample` about the rows' prefixes
    verify_step(state, index, rows, choice)      -> the tokens that each sequence emits
    masks(state, index, verification)            -> the rows that produce the next drafts
    advance(state, rows, verification, drafts)   -> updates the state in place; returns one small tensor for the host

Every function consists of tensor operations of fixed shapes and reads nothing on the host, so a step can be captured in
a CUDA graph, and the next step can be launched before the host has read this one. Batch indexes that are free, whose
sequence has ended or has no free slot are laid out as dead rows: their positions are valid, but they write no keys and
emit no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from space_kernels.sampling.device_sampling import (
    NO_ID,
    Prefixes,
    SamplingCapacity,
    SamplingTensors,
    Stages,
    end_bans,
    send,
    token_counts,
    word_bans,
)
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step.verification import StepVerification, verify_sequences

ROW_MULTIPLE = 4
"""Packed rows are padded to a multiple of this, as the host packs them."""


class UniformLayout(Protocol):
    """The draft layout of each sequence; `space_model.DraftLayout` implements it."""

    @property
    def num_drafts(self) -> int:
        """Drafts in the chain."""

    @property
    def masks(self) -> tuple[int, ...]:
        """Masks in group g, for g = 0 .. num_drafts."""

    @property
    def head_drafts(self) -> int:
        """Drafts that the recurrent head makes behind the step; then there are no masks."""


# chain rows, sequence after sequence   mask rows, sequence after sequence            padding
# [0 ............... S·(k+1))           [S·(k+1) ..................... num_rows)      [num_rows ... num_padded)
#  root, c_1 .. c_k                      group 0: M_1, M_2, ... | group 1: ...         a root's position; unread
@dataclass(frozen=True, eq=False)
class StepIndex:
    """The rows of S sequences with the same draft layout, in the order of `ForwardBatch`."""

    num_sequences: int
    num_drafts: int  # k
    group_sizes: tuple[int, ...]  # masks in each group
    head_drafts: int  # drafts of the recurrent head
    owner: Tensor  # [R] int64: sequence of the row; 0 for padding
    offset: Tensor  # [R] int64: position relative to the root; 0 for padding
    mask: Tensor  # [R] int64: number of the mask in its group, from 0; -1 for other rows
    masks: Tensor  # [k+1] int64: group_sizes
    mask_starts: Tensor  # [S, k+1] int64: first flat row of each group

    @classmethod
    def of(cls, num_sequences: int, layout: UniformLayout, device: torch.device | str = "cpu") -> StepIndex:
        """Lay out S sequences."""
        S, k, sizes = num_sequences, layout.num_drafts, tuple(layout.masks)
        chain = [(s, i, -1) for s in range(S) for i in range(k + 1)]
        masked = [(s, g + j + 1, j) for s in range(S) for g, count in enumerate(sizes) for j in range(count)]
        padding = [(0, 0, -1)] * (-(len(chain) + len(masked)) % ROW_MULTIPLE)
        columns = torch.tensor(chain + masked + padding, dtype=torch.int64, device=device).T.contiguous()
        per_sequence = sum(sizes)
        starts = [[len(chain) + s * per_sequence + sum(sizes[:g]) for g in range(k + 1)] for s in range(S)]
        owner, offset, mask = columns
        return cls(
            num_sequences=S,
            num_drafts=k,
            group_sizes=sizes,
            head_drafts=layout.head_drafts,
            owner=owner,
            offset=offset,
            mask=mask,
            masks=torch.tensor(sizes, dtype=torch.int64, device=device),
            mask_starts=torch.tensor(starts, dtype=torch.int64, device=device).view(S, k + 1),
        )

    @property
    def num_chain_rows(self) -> int:
        """Number of root and draft rows, which come first."""
        return self.num_sequences * (self.num_drafts + 1)

    @property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return self.num_chain_rows + self.num_sequences * sum(self.group_sizes)

    @property
    def num_padded(self) -> int:
        """R: number of rows with padding."""
        return len(self.owner)

    @cached_property
    def most_drafts(self) -> int:
        """The most drafts that one step can produce: the size of the largest mask group, or the recurrent head's."""
        return max(self.head_drafts, *self.group_sizes)


NO_SLOT = -1
"""The slot of a row that writes no keys and values."""


@dataclass(frozen=True, slots=True)
class StateAdmission:
    """A sequence to be put at a batch index."""

    ids: Sequence[int]  # prompt, then output; all but the last have keys and values in the pages
    num_prompt: int
    pages: Sequence[int]
    sampling_params: SamplingParams
    num_left: int  # tokens it may still emit
    eos_ids: Sequence[int]
    stop_ids: Sequence[int]
    max_drafts: int  # limit on drafts per step
    max_masks: int  # limit on masks per group
    drafts: Sequence[int] = ()  # verified by the next step


@dataclass(frozen=True, slots=True)
class StepState:
    """S sequences between two steps, one per batch index. `put` and `advance` write the tensors in place.
    All of a sequence's n known ids but the last, the root, have their keys and values in the pages."""

    block_size: int
    window: int  # maximum length of a sequence
    batch_params: SamplingTensors
    live: Tensor  # [S] bool: holds a sequence that has not ended
    root: Tensor  # [S] int64: the last known id
    num_known: Tensor  # [S] int64: n, at least 1
    num_prompt: Tensor  # [S] int64
    num_left: Tensor  # [S] int64
    drafts: Tensor  # [S, K] int64
    num_drafts: Tensor  # [S] int64: valid columns of `drafts`
    max_drafts: Tensor  # [S] int64
    max_masks: Tensor  # [S] int64
    page_table: Tensor  # [S, P] int32: block numbers, position 0 onwards
    num_pages: Tensor  # [S] int64
    end_ids: Tensor  # [S, num_ends] int64: EOS ids, then stop ids, then NO_ID
    num_eos: Tensor  # [S] int64
    history: Tensor  # [S, window + 1] int64: known ids; the last column is write-only scratch; [S, 0] if not kept
    counts: Tensor  # [S, V] int32: sampling_tensors.token_counts of the known ids; [S, 0] if not kept

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        *,
        max_drafts: int,
        max_pages: int,
        block_size: int,
        window: int,
        vocab_size: int,
        room: SamplingCapacity | None = None,
        bounds: bool = False,
        history: bool = True,
        counts: bool = True,
        device: torch.device | str = "cpu",
    ) -> StepState:
        """Allocate a state without sequences. `max_drafts` is K; bad words need `history`, penalties need `counts`."""
        S = num_sequences
        room = room or SamplingCapacity()

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            block_size=block_size,
            window=window,
            batch_params=SamplingTensors.empty(S, vocab_size, room=room, bounds=bounds, device=device),
            live=zeros(S, dtype=torch.bool),
            root=zeros(S),
            num_known=zeros(S) + 1,
            num_prompt=zeros(S),
            num_left=zeros(S),
            drafts=zeros(S, max_drafts),
            num_drafts=zeros(S),
            max_drafts=zeros(S),
            max_masks=zeros(S),
            page_table=zeros(S, max_pages, dtype=torch.int32),
            num_pages=zeros(S),
            end_ids=zeros(S, room.num_ends) + NO_ID,
            num_eos=zeros(S),
            history=zeros(S, window + 1 if history else 0),
            counts=zeros(S, vocab_size if counts else 0, dtype=torch.int32),
        )

    def first(self, num_sequences: int) -> StepState:
        """Return views of the first batch indexes: the batch size that a CUDA graph is captured for."""

        def cut(of: Tensor) -> Tensor:
            return of[:num_sequences]

        batch_params = SamplingTensors(
            vocab_size=self.batch_params.vocab_size,
            room=self.batch_params.room,
            **{name: cut(getattr(self.batch_params, name)) for name in _tensor_names(SamplingTensors)},
        )
        tensors = {name: cut(getattr(self, name)) for name in _tensor_names(StepState)}
        return StepState(block_size=self.block_size, window=self.window, batch_params=batch_params, **tensors)

    @property
    def num_cached(self) -> Tensor:
        """[S] slots that hold keys and values: one for each known id but the root."""
        return self.num_known - 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.batch_params.vocab_size

    # ------------------------------------------------------------------------------------------ by the host

    def put(self, batch_index: int, admission: StateAdmission) -> None:
        """Put a sequence at a batch index. Raises ValueError if its sampling parameters or pages do not fit."""
        known, drafts = list(admission.ids), list(admission.drafts)
        ends = [*admission.eos_ids, *(id_ for id_ in admission.stop_ids if id_ not in set(admission.eos_ids))]
        params = admission.sampling_params
        if len(ends) > self.end_ids.shape[1] or len(drafts) > self.drafts.shape[1]:
            raise ValueError(
                f"{len(ends)} end ids and {len(drafts)} drafts do not fit; there is room for {self.end_ids.shape[1]} "
                f"and {self.drafts.shape[1]}."
            )
        if (params.penalises and not self.counts.shape[1]) or (params.bad_words and not self.history.shape[1]):
            raise ValueError("Penalties need a state with counts, bad words one with history.")
        self.batch_params.put(batch_index, params)
        for tensor, value in (
            (self.root, known[-1]),
            (self.num_known, len(known)),
            (self.num_prompt, admission.num_prompt),
            (self.num_left, admission.num_left),
            (self.num_drafts, len(drafts)),
            (self.max_drafts, min(admission.max_drafts, self.drafts.shape[1])),
            (self.max_masks, admission.max_masks),
            (self.num_eos, len(set(admission.eos_ids))),
            (self.num_pages, 0),
        ):
            tensor[batch_index].fill_(value)
        self.end_ids[batch_index].fill_(NO_ID)
        send(self.end_ids[batch_index, : len(ends)], torch.tensor(ends, dtype=torch.int64))
        send(self.drafts[batch_index, : len(drafts)], torch.tensor(drafts, dtype=torch.int64))
        if self.history.shape[1]:
            send(self.history[batch_index, : len(known)], torch.tensor(known, dtype=torch.int64))
        if self.counts.shape[1] and params.penalises:
            send(self.counts[batch_index], token_counts(known, admission.num_prompt, self.vocab_size))
        self.extend(batch_index, 0, admission.pages)
        self.live[batch_index].fill_(True)

    def extend(self, batch_index: int, num_pages: int, pages: Sequence[int]) -> None:
        """Append pages to the `num_pages` that the sequence has. Raises ValueError if the page table is full."""
        known = num_pages + len(pages)
        if known > self.page_table.shape[1]:
            raise ValueError(f"{known} pages do not fit a page table of {self.page_table.shape[1]}.")
        send(self.page_table[batch_index, num_pages:known], torch.tensor(list(pages), dtype=torch.int32))
        self.num_pages[batch_index].fill_(known)

    def propose(self, batch_index: int, drafts: Sequence[int]) -> None:
        """Replace the drafts of the last step by drafts from the host."""
        send(self.drafts[batch_index, : len(drafts)], torch.tensor(list(drafts), dtype=torch.int64))
        self.num_drafts[batch_index].fill_(len(drafts))

    def move(self, batch_index: int, to: int) -> None:
        """Move a sequence to a free batch index."""
        for tensors, names in ((self.batch_params, _tensor_names(SamplingTensors)), (self, _tensor_names(StepState))):
            for name in names:
                tensor: Tensor = getattr(tensors, name)
                tensor[to].copy_(tensor[batch_index])
        self.clear(batch_index)

    def clear(self, batch_index: int) -> None:
        """Free a batch index."""
        self.live[batch_index].fill_(False)


def _tensor_names(of: type) -> list[str]:
    return [name for name, kind in of.__annotations__.items() if kind == "Tensor"]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The packed rows of a step: inputs of the forward pass and, with the page table, of attention.
    Attention takes `StepTables(pattern, starts, state.page_table, state.block_size, num_written)`."""

    ids: Tensor  # [R] int64: ids of roots and drafts; 0 for dead drafts, padding, and masks without `mask_ids`
    positions: Tensor  # [R] int64, inside the window
    slots: Tensor  # [S·(k+1)] int64: where each chain row's keys and values are stored; NO_SLOT for dead rows
    starts: Tensor  # [S] int32: position of each root; 0 for a dead sequence, which then attends nothing
    num_written: Tensor  # [S] int32: chain rows that write keys and values; later slots are never read
    num_live: Tensor  # [S] int64: drafts in the step
    running: Tensor  # [S] bool: the sequence takes part in the step


def rows(state: StepState, index: StepIndex, mask_ids: Tensor | None = None) -> DeviceRows:
    """Lay the batch out in rows. mask_ids [k]: token ids of masks 1 .. k, for models whose masks have ids."""
    S, k = index.num_sequences, index.num_drafts
    starts = torch.where(state.live, state.num_cached, 0)
    free = state.num_pages * state.block_size - starts
    running = state.live & (free > 0)
    num_live = torch.minimum(torch.minimum(state.num_drafts, state.max_drafts), torch.minimum(free, state.num_left) - 1)
    num_live = torch.where(running, num_live.clamp(0, k), 0)
    num_written = torch.where(running, num_live + 1, 0)

    place = torch.arange(k, device=starts.device)
    drafts = torch.where(place < num_live[:, None], state.drafts[:, :k], 0)
    chain = torch.cat([state.root[:, None], drafts], dim=1).flatten()
    ids = torch.nn.functional.pad(chain, (0, index.num_padded - len(chain)))
    if mask_ids is not None and max(index.group_sizes):
        ids = torch.where(index.mask >= 0, mask_ids[index.mask.clamp(min=0)], ids)

    positions = (starts[index.owner] + index.offset).clamp(max=state.window - 1)
    at = positions[: index.num_chain_rows].view(S, k + 1)
    page = (at // state.block_size).clamp(max=state.page_table.shape[1] - 1)
    slots = state.page_table.to(torch.int64).gather(1, page) * state.block_size + at % state.block_size
    writes = torch.arange(k + 1, device=starts.device) < num_written[:, None]
    slots = torch.where(writes, slots, NO_SLOT).flatten()
    return DeviceRows(ids, positions, slots, starts.to(torch.int32), num_written.to(torch.int32), num_live, running)


def chain_choices(state: StepState, index: StepIndex, stages: Stages) -> Prefixes:
    """Return the prefixes of the chain rows: row j follows j drafts."""
    J = index.num_drafts + 1
    place = torch.arange(J, device=state.root.device)
    num_tail = place.expand(index.num_sequences, J)
    tails = state.drafts[:, : index.num_drafts]
    bans = _bans(state, stages, state.num_known, tails, num_tail, torch.zeros_like(place))
    return Prefixes(state.num_known, tails, num_tail, bans)


def mask_choices(state: StepState, verification: StepVerification, num_masks: int, stages: Stages) -> Prefixes:
    """Return the prefixes of the drafting masks: the emitted ids, then earlier drafts that are not yet known."""
    place = torch.arange(num_masks, device=state.root.device)
    num_tail = verification.lengths[:, None].expand(-1, num_masks)
    bans = _bans(state, stages, state.num_known, verification.emitted, num_tail, place)
    return Prefixes(state.num_known + verification.lengths, verification.emitted, num_tail, bans)


def _bans(
    state: StepState, stages: Stages, num_known: Tensor, tails: Tensor, num_tail: Tensor, num_unknown: Tensor
) -> Tensor | None:
    if not stages.edits:
        return None
    generated = (num_known - state.num_prompt)[:, None] + num_tail + num_unknown
    bans = [end_bans(state.batch_params, generated)]
    if state.history.shape[1]:
        bans.append(word_bans(state.batch_params, state.history, num_known, tails, num_tail, num_unknown))
    return torch.cat(bans, dim=2)


def verify_step(
    state: StepState,
    index: StepIndex,
    laid_out: DeviceRows,
    choice: SampledTokens,
    verify: Callable[..., StepVerification] = verify_sequences,
) -> StepVerification:
    """Verify the batch's drafts (`verification.verify_sequences`). choice: ids and valid, [S, k+1] each."""
    return verify(
        choice.ids,
        choice.valid,
        state.drafts[:, : index.num_drafts],
        laid_out.num_live,
        laid_out.running,
        state.num_left,
        state.end_ids,
        state.num_eos,
    )


@dataclass(frozen=True, slots=True)
class DeviceMaskRows:
    """The rows that produce the next drafts: masks, or the row that the recurrent head begins from."""

    rows: Tensor  # [S, K'] int64: flat row numbers; after a sequence's last valid mask it is repeated, unread
    first: Tensor  # [S] int64: number (from 1) of the first of these masks in its group; 0: none
    count: Tensor  # [S] int64: valid masks


def masks(state: StepState, index: StepIndex, verification: StepVerification) -> DeviceMaskRows:
    """Select the masks of group a (a accepted drafts), or of the nearest earlier group that reaches beyond the bonus
    token (`DraftLayout.next_drafts`).

    K' is the largest group's size. A sequence that has ended, or may emit only one more token, drafts nothing.
    """
    device = state.root.device
    accepted = (verification.lengths - 1).clamp(min=0)[:, None]  # after a cut the last id takes the bonus token's place
    groups = torch.arange(index.num_drafts + 1, device=device)
    sizes = torch.minimum(index.masks, state.max_masks[:, None])  # [S, k+1]
    first = accepted - groups + 1
    reaches = (groups <= accepted) & (sizes >= first)
    chosen = torch.where(reaches, groups, -1).amax(dim=1, keepdim=True)  # [S, 1]
    at = chosen.clamp(min=0)
    first = first.gather(1, at)
    wanted = torch.minimum(state.max_drafts, state.num_left - verification.lengths - 1)[:, None]
    count = torch.minimum(sizes.gather(1, at) - first + 1, wanted).clamp(min=0)
    drafts = (chosen >= 0) & (verification.lengths > 0)[:, None] & (verification.end == 0)[:, None]
    count = torch.where(drafts, count, 0)
    place = torch.arange(index.most_drafts, device=device)
    begin = index.mask_starts.gather(1, at) + torch.where(count > 0, first - 1, 0)
    flat = begin + torch.minimum(place, (count - 1).clamp(min=0))
    flat = flat.clamp(max=max(index.num_rows - 1, 0))
    return DeviceMaskRows(flat, torch.where(count > 0, first, 0)[:, 0], count[:, 0])


def bonus_rows(state: StepState, index: StepIndex, verification: StepVerification) -> DeviceMaskRows:
    """Select the chain rows that sampled each sequence's last token, from which the recurrent head drafts; one row a
    sequence. `first` and `count` are those of the drafts, as of masks from the first on."""
    at = torch.arange(index.num_sequences, device=state.root.device) * (index.num_drafts + 1)
    wanted = torch.minimum(state.max_drafts, state.num_left - verification.lengths - 1)
    goes_on = (verification.lengths > 0) & (verification.end == 0)
    count = torch.where(goes_on, wanted.clamp(0, index.head_drafts), 0)
    rows = at + (verification.lengths - 1).clamp(min=0)
    return DeviceMaskRows(rows[:, None], (count > 0).to(torch.int64), count)


RESULT_FIXED = 6
"""Columns of a step's result before its two lists of ids."""


def result_width(num_drafts: int) -> int:
    """Return the number of columns of a step's result, for a state of K drafts."""
    return RESULT_FIXED + (num_drafts + 1) + num_drafts


def advance(
    state: StepState,
    laid_out: DeviceRows,
    verification: StepVerification,
    drafts: Tensor,
    num_drafts: Tensor,
    banned_ids: Tensor,
) -> Tensor:
    """Advance every sequence, in place. Returns the step's result [S, result_width(K)] int32 for the host:

        number of emitted ids | accepted | drafted | EndCode | n | number of next drafts
        | emitted ids, padded with zeros to K+1 | drafts of the next step, K

    drafts [S, K'] int64, num_drafts [S]: drafts for the next step, truncated at the first id that is in banned_ids or
    outside the vocabulary. A sequence that did not run keeps its drafts. A live sequence that emitted nothing and did
    not end is out of slots.
    """
    S, K = state.drafts.shape
    device = state.root.device
    emitted, lengths = verification.emitted, verification.lengths
    moved = lengths > 0
    place = torch.arange(emitted.shape[1], device=device)
    stands = place < lengths[:, None]  # [S, k+1]

    if state.history.shape[1]:
        at = torch.where(stands, state.num_known[:, None] + place, state.window)
        state.history.scatter_(1, at, emitted)
    if state.counts.shape[1]:
        state.counts.scatter_add_(1, emitted, stands.to(torch.int32))

    proposed = drafts.new_zeros(S, K)
    width = min(K, drafts.shape[1])
    proposed[:, :width] = drafts[:, :width]
    valid = (proposed >= 0) & (proposed < state.vocab_size) & (proposed[..., None] != banned_ids).all(dim=2)
    num_valid = valid.to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_proposed = torch.minimum(num_drafts.clamp(max=width), num_valid)
    state.drafts.copy_(torch.where(moved[:, None], proposed, state.drafts))
    state.num_drafts.copy_(torch.where(moved, num_proposed, state.num_drafts))

    last = emitted.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    state.root.copy_(torch.where(moved, last, state.root))
    state.num_known.add_(lengths)
    state.num_left.sub_(lengths)
    state.live.logical_and_(verification.end == 0)

    result = torch.zeros(S, result_width(K), dtype=torch.int32, device=device)
    facts = (lengths, verification.accepted, laid_out.num_live, verification.end, state.num_known, state.num_drafts)
    result[:, :RESULT_FIXED] = torch.stack(facts, dim=1)
    result[:, RESULT_FIXED : RESULT_FIXED + emitted.shape[1]] = emitted
    result[:, RESULT_FIXED + K + 1 :] = state.drafts
    return result
