"""The sequences that are stepped on the device, and the batch index of each in the StepState."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median_high

import torch
from space_kernels.attention_backends import can_be_captured
from space_kernels.sampling.device_sampling import SamplingCapacity, Stages, send
from space_kernels.sampling.sampler import TokenCounts
from space_kernels.step.state import StateAdmission, StepState
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_model.free_memory import is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.device_runner.device_forward import MOST_TOP
from space_server.drafts import Acceptance
from space_server.machine.memory import give_back_unused, is_lost
from space_server.scheduled_batch import draft_limits_of
from space_server.speculation.controller import Controller, DraftLimits, StepLoad
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance

MOST_HISTORY_BYTES = 256 * 1024**2
"""Bound on the token history kept for bad words; with larger windows such requests run on the host."""

MOST_CONTINUATION_BYTES = 256 * 1024**2
"""Bound on known continuations for synthetic acceptance, 12 bytes an id; longer ones run on the host."""

_log = logging.getLogger(__name__)


class DeviceBatch:
    """Assigns sequences to the batch indices of a StepState.
    A sequence in it advances without the host, which knows its state as of the last step that was read."""

    def __init__(
        self,
        facts: ModelFacts,
        *,
        max_sequences: int,
        block_size: int,
        max_drafts: int | None = None,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        """`max_drafts`: most per sequence and step; None: as many as there are masks."""
        self._facts = facts
        self._max_pages = -(-facts.window // block_size)
        self.capacity = SamplingCapacity()
        self.state = StepState.empty(
            max_sequences,
            max_drafts=facts.most_drafts if max_drafts is None else max(facts.most_drafts, max_drafts),
            max_pages=self._max_pages,
            block_size=block_size,
            window=facts.window,
            vocab_size=facts.vocab_size,
            room=self.capacity,
            bounds=True,
            history=max_sequences * (facts.window + 1) * 8 <= MOST_HISTORY_BYTES,
            device=facts.device,
        )
        self.logprob_indices = torch.zeros(max_sequences, dtype=torch.int64, device=facts.device)  # padded with 0
        self._sent_logprob_indices: list[int] = []  # those that were sent
        self._synthetic, self.synthetic_tensors = synthetic, None
        if synthetic is not None:
            num_places = min(facts.window, MOST_CONTINUATION_BYTES // (12 * max_sequences))
            self.synthetic_tensors = SyntheticAcceptanceTensors.empty(
                max_sequences, num_places, synthetic.chances, device=facts.device
            )
        self.by_index: list[RunningSequence | None] = [None] * max_sequences
        self._index_of: dict[int, int] = {}
        self._sent_pages: dict[int, int] = {}  # by sequence number

    def __len__(self) -> int:
        return len(self._index_of)

    def __iter__(self) -> Iterator[RunningSequence]:
        """Iterate in order of batch index."""
        return (sequence for sequence in self.by_index if sequence is not None)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._index_of

    @property
    def batch_size(self) -> int:
        """The highest batch index in use, plus 1."""
        return max(self._index_of.values(), default=-1) + 1

    @property
    def num_pages(self) -> int:
        """The most pages that one sequence has."""
        return max(self._sent_pages.values(), default=0)

    @property
    def stages(self) -> Stages:
        """The sampling stages that the sequences need, rounded up to one of a few sets: few CUDA graphs."""
        return round_up_stages(Stages.of(sequence.sampling_params for sequence in self))

    @property
    def adapter(self) -> int | None:
        """The adapter that drafts for the whole batch, by masks or recurrent head; None: the checkpoint's own."""
        return next((sequence.adapter for sequence in self if sequence.can_draft), None)

    def fits(self, sequence: RunningSequence) -> bool:
        """Whether this sequence can be stepped here: only its root is pending, it drafts with the same adapter's masks
        as the batch or with none, it has no LoRA and no angles of its own, and its sampling parameters fit the
        tensors."""
        ends = len(sequence.limits.eos_ids | sequence.limits.stop_ids)
        return (
            sequence.num_pending == 1
            and sequence.lora is None
            and not sequence.is_long
            and (sequence.num_logprobs or 0) <= MOST_TOP
            and (sequence.drafter is None or self._takes_proposals(sequence))
            and self._has_its_masks(sequence)
            and ends <= self.capacity.num_ends
            and len(sequence.drafts) <= self.state.drafts.shape[1]
            and self.capacity.holds(sequence.sampling_params)
            and not (sequence.sampling_params.bad_words and not self.state.history.shape[1])
            and self._has_synthetic_acceptance(sequence)
        )

    def _takes_proposals(self, sequence: RunningSequence) -> bool:
        return self._synthetic is None and sequence.max_drafts <= self.state.drafts.shape[1]

    def _has_its_masks(self, sequence: RunningSequence) -> bool:
        if not sequence.can_draft:  # adapters change drafts only, so a sequence without them fits any batch
            return True
        return sequence.adapter == self.adapter or not any(one.can_draft for one in self)

    def _has_synthetic_acceptance(self, sequence: RunningSequence) -> bool:
        if self._synthetic is None or self.synthetic_tensors is None:
            return True
        known = self._synthetic.continuation_of(sequence)
        return known is None or len(known.ids) <= self.synthetic_tensors.num_places

    def put(self, sequence: RunningSequence) -> None:
        """Give a sequence that fits the first free batch index."""
        batch_index = self.by_index.index(None)
        pages = sequence.pages[: self._max_pages]
        if self._synthetic is not None and self.synthetic_tensors is not None:
            known = self._synthetic.continuation_of(sequence)
            self.synthetic_tensors.put(
                batch_index, *((), (), ()) if known is None else (known.ids, known.uniforms, known.others)
            )
        self.state.put(  # last, so that a failure before leaves this batch index not live
            batch_index,
            StateAdmission(
                ids=sequence.ids,
                num_prompt=sequence.num_prompt,
                pages=pages,
                sampling_params=sequence.sampling_params,
                num_left=sequence.num_left,
                eos_ids=sorted(sequence.limits.eos_ids),
                stop_ids=sorted(sequence.limits.stop_ids),
                max_drafts=sequence.max_drafts,
                max_masks=min(sequence.max_drafts, sequence.num_masks),
                drafts=sequence.drafts,
            ),
        )
        sequence.counts = None  # the state keeps the counts now
        self.by_index[batch_index] = sequence
        self._index_of[sequence.seq_id] = batch_index
        self._sent_pages[sequence.seq_id] = len(pages)

    def send_pages(self) -> None:
        """Copy pages granted since the last call to the state."""
        rows: list[tuple[int, int, list[int]]] = []
        for sequence in self:
            known, count = self._sent_pages[sequence.seq_id], min(len(sequence.pages), self._max_pages)
            if count > known:
                rows.append((self._index_of[sequence.seq_id], known, sequence.pages[known:count]))
                self._sent_pages[sequence.seq_id] = count
        _send_rows(rows, self.state.page_table, self.state.num_pages)

    def send_drafts(self, seq_ids: Iterable[int]) -> None:
        """Copy the host's drafts of these sequences, which no step in flight includes, to the state."""
        rows: list[tuple[int, int, list[int]]] = []
        for seq_id in seq_ids:
            batch_index = self._index_of.get(seq_id)
            if batch_index is not None and (sequence := self.by_index[batch_index]) is not None:
                rows.append((batch_index, 0, sequence.drafts))
        _send_rows(rows, self.state.drafts, self.state.num_drafts)

    def send_logprob_indices(self) -> tuple[list[int], int]:
        """Send and return the batch indices that want log-probabilities; also return the most alternatives wanted."""
        asks = [(batch_index, one.num_logprobs) for batch_index, one in enumerate(self.by_index) if one is not None]
        batch_indices = [batch_index for batch_index, num_top in asks if num_top is not None]
        if batch_indices and batch_indices != self._sent_logprob_indices:
            send(self.logprob_indices, torch.tensor(batch_indices + [0] * (len(self.by_index) - len(batch_indices))))
            self._sent_logprob_indices = batch_indices
        return batch_indices, max((num_top for _, num_top in asks if num_top is not None), default=0)

    def close_gaps(self, batch_size: int) -> None:
        """Move sequences at `batch_size` or above to free indices below it, of which there must be enough."""
        for batch_index in range(batch_size, len(self.by_index)):
            sequence = self.by_index[batch_index]
            if sequence is not None:
                to = self.by_index.index(None)
                self.state.move(batch_index, to)
                if self.synthetic_tensors is not None:
                    self.synthetic_tensors.move(batch_index, to)
                self.by_index[batch_index], self.by_index[to] = None, sequence
                self._index_of[sequence.seq_id] = to

    def remove(self, seq_id: int) -> None:
        """Free the sequence's batch index. Steps launched with it may still be in flight."""
        batch_index = self._index_of.pop(seq_id)
        self._sent_pages.pop(seq_id)
        self.by_index[batch_index] = None
        self.state.clear(batch_index)

    def give_back(self) -> list[RunningSequence]:
        """Remove and return all sequences, to be stepped on the host. Requires that every step was read."""
        found = list(self)
        for sequence in found:
            self.remove(sequence.seq_id)
            if sequence.sampling_params.penalises:
                sequence.counts = self._counts_of(sequence)
        return found

    def _counts_of(self, sequence: RunningSequence) -> TokenCounts | None:
        """Return token counts, or None if that fails: its host steps then count, and may fail, alone."""
        try:
            return TokenCounts(sequence.ids, sequence.num_prompt, self._facts.vocab_size, self._facts.device)
        except Exception as error:
            _log.warning("the ids of sequence %d cannot be counted (%s)", sequence.seq_id, error)
            return None


def round_up_stages(stages: Stages) -> Stages:
    """Return one of five stage sets that contains these. Unneeded stages leave every bit unchanged."""
    edits = stages.edits or stages.penalises or stages.bounds
    cuts = stages.cuts or stages.floors
    return Stages(
        edits=edits,
        bounds=stages.bounds,
        penalises=edits,
        samples=stages.samples or edits,
        cuts=cuts or edits,
        floors=cuts or edits,
    )


def _send_rows(rows: Sequence[tuple[int, int, Sequence[int]]], table: Tensor, counts: Tensor) -> None:
    """Write each (batch index, first place, values) into its row of the table, and the values' end to `counts`."""
    cells = [(index, place, value) for index, first, values in rows for place, value in enumerate(values, first)]
    if cells:
        indices, places, written = _columns(cells, table.device)
        table.index_put_((indices, places), written.to(table.dtype))
    if rows:
        indices, ends = _columns([(index, first + len(values)) for index, first, values in rows], counts.device)
        counts.index_put_((indices,), ends)


def _columns(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    columns = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    if device.type == "cuda":
        columns = columns.pin_memory()
    return columns.to(device, non_blocking=True).unbind()


_PLENTY = 1 << 30


def layout_ahead(
    sequences: Sequence[RunningSequence], controller: Controller, load: StepLoad, *, after_masks: bool = True
) -> DraftLayout:
    """Return the layout for a step launched before the last is read: the controller's choice for the average sequence,
    with all drafts it could have. `after_masks`: the last step laid out masks; where drafts and verification take
    turns, it is this one's to verify."""
    bound = median_high(sequence.most_masks for sequence in sequences)
    by_head = median_high(sequence.most_head_drafts for sequence in sequences)
    limit = DraftLimits(
        seq_id=sequences[0].seq_id,
        num_drafts=max(bound, by_head),
        max_masks=bound,
        num_left=_PLENTY,
        acceptance=_average(sequences),
        max_head_drafts=by_head,
        head_acceptance=_average(sequences, by_head=True),
    )
    limits = [limit] * len(sequences)
    if any(not sequence.sampling_params.greedy for sequence in sequences):
        noisy = replace(limit, is_noisy=True)
        limits = [limit if sequence.sampling_params.greedy else noisy for sequence in sequences]
    wanted = controller.layouts(limits, load)[0]
    if wanted.in_turns:
        wanted = wanted.with_drafts(bound if after_masks else 0)
    return limit.fit(wanted)


def layout_of_drafts(
    sequences: Sequence[RunningSequence], controller: Controller, load: StepLoad, block_size: int
) -> DraftLayout:
    """Return the layout where every sequence's drafts are known: the widest groups wanted, and as many drafts as masks
    made.

    Drafts from other sources are added as long as their expected gain exceeds the cost of their rows in the whole
    batch.
    """
    average, head_average, limits = _average(sequences), _average(sequences, by_head=True), []
    for sequence in sequences:
        limit = draft_limits_of(sequence, block_size)
        if limit.acceptance is not None:
            limit.acceptance = average  # the same for all, so that all want the same masks
        if limit.head_acceptance is not None:
            limit.head_acceptance = head_average
        limits.append(limit)
    wanted = controller.layouts(limits, load)
    layouts = [limit.fit(layout) for limit, layout in zip(limits, wanted, strict=True)]
    num_drafts = max(
        (one.num_drafts for limit, one in zip(limits, layouts, strict=True) if not limit.chances), default=0
    )
    most = max(layout.num_drafts for layout in layouts)
    reached = {number: _reach(limit, num_drafts) for number, limit in enumerate(limits) if limit.chances}
    gain = best = 0.0
    for depth in range(num_drafts + 1, most + 1):
        gain -= controller.row_price * len(limits)
        for number in reached:
            if depth <= layouts[number].num_drafts:
                reached[number] *= limits[number].chances[depth - 1]
                gain += reached[number]
        if gain > best:
            num_drafts, best = depth, gain
    head_drafts = max(layout.head_drafts for layout in layouts)
    if head_drafts:
        return DraftLayout.by_head(num_drafts, head_drafts)
    masks = tuple(max(_mask(layout, group) for layout in layouts) for group in range(num_drafts + 1))
    return DraftLayout.of(num_drafts, masks)


def _widened(layout: DraftLayout, forced: DraftLayout) -> DraftLayout:
    """Return the smallest layout that contains this one and the forced one. Masks that are forced replace drafts of the
    recurrent head."""
    most = max(layout.num_drafts, forced.num_drafts)
    if forced.head_drafts or (layout.head_drafts and not forced.num_masks):
        return DraftLayout.by_head(most, max(layout.head_drafts, forced.head_drafts))
    return DraftLayout.of(most, tuple(max(_mask(layout, group), _mask(forced, group)) for group in range(most + 1)))


def _forced(sequence: RunningSequence) -> DraftLayout:
    """Return the layout with the drafts that its request commands."""
    count = sequence.num_forced_drafts
    return DraftLayout.forced(count, count, by_masks=sequence.num_masks > 0)


def _reach(limit: DraftLimits, depth: int) -> float:
    """Return the probability that the first `depth` drafts are all accepted."""
    reach = 1.0
    for chance in limit.chances[:depth]:
        reach *= chance
    return reach


def _mask(layout: DraftLayout, group: int) -> int:
    return layout.masks[group] if group <= layout.num_drafts else 0


def _average(sequences: Sequence[RunningSequence], *, by_head: bool = False) -> Acceptance | None:
    """Return the mean acceptance of the sequences that draft, with the same masks or (`by_head`) recurrent head."""
    if by_head:
        all_known = [sequence.head_acceptance for sequence in sequences if sequence.most_head_drafts]
    else:
        all_known = [sequence.acceptance for sequence in sequences if sequence.most_masks]
    known = [acceptance for acceptance in all_known if acceptance is not None]
    if not known:
        return None
    average = Acceptance(known[0].shape)
    average.shift = sum(acceptance.shift for acceptance in known) / len(known)
    return average


class DeviceScheduler:
    """Moves sequences to the device, and lays out their steps with the one draft layout that all of them share.

    The host runs prefill and samples the first token. After that, when only its root is pending and it fits
    (`DeviceBatch.fits`), a sequence moves to the device.
    """

    def __init__(self, batch: DeviceBatch, controller: Controller) -> None:
        """`controller`: used for these sequences only."""
        self.controller = controller
        self._batch = batch
        self._kept: dict[int, int] = {}  # ids of the sequences that the host is to step once, as they were given back
        self._refused: set[int] = set()  # sequences whose move to the device failed
        self._last_had_masks = False  # the layout chosen last

    @property
    def reads_first(self) -> bool:
        """Whether each step waits until the last is read, because a drafter reads some sequence's text."""
        reading = (one for one in self._batch if one.max_drafts > 0 and not one.num_forced_drafts)
        return any(one.drafter.reads for one in reading if one.drafter is not None)

    def admit(self, running: Iterable[RunningSequence], *, works: bool = True) -> None:
        """Move running sequences that fit to the device, if it `works`, and remove those that no longer run.
        A sequence whose move fails stays on the host; raises only if the device is lost."""
        known = {sequence.seq_id: sequence for sequence in running}
        for sequence in [*self._batch]:
            if sequence.seq_id not in known:
                self._batch.remove(sequence.seq_id)
        if self._kept:
            self._kept = {seq_id: num for seq_id, num in self._kept.items() if seq_id in known}
        self._refused &= known.keys()
        if not works:
            return
        block_size = self._batch.state.block_size
        for seq_id, sequence in known.items():
            if seq_id in self._batch or seq_id in self._refused or self._kept.get(seq_id) == len(sequence.ids):
                continue
            if sequence.num_free_slots(block_size) >= 1 and not self._take(sequence):
                self._refused.add(seq_id)

    def _take(self, sequence: RunningSequence) -> bool:
        """Move this sequence to the device if it fits; False if that failed."""
        try:
            if self._batch.fits(sequence):
                self._batch.put(sequence)
            return True
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self._batch.state.root.device):
                raise
            _log.warning(
                "sequence %d could not move to the device (%s); it is stepped on the host", sequence.seq_id, error
            )
        if wants_memory:
            give_back_unused()
        return False

    def give_back(self) -> None:
        """Return all sequences to the host for at least one step. Nothing is in flight."""
        self._kept |= {sequence.seq_id: len(sequence.ids) for sequence in self._batch.give_back()}

    def reset(self) -> None:
        """Drop every sequence."""
        for sequence in [*self._batch]:
            self._batch.remove(sequence.seq_id)
        self._kept.clear()
        self._refused.clear()

    def has_runnable(self, num_in_flight_with: Callable[[RunningSequence], int]) -> bool:
        """Whether a sequence is sure to have a free slot and a token left after the steps in flight emit one token
        each."""
        block_size = self._batch.state.block_size
        return any(
            min(sequence.num_left, sequence.num_free_slots(block_size)) > num_in_flight_with(sequence)
            for sequence in self._batch
        )

    def layout(self, *, reads_first: bool) -> DraftLayout:
        """Return the layout of the next step, in which each sequence has its forced drafts. `reads_first`: the last one
        was read, so all drafts are known."""
        forced = [_forced(one) for one in self._batch if one.num_forced_drafts]
        free = [one for one in self._batch if not one.num_forced_drafts]
        load = StepLoad(num_context=sum(one.num_computed for one in self._batch))
        load = load.beside(forced, len(forced) + len(free))
        if not free:
            self.controller.layouts([], load)  # so that it does not take this step for one of its own
            layout = DraftLayout.plain()
        elif reads_first:
            layout = layout_of_drafts(free, self.controller, load, self._batch.state.block_size)
        else:
            layout = layout_ahead(free, self.controller, load, after_masks=self._last_had_masks)
        if forced:
            layout = _widened(layout, max(forced, key=lambda one: one.num_drafts))
        self._last_had_masks = layout.num_masks > 0
        return layout


def why_on_host(facts: ModelFacts) -> str | None:
    """Why this model cannot be stepped on its device; None: it can."""
    if facts.num_ranks > 1:
        return f"{facts.num_ranks} ranks share the model, and rank 0 tells the others the rows of each step"
    if facts.is_recurrent:
        return "its recurrent layers advance states row by row, as the host says"
    if facts.head.kind != "recurrent":
        return "a draft model drafts, which is stepped from the host"
    if facts.device.type == "cuda" and not can_be_captured(facts.attention):
        return f"the attention {facts.attention} plans each step on the host; --attention triton does not"
    return None
