"""Who is stepped on the device, with which layout, and when the next step is launched.

A sequence takes a line when nothing but its root is to be computed and it fits (`DeviceBatch.fits`): its prompt was
read by a step on the host, which chose its first id, too. All lines have one layout, that of their average sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from statistics import median_high

from space_kernels.attention_backends import BACKENDS
from space_model.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts

from space_server.acceptance import Acceptance
from space_server.controller import Controller, Load, Room
from space_server.device_stepper import DeviceStepper, StepRead
from space_server.sequence import Sequence

AHEAD = 2
"""Steps under way at most: one that the device takes, and one that it begins with as soon as that is done."""

MOST_FAILURES = 3
"""Launches in a row that may fail before sequences are stepped on the host for good."""

_PLENTY = 1 << 30

_log = logging.getLogger(__name__)


class DeviceSteps:
    """Keeps the device busy with the sequences that can be stepped there."""

    def __init__(self, stepper: DeviceStepper, controller: Controller) -> None:
        """`controller`: for these sequences alone."""
        self.stepper = stepper
        self._controller = controller
        self._batch = stepper.batch
        self._num_failures = 0  # of launches, in a row
        self._kept: set[int] = set()  # sequences that are to be stepped on the host once

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._batch

    @property
    def sequences(self) -> list[Sequence]:
        """Those on a line."""
        return list(self._batch)

    @property
    def is_under_way(self) -> bool:
        """Steps were launched that are not read."""
        return self.stepper.num_under_way > 0

    @property
    def works(self) -> bool:
        """Not so where launches keep failing."""
        return self._num_failures < MOST_FAILURES

    def admit(self, running: Iterable[Sequence]) -> None:
        """Lines for those of the running sequences that fit; who does not run any more leaves."""
        known = {sequence.seq_id: sequence for sequence in running}
        for sequence in self.sequences:
            if sequence.seq_id not in known:
                self._batch.remove(sequence.seq_id)
        self._kept &= known.keys()
        if not self.works:
            return
        block_size = self._batch.state.block_size
        for seq_id, sequence in known.items():
            if seq_id in self._batch or seq_id in self._kept or sequence.num_free_slots(block_size) < 1:
                continue
            if self._batch.fits(sequence):
                self._batch.put(sequence)

    def launch(self) -> None:
        """Launch steps until enough are under way, as long as somebody can run in them. Raises what a step raises."""
        while self.stepper.num_under_way < AHEAD and self._somebody_runs():
            self.stepper.launch(self._layout())

    def read(self) -> StepRead:
        """The oldest step under way."""
        read = self.stepper.read()
        self._num_failures = 0
        self._controller.stepped(sum(len(advance.tokens) for advance in read.advances), read.seconds)
        return read

    def give_up(self, error: Exception) -> list[StepRead]:
        """A launch has failed: all sequences go back to the host, as the steps under way leave them."""
        self._num_failures += 1
        _log.warning("a device step of %d sequences failed (%s); they are stepped on the host", len(self._batch), error)
        if not self.works:
            _log.error("%d device steps in a row have failed: there will be no more", self._num_failures)
        return [self.stepper.read() for _ in range(self.stepper.num_under_way)]

    def give_back(self) -> None:
        """All sequences leave their lines; each is stepped on the host at least once. Nothing is under way."""
        self._kept |= {sequence.seq_id for sequence in self._batch.give_back()}

    def was_stepped(self, seq_id: int) -> None:
        """If it was kept on the host, it may have a line again."""
        self._kept.discard(seq_id)

    def reset(self) -> None:
        """Wait for what is under way, and forget every sequence."""
        while self.is_under_way:
            self.stepper.read()
        for sequence in self.sequences:
            self._batch.remove(sequence.seq_id)
        self._kept.clear()

    def _somebody_runs(self) -> bool:
        """Whether any sequence is sure to have a slot and an id left when the steps under way are over, if they emit
        one id each.
        """
        block_size = self._batch.state.block_size
        return any(
            min(sequence.num_left, sequence.num_free_slots(block_size)) > self.stepper.num_with(sequence)
            for sequence in self._batch
        )

    def _layout(self) -> DraftLayout:
        """What the controller wants for the average sequence, as though each had all the drafts it could have."""
        sequences = self.sequences
        bound = median_high(min(sequence.max_drafts, sequence.num_masks) for sequence in sequences)
        room = Room(
            seq_id=sequences[0].seq_id,
            num_drafts=bound,
            max_masks=bound,
            num_left=_PLENTY,
            acceptance=_average(sequences),
        )
        rooms = [room] * len(sequences)
        if any(not sequence.law.greedy for sequence in sequences):
            noisy = Room(room.seq_id, bound, bound, _PLENTY, is_noisy=True, acceptance=room.acceptance)
            rooms = [room if sequence.law.greedy else noisy for sequence in sequences]
        context = sum(sequence.num_computed for sequence in sequences)
        return room.fit(self._controller.layouts(rooms, Load(num_context=context))[0])


def why_on_host(facts: ModelFacts) -> str | None:
    """Why this model cannot be stepped on its device; None: it can."""
    if facts.num_ranks > 1:
        return f"{facts.num_ranks} ranks share the model, and rank 0 tells the others the rows of each step"
    if facts.device.type == "cuda" and not BACKENDS[facts.attention].captures:
        return f"the attention {facts.attention} plans each step on the host; --attention triton does not"
    return None


def _average(sequences: list[Sequence]) -> Acceptance | None:
    """The acceptance of all together who draft, and that by the same masks."""
    drafting = [sequence for sequence in sequences if sequence.most_masks]
    known = [sequence.acceptance for sequence in drafting if sequence.acceptance is not None]
    if not known:
        return None
    average = Acceptance(known[0].shape)
    average.shift = sum(acceptance.shift for acceptance in known) / len(known)
    return average
