"""What recurrent layers remember of each sequence between steps, and which rows of a step advance it.

A layer remembers the state after one position, and the inputs of the rows behind it, which may be rejected:

    computed by the step before      this step
    [0 ...... reached] [... known]   [start ............ start + chain)
     in the state       logged        logged or in the state

A step begins at a position in reached + 1 .. known + 1. It advances the state by the logged rows before `start`, which
are the drafts that were accepted, and then by its own rows, one after another, in float32; rejected drafts never reach
a state. The state behind the last row that is final is kept, and the rows of drafts behind it are logged. Each mask
group begins with the state of the chain row that it follows, and leaves no trace.

Each sequence has two versions of all this. A step reads the one and writes the other, so a step that failed can be
taken again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from space_kernels.paging.step_rows import Ints, StepRows

VERSIONS = 2

GATES = 2
"""Numbers of each row and head that say how its state fades and grows."""


class LayerState(NamedTuple):
    """What one layer remembers of a sequence."""

    conv_dim: int  # numbers of a row that are convolved
    num_taps: int  # rows that a convolution spans, the last being its own
    shape: tuple[int, ...] = ()  # heads, and the two dimensions of a head's state; (): the convolution is all
    num_logged: int = 0  # numbers of a row, beside what is convolved, that advance the state; 0: GATES of each head
    begins_anew: bool = False  # transformers' pass over several rows begins with zeros, whatever was before

    def num_bytes(self, most_drafts: int) -> int:
        """Return what it takes of memory for each sequence."""
        rows = (most_drafts + self.num_taps - 1) * self.conv_dim
        gates = most_drafts * math.prod(self.logged) if self.shape else 0
        return 4 * VERSIONS * (rows + gates + (math.prod(self.shape) if self.shape else 0))

    @property
    def logged(self) -> tuple[int, int]:
        """Return the shape of what is logged of a row beside what is convolved."""
        return (1, self.num_logged) if self.num_logged else (GATES, self.shape[0])

    @property
    def kept_bytes(self) -> int:
        """Return what a state takes that is kept for other sequences."""
        return 4 * ((self.num_taps - 1) * self.conv_dim + (math.prod(self.shape) if self.shape else 0))


class LayerMemory(NamedTuple):
    """The memory of one layer, all in float32; V: versions."""

    inputs: Tensor  # [slots, V, most drafts + taps - 1, conv dim]: of the last known rows, before the convolution
    gates: Tensor | None  # [slots, V, most drafts, 2, heads] or [..., 1, num_logged]: of the last known rows
    state: Tensor | None  # [slots, V, heads, …]
    kept_inputs: Tensor  # [kept, taps - 1, conv dim]: of states that are kept for other sequences
    kept_state: Tensor | None  # [kept, heads, …]


class RecurrentStates:
    """The memory of all recurrent layers for some number of sequences, each of which has a slot."""

    def __init__(
        self,
        layers: Mapping[int, LayerState],
        num_slots: int,
        most_drafts: int,
        device: torch.device | str = "cpu",
        *,
        num_kept: int = 0,
        in_turn: bool = False,
    ) -> None:
        """Allocate memory; every page of it is touched now. `layers`: by number; `most_drafts`: of one step;
        `num_kept`: states that can be kept for other sequences; `in_turn`: layers that are alike have the same memory,
        for one at a time."""
        self.num_slots, self.most_drafts, self.device = num_slots, most_drafts, torch.device(device)
        self.num_kept = num_kept
        made: dict[object, LayerMemory] = {}
        for number, layer in layers.items():
            place = layer if in_turn else number
            if place not in made:
                made[place] = self._allocate(layer)
        self.layers = {number: made[layer if in_turn else number] for number, layer in layers.items()}
        self.reached = np.full((num_slots, VERSIONS), -1, dtype=np.int64)  # position behind which the state is
        self.known = np.full((num_slots, VERSIONS), -1, dtype=np.int64)  # last position with logged inputs

    def _allocate(self, layer: LayerState) -> LayerMemory:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self.num_slots, VERSIONS, *shape, dtype=torch.float32, device=self.device)

        inputs = zeros(self.most_drafts + layer.num_taps - 1, layer.conv_dim)
        kept = torch.zeros(self.num_kept, layer.num_taps - 1, layer.conv_dim, device=self.device)
        if not layer.shape:
            return LayerMemory(inputs, None, None, kept, None)
        gates, state = zeros(self.most_drafts, *layer.logged), zeros(*layer.shape)
        return LayerMemory(inputs, gates, state, kept, torch.zeros(self.num_kept, *layer.shape, device=self.device))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        kept = [tensor for memory in self.layers.values() for tensor in memory if tensor is not None]
        return sum(tensor.nbytes for tensor in kept)

    def keep(self, slot: int, position: int, kept: int) -> None:
        """Keep a sequence's state behind `position`, at which its last step ended, for other sequences. Raises
        ValueError if the step ended elsewhere."""
        fits = (self.reached[slot] == position) & (self.known[slot] == position)
        if not fits.any():
            raise ValueError(f"The recurrent state of a sequence is not the one behind position {position}.")
        version = int(fits.argmax())
        for memory in self.layers.values():
            memory.kept_inputs[kept] = _last(memory, slot, version)
            if memory.state is not None and memory.kept_state is not None:
                memory.kept_state[kept] = memory.state[slot, version]

    def load(self, kept: int, slot: int, position: int) -> None:
        """Let a sequence go on behind `position` from a state that was kept."""
        for memory in self.layers.values():
            _last(memory, slot, 0)[:] = memory.kept_inputs[kept]
            if memory.state is not None and memory.kept_state is not None:
                memory.state[slot, 0] = memory.kept_state[kept]
        self.put(slot, position)

    def has_room(self, num_slots: int, most_drafts: int) -> bool:
        """Return whether it suffices for so many sequences and drafts."""
        return num_slots <= self.num_slots and most_drafts <= self.most_drafts

    def begin(self, rows: StepRows) -> StateStep:
        """Return which rows advance which states. Raises ValueError for a sequence that does not go on where its state
        is, for drafts beyond `most_drafts`, and for two sequences with one slot."""
        slots, starts = rows.state_slots, rows.starts
        if len(set(slots.tolist())) < len(slots):
            raise ValueError("Two sequences of a step have the same slot of recurrent states.")
        reads = np.full(len(slots), -1, dtype=np.int64)
        writes = np.zeros(len(slots), dtype=np.int64)
        for number, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"There is no slot {slot} of recurrent states; there are {self.num_slots}.")
            if rows.num_drafts[number] > self.most_drafts:
                raise ValueError(f"{rows.num_drafts[number]} drafts; states can be rolled back by {self.most_drafts}.")
            if start == 0:
                continue
            fits = (self.reached[slot] < start) & (start <= self.known[slot] + 1)
            if not fits.any():
                raise ValueError(f"The recurrent state of a sequence is not the one before position {start}.")
            reads[number] = np.where(fits, self.reached[slot], -2).argmax()
            writes[number] = 1 - reads[number]
        reached = np.where(reads < 0, -1, self.reached[slots, reads])
        known = np.where(reads < 0, -1, self.known[slots, reads])
        return StateStep(rows, reads, writes, reached, known, self.most_drafts)

    def commit(self, step: StateStep) -> None:
        """Let the versions that a step wrote be read by the next: all its layers were computed."""
        slots, starts = step.rows.state_slots, step.rows.starts
        counts = step.rows.pattern.chains[1]
        anew = slots[step.reads < 0]
        self.reached[anew], self.known[anew] = -1, -1
        self.known[anew, 1] = -2  # of the sequence that had the slot before
        self.reached[slots, step.writes] = starts + counts - step.rows.num_drafts - 1
        self.known[slots, step.writes] = starts + counts - 1

    def put(self, slot: int, position: int) -> None:
        """Declare version 0 of a slot to be the memory behind `position`, without drafts."""
        self.reached[slot], self.known[slot] = -1, -2
        self.reached[slot, 0] = self.known[slot, 0] = position


def _last(memory: LayerMemory, slot: int, version: int) -> Tensor:
    """Return the inputs that convolutions of the next row reach: [taps - 1, conv dim], a view."""
    inputs = memory.inputs[slot, version]
    return inputs[len(inputs) - memory.kept_inputs.shape[1] :]


class Windows(NamedTuple):
    """Where the inputs of a step's convolutions are: in rows of a zero, of the log, and of the step, one behind another
    (0; 1 …; 1 + logged …)."""

    logged: tuple[Tensor, Tensor, Tensor]  # slot, version and place of each row of the log
    inputs: Tensor  # [replayed and own rows, taps]: of each row
    log: Tensor  # [S, most drafts + taps - 1]: what each sequence logs


# replayed rows of all sequences     the step's rows, as in StepRows     padding
# [0 ............ num_replayed)      [num_replayed ...................................
class StateStep:
    """Which rows advance which states in one step; shared by all layers."""

    def __init__(self, rows: StepRows, reads: Ints, writes: Ints, reached: Ints, known: Ints, most_drafts: int) -> None:
        """`reads`, `writes`: [S] versions, -1: the sequence begins; `reached`, `known`: [S] of the versions read."""
        self.rows, self.reads, self.writes = rows, reads, writes
        self._known, self._most_drafts = known, most_drafts
        self._replays = np.where(reads < 0, 0, rows.starts - 1 - reached)
        self.num_replayed = int(self._replays.sum())
        self._windows: dict[int, Windows] = {}
        first = np.cumsum(self._replays) - self._replays  # replayed rows before those of each sequence
        chain_first, num_chain = rows.pattern.chains
        groups = _groups(rows)
        self.runs = np.stack(
            [
                rows.state_slots,
                reads,
                writes,
                first,
                self._replays,
                chain_first + self.num_replayed,
                num_chain,
                num_chain - rows.num_drafts,
                np.array([span.start for _, span in groups], dtype=np.int64),
                np.array([len(span) for _, span in groups], dtype=np.int64),
            ],
            axis=1,
        )
        """[S, 10]: slot, version read (-1: none), version written, first replayed row, their number, first chain row,
        their number, chain rows that are final, first group, their number."""
        found = [group for groups_of, _ in groups for group in groups_of]
        self.groups = np.array(found, dtype=np.int64).reshape(-1, 3)
        """[groups, 3]: chain rows before the group, its first row, its rows."""
        self.groups[:, 1] += self.num_replayed
        self.slots = torch.from_numpy(rows.state_slots).to(rows.device)
        self.written = torch.from_numpy(writes).to(rows.device)
        self._gates: tuple[tuple[Tensor, Tensor, Tensor], Tensor] | None = None

    def windows(self, num_taps: int) -> Windows:
        """Return the inputs of convolutions with so many taps."""
        found = self._windows.get(num_taps)
        if found is None:
            found = self._windows[num_taps] = self._build(num_taps)
        return found

    def _build(self, num_taps: int) -> Windows:
        rows, back = self.rows, num_taps - 1
        pattern = rows.pattern
        kept = self._most_drafts + back
        slots: list[Ints] = []
        versions: list[Ints] = []
        places: list[Ints] = []
        inputs = np.zeros((self.num_replayed + pattern.num_padded, num_taps), dtype=np.int64)
        log = np.zeros((len(rows.starts), kept), dtype=np.int64)
        own = 1 + int(sum(np.minimum(self._replays + back, rows.starts)))  # the step's rows are behind these
        logged = 1
        for number, run in enumerate(self.runs.tolist()):
            slot, read, _, replayed, num_replayed, chain, num_chain, _, first_group, num_groups = run
            start = int(rows.starts[number])
            begin = start - num_replayed - back
            positions = np.arange(max(begin, 0), start)
            slots.append(np.full(len(positions), slot, dtype=np.int64))
            versions.append(np.full(len(positions), read, dtype=np.int64))
            places.append(positions - (self._known[number] - kept + 1))
            at = np.zeros(start + num_chain - begin, dtype=np.int64)  # by position, from `begin` on
            at[len(at) - num_chain - len(positions) : len(at) - num_chain] = np.arange(len(positions)) + logged
            at[len(at) - num_chain :] = np.arange(num_chain) + own + chain - self.num_replayed
            logged += len(positions)
            spans = np.lib.stride_tricks.sliding_window_view(at, num_taps)
            inputs[replayed : replayed + num_replayed] = spans[:num_replayed]
            inputs[chain : chain + num_chain] = spans[num_replayed:]
            for behind, mask, count in self.groups[first_group : first_group + num_groups].tolist():
                before = at[num_replayed + behind : num_replayed + behind + back]
                masks = np.arange(count) + own + mask - self.num_replayed
                both = np.concatenate([before, masks])
                inputs[mask : mask + count] = np.lib.stride_tricks.sliding_window_view(both, num_taps)
            known = at[max(0, len(at) - kept) :]
            log[number, kept - len(known) :] = known
        device = rows.device
        read_from = tuple(torch.from_numpy(np.concatenate(part)).to(device) for part in (slots, versions, places))
        return Windows(read_from, torch.from_numpy(inputs).to(device), torch.from_numpy(log).to(device))  # type: ignore[arg-type]

    @property
    def gate_rows(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return slot, version and place in the log of each replayed row; and [S, most drafts] the rows, replayed or of
        the step, whose gates each sequence logs."""
        if self._gates is None:
            most = self._most_drafts
            log = np.zeros((len(self.runs), most), dtype=np.int64)
            read_from: list[list[int]] = [[], [], []]
            for number, (slot, read, _, replayed, num_replayed, chain, num_chain, *_) in enumerate(self.runs.tolist()):
                start, known = int(self.rows.starts[number]), int(self._known[number])
                read_from[0] += [slot] * num_replayed
                read_from[1] += [read] * num_replayed
                read_from[2] += range(start - num_replayed - (known - most + 1), start - (known - most + 1))
                rows = [*range(replayed, replayed + num_replayed), *range(chain, chain + num_chain)][-most:]
                if most:
                    log[number, most - len(rows) :] = rows
            device = self.rows.device
            slots, versions, places = (torch.tensor(part, dtype=torch.int64, device=device) for part in read_from)
            self._gates = (slots, versions, places), torch.from_numpy(log).to(device)
        return self._gates


def _groups(rows: StepRows) -> list[tuple[list[tuple[int, int, int]], range]]:
    """Return each sequence's mask groups (chain rows before it, its first flat row, its rows), and their numbers."""
    pattern = rows.pattern
    known = pattern.parts.get(_groups)
    if isinstance(known, list):
        return known
    found: list[tuple[list[tuple[int, int, int]], range]] = []
    total = 0
    for masks in pattern.mask_runs:
        groups: list[tuple[int, int, int]] = []
        last = -1
        for row in masks:
            if pattern.group[row] != last:
                last = int(pattern.group[row])
                groups.append((int(pattern.reach[row]), row, 0))
            behind, first, count = groups[-1]
            groups[-1] = behind, first, count + 1
        found.append((groups, range(total, total + len(groups))))
        total += len(groups)
    pattern.parts[_groups] = found
    return found
