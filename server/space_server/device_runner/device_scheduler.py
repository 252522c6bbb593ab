"""Selects the sequences stepped on the device and their layout, and launches their steps.

The host runs prefill and samples the first token. After that, when only its root is pending and it fits
(`DeviceBatch.fits`), a sequence moves to the device. All sequences there share one layout (`device_layout`).

While some sequence has a drafter that reads its text, each step is launched only after the last one was read, when its
drafts are known. That leaves a gap between steps, which costs less than stepping those sequences from the host: that
would be a second pass over the weights.
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
"""Most steps in flight: one that runs, and one queued behind it."""

MOST_FAILURES = 3
"""Consecutive launch failures after which all sequences are stepped on the host for good."""

_log = logging.getLogger(__name__)


class DeviceScheduler:
    """Keeps the device busy with the sequences that can be stepped there."""

    def __init__(self, runner: DeviceRunner, controller: Controller) -> None:
        """`controller`: used for these sequences only."""
        self.runner = runner
        self.controller = controller
        self._batch = runner.batch
        self._num_failures = 0  # consecutive failed launches
        self._kept: set[int] = set()  # sequences to be stepped on the host once
        self._refused: set[int] = set()  # sequences whose move to the device failed

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._batch

    @property
    def sequences(self) -> list[RunningSequence]:
        """Sequences on the device."""
        return list(self._batch)

    @property
    def is_under_way(self) -> bool:
        """Whether a step is in flight."""
        return self.runner.num_under_way > 0

    @property
    def works(self) -> bool:
        """False after too many failed launches."""
        return self._num_failures < MOST_FAILURES

    def admit(self, running: Iterable[RunningSequence]) -> None:
        """Move running sequences that fit to the device, and remove those that no longer run.

        A sequence whose move fails stays on the host; raises only if the device is lost.
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

    @property
    def has_drafters(self) -> bool:
        """Whether any sequence has a drafter besides masks."""
        return any(True for _ in self._drafters())

    @property
    def reads_first(self) -> bool:
        """Whether each step waits until the last is read, because a drafter reads some sequence's text."""
        return any(drafter.reads for drafter in self._drafters())

    def _drafters(self) -> Iterator[Drafter]:
        return (one.drafter for one in self._batch if one.drafter is not None and one.max_drafts > 0)

    def launch(self) -> list[StepRead] | None:
        """Launch steps until enough are in flight, while any sequence can run.

        Returns None, or if a launch failed the steps that were in flight; the caller reports them and calls
        `give_back`.
        """
        try:
            reads_first = self.reads_first
            while self.runner.num_under_way < (1 if reads_first else AHEAD) and self._has_runnable():
                self.runner.launch(self._layout(reads_first=reads_first))
            return None
        except Exception as error:
            reads = self._give_up(error)
            wants_memory = is_out_of_memory(error)
        if wants_memory:
            give_back_unused()
        return reads

    def read(self) -> StepRead:
        """Read the oldest step in flight."""
        read = self.runner.read()
        self._num_failures = 0
        if read.is_usual:
            self.controller.stepped(sum(len(advance.tokens) for advance in read.outputs), read.seconds)
        return read

    def _give_up(self, error: Exception) -> list[StepRead]:
        """Count a failed launch, and read the steps in flight."""
        self._num_failures += 1
        _log.warning("a device step of %d sequences failed (%s); they are stepped on the host", len(self._batch), error)
        if not self.works:
            _log.error(
                "%d device steps in a row have failed; all sequences are stepped on the host from now on",
                self._num_failures,
            )
        return [self.runner.read() for _ in range(self.runner.num_under_way)]

    def give_back(self) -> None:
        """Return all sequences to the host for at least one step. Nothing is in flight."""
        self._kept |= {sequence.seq_id for sequence in self._batch.give_back()}

    def was_stepped(self, seq_id: int) -> None:
        """Let a sequence that was kept on the host move to the device again."""
        self._kept.discard(seq_id)

    def reset(self) -> None:
        """Wait for steps in flight, and drop every sequence."""
        while self.is_under_way:
            self.runner.read()
        for sequence in self.sequences:
            self._batch.remove(sequence.seq_id)
        self._kept.clear()
        self._refused.clear()

    def _has_runnable(self) -> bool:
        """Whether a sequence is sure to have a free slot and a token left after the steps in flight emit one token
        each.
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
