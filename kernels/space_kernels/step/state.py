"""The state of a running batch on the device, and how a step reads it and writes its successor.

    rows(state, index)                      -> what the forward pass and attention need of R packed rows
    chain_choices / mask_choices            -> what `choose` needs to know of the prefixes of rows
    judge_step(state, rows, choice)         -> what each sequence emits (step_verdict.judge)
    masks(state, index, verdict)            -> the rows that the next drafts come from
    advance(state, rows, verdict, drafts)   -> the state in place, and one small tensor for the host

Every function is tensor operations of fixed shapes: nothing is read on the host, so a step can be captured, and the
next one launched before anybody has looked at this one. A line of the batch without a sequence, one that has ended and
one without a free slot go along as dead rows: their positions are valid, they write nothing, and emit nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.sampling.choice import SampledTokens
from space_kernels.sampling.device_sampling import end_bans, word_bans
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_tensors import NO_ID, SamplingCapacity, SamplingTensors, Stages, send, token_counts
from space_kernels.step.step_verification import StepVerification, verify_sequences
from space_kernels.step.uniform_index import StepIndex

NO_SLOT = -1
"""The slot of a row that writes nothing."""


@dataclass(frozen=True, slots=True)
class StateAdmission:
    """What a line of the batch is told about the sequence that takes it."""

    ids: Sequence[int]  # prompt, then output; all but the last have K and V in the pages
    num_prompt: int
    pages: Sequence[int]
    sampling_params: SamplingParams
    num_left: int  # ids that it may still emit
    eos_ids: Sequence[int]
    stop_ids: Sequence[int]
    max_drafts: int  # bound on drafts per step
    max_masks: int  # bound on masks per group
    drafts: Sequence[int] = ()  # to be verified by the next step


@dataclass(frozen=True, slots=True)
class StepState:
    """S sequences between two steps, one line each. Tensors keep their addresses; `put` and `advance` write them.

    Of n known ids all but the root, the last one, have their keys and values in the pages.
    """

    block_size: int
    window: int  # ids in all that a sequence may have
    batch_params: SamplingTensors
    live: Tensor  # [S] bool: holds a sequence that has not ended
    root: Tensor  # [S] int64
    num_known: Tensor  # [S] int64: n, at least 1
    num_prompt: Tensor  # [S] int64
    num_left: Tensor  # [S] int64
    drafts: Tensor  # [S, K] int64
    num_drafts: Tensor  # [S] int64: how many of them there are
    max_drafts: Tensor  # [S] int64
    max_masks: Tensor  # [S] int64
    page_table: Tensor  # [S, P] int32: block numbers, position 0 onwards
    num_pages: Tensor  # [S] int64
    end_ids: Tensor  # [S, num_ends] int64: EOS ids, then stop ids, then NO_ID
    num_eos: Tensor  # [S] int64
    history: Tensor  # [S, window + 1] int64: known ids; the last column is written to and never read; [S, 0] without
    counts: Tensor  # [S, V] int32: law_tensors.token_counts of the known ids; [S, 0] without

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
        """Lines without sequences. `max_drafts` is K; `history` serves bad words, `counts` penalties."""
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
        """The first lines, as views: the batch bucket that a graph is captured for."""

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
        """[S] slots whose keys and values are in place: those of all known ids but the root."""
        return self.num_known - 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.batch_params.vocab_size

    # ------------------------------------------------------------------------------------------ by the host

    def put(self, line: int, admission: StateAdmission) -> None:
        """Let a sequence take a line. Raises ValueError where its law or its pages do not fit."""
        known, drafts = list(admission.ids), list(admission.drafts)
        ends = [*admission.eos_ids, *(id_ for id_ in admission.stop_ids if id_ not in set(admission.eos_ids))]
        sampling_params = admission.sampling_params
        if len(ends) > self.end_ids.shape[1] or len(drafts) > self.drafts.shape[1]:
            raise ValueError(
                f"{len(ends)} end ids and {len(drafts)} drafts do not fit; there is room for {self.end_ids.shape[1]} "
                f"and {self.drafts.shape[1]}."
            )
        if (sampling_params.penalises and not self.counts.shape[1]) or (
            sampling_params.bad_words and not self.history.shape[1]
        ):
            raise ValueError("Penalties need a state with counts, bad words one with history.")
        self.batch_params.put(line, sampling_params)
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
            tensor[line].fill_(value)
        self.end_ids[line].fill_(NO_ID)
        send(self.end_ids[line, : len(ends)], torch.tensor(ends, dtype=torch.int64))
        send(self.drafts[line, : len(drafts)], torch.tensor(drafts, dtype=torch.int64))
        if self.history.shape[1]:
            send(self.history[line, : len(known)], torch.tensor(known, dtype=torch.int64))
        if self.counts.shape[1] and sampling_params.penalises:
            send(self.counts[line], token_counts(known, admission.num_prompt, self.vocab_size))
        self.extend(line, 0, admission.pages)
        self.live[line].fill_(True)

    def extend(self, line: int, num_pages: int, pages: Sequence[int]) -> None:
        """Pages behind the num_pages that the line has."""
        known = num_pages + len(pages)
        if known > self.page_table.shape[1]:
            raise ValueError(f"{known} pages do not fit a page table of {self.page_table.shape[1]}.")
        send(self.page_table[line, num_pages:known], torch.tensor(list(pages), dtype=torch.int32))
        self.num_pages[line].fill_(known)

    def propose(self, line: int, drafts: Sequence[int]) -> None:
        """Drafts of the host's in place of what the last step left."""
        send(self.drafts[line, : len(drafts)], torch.tensor(list(drafts), dtype=torch.int64))
        self.num_drafts[line].fill_(len(drafts))

    def move(self, line: int, to: int) -> None:
        """Let the line's sequence take another line, which nobody has."""
        for tensors, names in ((self.batch_params, _tensor_names(SamplingTensors)), (self, _tensor_names(StepState))):
            for name in names:
                tensor: Tensor = getattr(tensors, name)
                tensor[to].copy_(tensor[line])
        self.clear(line)

    def clear(self, line: int) -> None:
        """Nobody takes the line."""
        self.live[line].fill_(False)


def _tensor_names(of: type) -> list[str]:
    return [name for name, kind in of.__annotations__.items() if kind == "Tensor"]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The packed rows of a step: what the forward pass takes, and (with the page table) what attention does.

    `StepTables(pattern, starts, state.page_table, state.block_size, num_written)`.
    """

    ids: Tensor  # [R] int64: of roots and drafts; 0 for dead drafts, masks and padding (see `mask_ids`)
    positions: Tensor  # [R] int64, inside the window
    slots: Tensor  # [S·(k+1)] int64: where each chain row's keys and values go, NO_SLOT for dead ones
    starts: Tensor  # [S] int32: position of each root; 0 for a dead line, which so sees nothing
    num_written: Tensor  # [S] int32: chain rows that write; no row sees what lies behind them
    num_live: Tensor  # [S] int64: drafts laid out
    running: Tensor  # [S] bool: takes part in the step


def rows(state: StepState, index: StepIndex, mask_ids: Tensor | None = None) -> DeviceRows:
    """Lay the batch out. mask_ids [k]: the ids of masks 1 .. k, where they have ids."""
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
    if mask_ids is not None and index.most_drafts:
        ids = torch.where(index.mask >= 0, mask_ids[index.mask.clamp(min=0)], ids)

    positions = (starts[index.owner] + index.offset).clamp(max=state.window - 1)
    at = positions[: index.num_chain_rows].view(S, k + 1)
    page = (at // state.block_size).clamp(max=state.page_table.shape[1] - 1)
    slots = state.page_table.to(torch.int64).gather(1, page) * state.block_size + at % state.block_size
    writes = torch.arange(k + 1, device=starts.device) < num_written[:, None]
    slots = torch.where(writes, slots, NO_SLOT).flatten()
    return DeviceRows(ids, positions, slots, starts.to(torch.int32), num_written.to(torch.int32), num_live, running)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What stands before the choices of J rows of each sequence, in the words of `choose`."""

    positions: Tensor  # [S]
    tails: Tensor  # [S, T]
    num_tail: Tensor  # [S, J]
    bans: Tensor | None  # [S, J, X]


def chain_choices(state: StepState, index: StepIndex, stages: Stages) -> Prefixes:
    """The root's and the drafts': row j stands behind j drafts."""
    J = index.num_drafts + 1
    place = torch.arange(J, device=state.root.device)
    num_tail = place.expand(index.num_sequences, J)
    tails = state.drafts[:, : index.num_drafts]
    bans = _bans(state, stages, state.num_known, tails, num_tail, torch.zeros_like(place))
    return Prefixes(state.num_known, tails, num_tail, bans)


def mask_choices(state: StepState, verification: StepVerification, num_masks: int, stages: Stages) -> Prefixes:
    """Those of the masks that draft: behind what was emitted, and drafts before them that nobody knows yet."""
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


def verify_step(state: StepState, index: StepIndex, laid_out: DeviceRows, choice: SampledTokens) -> StepVerification:
    """`step_verdict.verify_sequences` of this batch. choice: ids and usable, [S, k+1] each."""
    return verify_sequences(
        choice.ids,
        choice.usable,
        state.drafts[:, : index.num_drafts],
        laid_out.num_live,
        laid_out.running,
        state.num_left,
        state.end_ids,
        state.num_eos,
    )


@dataclass(frozen=True, slots=True)
class DeviceMaskRows:
    """The masks that the next drafts come from."""

    rows: Tensor  # [S, K'] int64: flat row numbers; behind a sequence's last usable mask that one again, unread
    first: Tensor  # [S] int64: mask number (from 1) of the first of them; 0: none
    count: Tensor  # [S] int64: how many are usable


def masks(state: StepState, index: StepIndex, verification: StepVerification) -> DeviceMaskRows:
    """Group a's masks, or those of the largest earlier group that reach behind the bonus (`DraftLayout.next_drafts`).

    K' is the largest group's size. A sequence that ended, or has room for one more id only, drafts nothing.
    """
    device = state.root.device
    accepted = (verification.lengths - 1).clamp(min=0)[:, None]  # the last id stands where the bonus of so many does
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


RESULT_FIXED = 6
"""Columns of a result before its lists."""


def result_width(num_drafts: int) -> int:
    """Columns of a step's result, for a state of K drafts."""
    return RESULT_FIXED + (num_drafts + 1) + num_drafts


def advance(
    state: StepState,
    laid_out: DeviceRows,
    verification: StepVerification,
    drafts: Tensor,
    num_drafts: Tensor,
    banned_ids: Tensor,
) -> Tensor:
    """Let every sequence go on, in place. Returns the step's result [S, result_width(K)] int32, for the host:

        emitted ids: how many | accepted | drafted | EndCode | n | drafts of the next step: how many
        | emitted ids, K+1 of them, then zeros | drafts of the next step, K

    drafts [S, K'] int64, num_drafts [S]: proposed for the next step; what is behind an id of banned_ids or outside the
    vocabulary goes. A sequence that did not run keeps its drafts; where 0 ids were emitted and nothing ended, a live
    sequence is out of slots.
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
