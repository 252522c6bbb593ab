"""Drafts of a draft network, on the host. It reads the known text that it has not read, then drafts id after id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from space_model.draft_network import DraftNetwork
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.networks.network import DraftKV
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.drafters.mask_drafter import SamplingGroups, Stopwatch
from space_server.drafters.sequential_drafts import HeadRun, SequentialDrafts

MOST_UNREAD = 256
"""Unread positions that a step reads of all sequences: longer texts are read in several steps, which draft nothing, so
that other sequences do not wait for a whole prompt."""

FEW_UNREAD = 16
"""Unread positions of one sequence that are always read. A step leaves at most its drafts and the bonus."""


@dataclass(slots=True)
class _Reading:
    """A part of a sequence's known text that the network reads in this step."""

    run: int  # number of the run
    start: int  # position of the first row
    ids: list[int]  # of the rows' positions, or behind them: see DraftNetwork
    is_last: bool  # it ends with the last known id, behind which drafts are made


class NetworkDrafter:
    """Drafts by a network with keys and values of its own."""

    def __init__(
        self, network: DraftNetwork, kv: DraftKV, *, vocab_size: int, banned_ids: Tensor, clock: Callable[[], float]
    ) -> None:
        """`vocab_size`: of the served model."""
        self._network, self._kv = network, kv
        self._vocab_size, self._banned = vocab_size, banned_ids
        self._computing = Stopwatch(clock)
        self._sampling_groups = SamplingGroups()
        self._tried: WeakKeyDictionary[RunningSequence, tuple[int, list[int]]] = WeakKeyDictionary()
        self._catches_up = False  # some text had more unread positions than a step leaves

    @property
    def seconds(self) -> float:
        """Seconds of tensor work so far."""
        return self._computing.seconds

    def take_catching_up(self) -> bool:
        """Return whether the steps since the last call read older text, so that they took longer than others will."""
        was_catching_up, self._catches_up = self._catches_up, False
        return was_catching_up

    def draft(self, hidden: Tensor, runs: Sequence[HeadRun]) -> list[list[int]]:
        """Return the drafts of each run; none of one whose text is not read to its end yet. hidden: unused."""
        readings = self._readings(runs)
        self._catches_up = self._catches_up or any(len(one.ids) > FEW_UNREAD for one in readings)
        if not readings:
            return [[] for _ in runs]
        batch = self._batch([Segment(one.ids, one.start, runs[one.run].sequence.page_numbers) for one in readings])
        with self._computing:
            state = self._network.forward(batch, self._kv.pages, self._kv.states_at(batch))
        for one in readings:
            self._kv.mark_read(runs[one.run].sequence.page_numbers, one.start, one.start + len(one.ids))
        drafting = [one for one in readings if one.is_last]
        found: list[list[int]] = [[] for _ in runs]
        if not drafting:
            return found
        ends = torch.tensor([len(one.ids) for one in readings]).cumsum(0) - 1
        state = state[ends[[place for place, one in enumerate(readings) if one.is_last]].to(state.device)]
        drafted = [self._within_slots(runs[one.run], one) for one in drafting]
        for one, run, ids in zip(drafting, drafted, self._drafts(drafting, drafted, state), strict=True):
            found[one.run] = ids
            if not self._network.lag:  # others read hidden states of their own for drafts, which are no text
                self._tried[run.sequence] = one.start + len(one.ids), ids[:-1]
        return found

    def _readings(self, runs: Sequence[HeadRun]) -> list[_Reading]:
        """Return what each sequence's run is to read, within the bounds of a step."""
        found, left = [], MOST_UNREAD
        for number, run in enumerate(runs):
            sequence = run.sequence
            lag = self._network.lag
            last = len(sequence.ids) + len(run.emitted) - lag
            begin = min(self._num_read(run), last - 1)
            end = min(last, begin + max(left, FEW_UNREAD), len(sequence.pages) * self._kv.pages.block_size)
            if last >= self._network.window or end <= begin:
                continue
            ids = _known(run, begin + lag, end + lag)
            if max(ids) >= self._network.vocab_size:
                continue  # it cannot read a token that only the served model has
            found.append(_Reading(number, begin, ids, end == last))
            left = max(0, left - len(ids))
        return found

    def _num_read(self, run: HeadRun) -> int:
        """Return the leading positions of the known text that were read, drafts that were accepted included."""
        pages, sequence = run.sequence.page_numbers, run.sequence
        num_read = self._kv.num_read_of(pages)
        begin, tried = self._tried.pop(sequence, (0, []))
        if begin != num_read:
            return num_read
        known = _known(run, begin, begin + len(tried))
        agree = next((n for n, (one, id_) in enumerate(zip(tried, known, strict=False)) if one != id_), len(known))
        if agree:
            self._kv.mark_read(pages, begin, begin + agree)
        return num_read + agree

    def _within_slots(self, run: HeadRun, reading: _Reading) -> HeadRun:
        """Return the run with as many drafts as there are slots and positions behind its text."""
        begin = reading.start + len(reading.ids)
        most = min(len(run.sequence.pages) * self._kv.pages.block_size, self._network.window) - begin + 1
        return HeadRun(run.sequence, run.emitted, run.row, min(run.count, most))

    def _drafts(self, readings: Sequence[_Reading], runs: Sequence[HeadRun], state: Tensor) -> list[list[int]]:
        """Return the drafts of each run. state [S, hidden]: of the last known ids."""
        made = SequentialDrafts(
            runs,
            self._network,
            vocab_size=self._vocab_size,
            banned_ids=self._banned,
            sampling_groups=self._sampling_groups,
            computing=self._computing,
        )
        positions = [one.start + len(one.ids) for one in readings]
        while True:
            with self._computing:
                logits = self._network.logits(state)
            stay = made.add(logits)
            if not made.going:
                return made.drafts
            segments = []
            for number, id_ in zip(made.going, made.last, strict=True):
                position = positions[number] + len(made.drafts[number]) - 1
                segments.append(Segment([id_], position, runs[number].sequence.page_numbers))
            batch = self._batch(segments)
            with self._computing:
                states = None
                if self._network.width:
                    states = state.new_zeros(len(batch.ids), state.shape[1])
                    states[: len(stay)] = state[stay]
                state = self._network.forward(batch, self._kv.pages, states)[: len(stay)]

    def _batch(self, segments: Sequence[Segment]) -> ForwardBatch:
        size, device = self._kv.pages.block_size, self._banned.device
        return ForwardBatch.build(segments, block_size=size, mask_ids=(), device=device)


def _known(run: HeadRun, begin: int, end: int) -> list[int]:
    """Return the known ids from position `begin` to before `end`, or to the last."""
    ids = run.sequence.ids
    behind = run.emitted[max(0, begin - len(ids)) : max(0, end - len(ids))]
    return [*ids[begin:end], *behind]
