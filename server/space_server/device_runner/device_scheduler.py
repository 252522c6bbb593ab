"""Who is stepped on the device, with which layout, and when the next step is launched.

A sequence takes a line when nothing but its root is to be computed and it fits (`DeviceBatch.fits`): its prompt was
read by a step on the host, which chose its first id, too. All lines have one layout (`device_layout`).

As long as the texts of some of them are read for what may follow, steps are launched one by one, each when the last has
been read and its drafts are known. What that costs is the time between two steps, for all lines; what it would cost to
step those sequences from the host is a second pass over the weights in each turn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from space_kernels.attention_backends import BACKENDS
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts

from space_server.batch.sequence import RunningSequence
from space_server.device_runner.device_layout import layout_ahead, layout_of_drafts
from space_server.device_runner.device_runner import DeviceRunner, StepRead
from space_server.drafts.drafts import Drafter
from space_server.machine.device_health import is_lost
from space_server.machine.memory import give_back_unused, is_out_of_memory
from space_server.speculation.controller import Controller

AHEAD = 2
"""Steps under way at most: one that the device takes, and one that it begins with as soon as that is done."""

MOST_FAILURES = 3
"""Launches in a row that may fail before sequences are stepped on the host for good."""

_log = logging.getLogger(__name__)


class DeviceScheduler:
    """Keeps the device busy with the sequences that can be stepped there."""

    def __init__(self, runner: DeviceRunner, controller: Controller) -> None:
        """`controller`: for these sequences alone."""
        self.runner = runner
        self.controller = controller
        self._batch = runner.batch
        self._num_failures = 0  # of launches, in a row
        self._kept: set[int] = set()  # sequences that are to be stepped on the host once
        self._refused: set[int] = set()  # sequences that no line could be prepared for

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._batch

    @property
    def sequences(self) -> list[RunningSequence]:
        """Those on a line."""
        return list(self._batch)

    @property
    def is_under_way(self) -> bool:
        """Steps were launched that are not read."""
        return self.runner.num_under_way > 0

    @property
    def works(self) -> bool:
        """Not so where launches keep failing."""
        return self._num_failures < MOST_FAILURES

    def admit(self, running: Iterable[RunningSequence]) -> None:
        """Lines for those of the running sequences that fit; who does not run any more leaves.

        A sequence for which that fails stays on the host; raises only where the device is lost.
        """
        known = {sequence.seq_id: sequence for sequence in running}
        for sequence in self.sequences:
            if sequence.seq_id not in known:
                self._batch.remove(sequence.seq_id)
        self._kept &= known.keys()
        self._refused &= known.keys()
        if not self.works:
            return
        block_size = self._batch.state.block_size
        for seq_id, sequence in known.items():
            if seq_id in self._batch or seq_id in self._kept or seq_id in self._refused:
                continue
            if sequence.num_free_slots(block_size) >= 1 and not self._take(sequence):
                self._refused.add(seq_id)

    def _take(self, sequence: RunningSequence) -> bool:
        """A line for this sequence if it fits; False where that failed."""
        try:
            if self._batch.fits(sequence):
                self._batch.put(sequence)
            return True
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self._batch.state.root.device):
                raise
            _log.warning("sequence %d gets no line (%s); it is stepped on the host", sequence.seq_id, error)
        if wants_memory:
            give_back_unused()
        return False

    @property
    def has_drafters(self) -> bool:
        """Somebody's text may be read for what follows."""
        return any(True for _ in self._drafters())

    @property
    def reads_first(self) -> bool:
        """A step waits until the one before is read: somebody's text is read for the drafts that it verifies."""
        return any(drafter.reads for drafter in self._drafters())

    def _drafters(self) -> Iterator[Drafter]:
        return (one.drafter for one in self._batch if one.drafter is not None and one.max_drafts > 0)

    def launch(self) -> list[StepRead] | None:
        """Launch steps until enough are under way, as long as somebody can run in them.

        Where that fails, what is under way; once that has been said `give_back` is to be called. None: it did not fail.
        """
        try:
            reads_first = self.reads_first
            while self.runner.num_under_way < (1 if reads_first else AHEAD) and self._somebody_runs():
                self.runner.launch(self._layout(reads_first=reads_first))
            return None
        except Exception as error:
            reads = self._give_up(error)
            wants_memory = is_out_of_memory(error)
        if wants_memory:
            give_back_unused()
        return reads

    def read(self) -> StepRead:
        """The oldest step under way."""
        read = self.runner.read()
        self._num_failures = 0
        if read.is_usual:
            self.controller.stepped(sum(len(advance.tokens) for advance in read.advances), read.seconds)
        return read

    def _give_up(self, error: Exception) -> list[StepRead]:
        """A launch has failed: all sequences go back to the host, as the steps under way leave them."""
        self._num_failures += 1
        _log.warning("a device step of %d sequences failed (%s); they are stepped on the host", len(self._batch), error)
        if not self.works:
            _log.error("%d device steps in a row have failed: there will be no more", self._num_failures)
        return [self.runner.read() for _ in range(self.runner.num_under_way)]

    def give_back(self) -> None:
        """All sequences leave their lines; each is stepped on the host at least once. Nothing is under way."""
        self._kept |= {sequence.seq_id for sequence in self._batch.give_back()}

    def was_stepped(self, seq_id: int) -> None:
        """If it was kept on the host, it may have a line again."""
        self._kept.discard(seq_id)

    def reset(self) -> None:
        """Wait for what is under way, and forget every sequence."""
        while self.is_under_way:
            self.runner.read()
        for sequence in self.sequences:
            self._batch.remove(sequence.seq_id)
        self._kept.clear()
        self._refused.clear()

    def _somebody_runs(self) -> bool:
        """Whether any sequence is sure to have a slot and an id left when the steps under way are over, if they emit
        one id each.
        """
        block_size = self._batch.state.block_size
        return any(
            min(sequence.num_left, sequence.num_free_slots(block_size)) > self.runner.num_with(sequence)
            for sequence in self._batch
        )

    def _layout(self, *, reads_first: bool) -> DraftLayout:
        if reads_first:
            return layout_of_drafts(self.sequences, self.controller, self._batch.state.block_size)
        return layout_ahead(self.sequences, self.controller)


def why_on_host(facts: ModelFacts) -> str | None:
    """Why this model cannot be stepped on its device; None: it can."""
    if facts.num_ranks > 1:
        return f"{facts.num_ranks} ranks share the model, and rank 0 tells the others the rows of each step"
    if facts.device.type == "cuda" and not BACKENDS[facts.attention].captures:
        return f"the attention {facts.attention} plans each step on the host; --attention triton does not"
    return None
