"""Selects the sequences that are stepped on the device, and the one draft layout that all of them share.

The host runs prefill and samples the first token. After that, when only its root is pending and it fits
(`DeviceBatch.fits`), a sequence moves to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from statistics import median_high

from space_kernels.attention_backends import BACKENDS
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts

from space_server.batch.sequence import RunningSequence
from space_server.device_runner.device_batch import DeviceBatch
from space_server.drafts.acceptance import Acceptance
from space_server.machine.device_health import is_lost
from space_server.machine.memory import give_back_unused, is_out_of_memory
from space_server.scheduled_batch import draft_limits_of
from space_server.speculation.controller import Controller, DraftLimits, StepLoad

_PLENTY = 1 << 30


def layout_ahead(sequences: Sequence[RunningSequence], controller: Controller) -> DraftLayout:
    """Return the layout for a step launched before the last is read: the controller's choice for the average sequence,
    with all drafts it could have, widened to the drafts that some sequence must have.
    """
    most_forced = max(sequence.num_forced_drafts for sequence in sequences)
    sequences = [sequence for sequence in sequences if not sequence.num_forced_drafts]
    if not sequences:
        return DraftLayout.full(most_forced, most_forced)
    bound = median_high(min(sequence.max_drafts, sequence.num_masks) for sequence in sequences)
    limit = DraftLimits(
        seq_id=sequences[0].seq_id,
        num_drafts=bound,
        max_masks=bound,
        num_left=_PLENTY,
        acceptance=_average(sequences),
    )
    limits = [limit] * len(sequences)
    if any(not sequence.sampling_params.greedy for sequence in sequences):
        noisy = DraftLimits(limit.seq_id, bound, bound, _PLENTY, is_noisy=True, acceptance=limit.acceptance)
        limits = [limit if sequence.sampling_params.greedy else noisy for sequence in sequences]
    return _widened(limit.fit(controller.layouts(limits, _load(sequences))[0]), most_forced)


def layout_of_drafts(sequences: Sequence[RunningSequence], controller: Controller, block_size: int) -> DraftLayout:
    """Return the layout where every sequence's drafts are known: the widest groups wanted, and as many drafts as masks
    made.

    Drafts from other sources are added as long as their expected gain exceeds the cost of their rows in the whole
    batch.
    """
    most_forced = max(sequence.num_forced_drafts for sequence in sequences)
    sequences = [sequence for sequence in sequences if not sequence.num_forced_drafts]
    if not sequences:
        return DraftLayout.full(most_forced, most_forced)
    average, limits = _average(sequences), []
    for sequence in sequences:
        limit = draft_limits_of(sequence, block_size)
        if limit.acceptance is not None:
            limit.acceptance = average  # the same for all, so that all want the same masks
        limits.append(limit)
    wanted = controller.layouts(limits, _load(sequences))
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
    masks = tuple(max(_mask(layout, group) for layout in layouts) for group in range(num_drafts + 1))
    return _widened(DraftLayout.of(num_drafts, masks), most_forced)


def _widened(layout: DraftLayout, num_drafts: int) -> DraftLayout:
    """Return the smallest layout that contains this one and the full layout of `num_drafts`."""
    most = max(layout.num_drafts, num_drafts)
    forced = DraftLayout.full(num_drafts, num_drafts)
    return DraftLayout.of(most, tuple(max(_mask(layout, group), _mask(forced, group)) for group in range(most + 1)))


def _reach(limit: DraftLimits, depth: int) -> float:
    """Return the probability that the first `depth` drafts are all accepted."""
    reach = 1.0
    for chance in limit.chances[:depth]:
        reach *= chance
    return reach


def _mask(layout: DraftLayout, group: int) -> int:
    return layout.masks[group] if group <= layout.num_drafts else 0


def _load(sequences: Sequence[RunningSequence]) -> StepLoad:
    return StepLoad(num_context=sum(sequence.num_computed for sequence in sequences))


def _average(sequences: Sequence[RunningSequence]) -> Acceptance | None:
    """Return the mean acceptance of the sequences that draft; they draft with the same masks."""
    drafting = [sequence for sequence in sequences if sequence.most_masks]
    known = [sequence.acceptance for sequence in drafting if sequence.acceptance is not None]
    if not known:
        return None
    average = Acceptance(known[0].shape)
    average.shift = sum(acceptance.shift for acceptance in known) / len(known)
    return average


_log = logging.getLogger(__name__)


class DeviceScheduler:
    """Moves sequences to the device, and lays out their steps."""

    def __init__(self, batch: DeviceBatch, controller: Controller) -> None:
        """`controller`: used for these sequences only."""
        self.controller = controller
        self._batch = batch
        self._kept: dict[int, int] = {}  # ids of the sequences that the host is to step once, as they were given back
        self._refused: set[int] = set()  # sequences whose move to the device failed

    @property
    def reads_first(self) -> bool:
        """Whether each step waits until the last is read, because a drafter reads some sequence's text."""
        return any(
            one.drafter.reads
            for one in self._batch
            if one.drafter is not None and one.max_drafts > 0 and not one.num_forced_drafts
        )

    def admit(self, running: Iterable[RunningSequence], *, works: bool = True) -> None:
        """Move running sequences that fit to the device, if it `works`, and remove those that no longer run.

        A sequence whose move fails stays on the host; raises only if the device is lost.
        """
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
        each.
        """
        block_size = self._batch.state.block_size
        return any(
            min(sequence.num_left, sequence.num_free_slots(block_size)) > num_in_flight_with(sequence)
            for sequence in self._batch
        )

    def layout(self, *, reads_first: bool) -> DraftLayout:
        """Return the layout of the next step. `reads_first`: the last one was read, so all drafts are known."""
        sequences = [*self._batch]
        if reads_first:
            return layout_of_drafts(sequences, self.controller, self._batch.state.block_size)
        return layout_ahead(sequences, self.controller)


def why_on_host(facts: ModelFacts) -> str | None:
    """Why this model cannot be stepped on its device; None: it can."""
    if facts.num_ranks > 1:
        return f"{facts.num_ranks} ranks share the model, and rank 0 tells the others the rows of each step"
    if facts.device.type == "cuda" and not BACKENDS[facts.attention].captures:
        return f"the attention {facts.attention} plans each step on the host; --attention triton does not"
    return None
