"""The rows of a step as attention libraries take them: runs of query rows, each over the paged prefix it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from space_kernels.paging.row_pattern import Ints, RowPattern
from space_kernels.paging.slots import StepRows
from space_kernels.paging.step_tables import StepTables

LONGEST_SHORT_CHAIN = 32
"""Chain rows of one sequence that still count as decoding: those are padded to one width and share a call that may
split the context; longer chains are prompts, which have rows enough to fill a device."""


@dataclass(frozen=True, eq=False)
class Block:
    """Runs of rows, padded to one width."""

    sequences: Tensor  # [n] whose pages
    reach: Tensor  # [n] int32 slots seen from the sequence's first chain row on, by the last row of the run at least
    longest: int  # reach
    rows: Tensor | None  # [n·width] flat row numbers; None: the first n·width rows of the step as they are
    width: int
    places: Tensor  # [real rows] which of the n·width are no padding
    targets: Tensor  # [real rows] their flat row numbers

    def of(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [n, width, ...]"""
        num_runs = len(self.sequences)
        found = rows[: num_runs * self.width] if self.rows is None else rows.index_select(0, self.rows)
        return found.reshape(num_runs, self.width, *rows.shape[1:])

    def put(self, rows: Tensor, found: Tensor) -> None:
        """found [n·width, ...] goes to the rows [R, ...] that it is of."""
        if self.rows is None:
            rows[: len(found)] = found
        else:
            rows.index_copy_(0, self.targets, found.index_select(0, self.places))


@dataclass(frozen=True, eq=False)
class Ragged:
    """Runs of rows, one behind the other."""

    sequences: Tensor  # [n] whose pages
    reach: Tensor  # [n] int32, of each all its rows
    rows: Tensor  # [total] flat row numbers
    bounds: Tensor  # [n+1] int32 where each run begins
    widest: int

    @property
    def longest(self) -> int:
        """Reach."""
        return self.widest


@dataclass(frozen=True, eq=False)
class PrefixPattern:
    """What follows from a row pattern alone: the runs of a step, by the call they go through."""

    short_chains: Block | None  # causal among each other, in the pages; padding in front, so that the ends align
    long_chains: Ragged | None  # likewise
    masks: Block | None  # one run per mask group; every row of it sees the prefix up to the base row; padding behind

    @classmethod
    def of(cls, pattern: RowPattern, device: torch.device) -> PrefixPattern:
        """The runs of steps with this pattern, built on first use."""
        known = pattern.parts.get((cls, device))
        if not isinstance(known, cls):
            known = pattern.parts[cls, device] = _build(pattern, device)
        return known


@dataclass(frozen=True, eq=False)
class Reach:
    """Where each run of a call stands in this step."""

    lengths: Tensor  # [n] int32 slots that the last row of the run sees; rows that do not live may see unwritten ones
    pages: Tensor  # [n, most pages] int32; as many as those lengths take


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """The runs of one step, and how far each sees. Built once, shared by all layers.

    What it derives from the step's tables is computed on the device, once per StepRows: a CUDA graph is captured with
    a StepRows that nobody has used before, so that a replay computes it anew.
    """

    pattern: PrefixPattern
    tables: StepTables

    @classmethod
    def of(cls, rows: StepRows) -> PrefixRows:
        """The step's, built on first use."""
        name = (cls, rows.device)
        known = rows.parts.get(name)
        if not isinstance(known, PrefixRows):
            known = rows.parts[name] = cls(PrefixPattern.of(rows.pattern, rows.device), StepTables.of(rows))
        return known

    @cached_property
    def short_chains(self) -> Reach | None:
        """Of the chains that decode."""
        return self._reach(self.pattern.short_chains)

    @cached_property
    def long_chains(self) -> Reach | None:
        """Of the prompts."""
        return self._reach(self.pattern.long_chains)

    @cached_property
    def masks(self) -> Reach | None:
        """Of the mask groups."""
        return self._reach(self.pattern.masks)

    def _reach(self, runs: Block | Ragged | None) -> Reach | None:
        if runs is None:
            return None
        lengths = self.tables.starts.index_select(0, runs.sequences) + runs.reach
        table = self.tables.page_table.index_select(0, runs.sequences)
        # Where the device alone knows who lives, a run may end behind its sequence's last page: its last rows are dead
        # then, but a library looks up the page of the very last one.
        return Reach(lengths, functional.pad(table, (0, -(-runs.longest // self.tables.block_size))))


def _build(pattern: RowPattern, device: torch.device) -> PrefixPattern:
    short: list[int] = []
    long: list[int] = []
    for number, run in enumerate(pattern.chain_runs):
        (short if len(run) <= LONGEST_SHORT_CHAIN else long).append(number)
    groups = mask_groups(pattern)
    return PrefixPattern(
        short_chains=_short(pattern, short, device) if short else None,
        long_chains=_long(pattern, long, device) if long else None,
        masks=_masks(pattern, groups, device) if groups else None,
    )


def mask_groups(pattern: RowPattern) -> list[range]:
    """Flat row numbers of each mask group, ascending."""
    groups: list[range] = []
    for run in sorted(pattern.mask_runs, key=lambda run: run.start):
        begin = run.start
        for row in run:
            if row + 1 == run.stop or pattern.group[row + 1] != pattern.group[row]:
                groups.append(range(begin, row + 1))
                begin = row + 1
    return groups


#           width
# [pad pad  c0 c1 c2]   a chain: the last row sees all that is written, each before it one slot less
# [M1  M2   pad]        a mask group: every row sees the prefix up to the base row
def _short(pattern: RowPattern, members: Sequence[int], device: torch.device) -> Block:
    runs = [pattern.chain_runs[number] for number in members]
    width = max(map(len, runs))
    rows = [[run.start] * (width - len(run)) + list(run) for run in runs]
    real = [[False] * (width - len(run)) + [True] * len(run) for run in runs]
    return _block(members, [len(run) for run in runs], rows, real, device)


def _masks(pattern: RowPattern, groups: Sequence[range], device: torch.device) -> Block:
    width = max(map(len, groups))
    rows = [[*group, *[group.start] * (width - len(group))] for group in groups]
    real = [[True] * len(group) + [False] * (width - len(group)) for group in groups]
    members = [int(pattern.owner[group.start]) for group in groups]
    return _block(members, [int(pattern.reach[group.start]) for group in groups], rows, real, device)


def _block(
    members: Sequence[int],
    reach: Sequence[int],
    rows: Sequence[Sequence[int]],
    real: Sequence[Sequence[bool]],
    device: torch.device,
) -> Block:
    flat = np.array(rows, dtype=np.int64).reshape(-1)
    places = np.flatnonzero(np.array(real).reshape(-1))
    in_place = bool((flat == np.arange(len(flat))).all())
    return Block(
        sequences=_to(members, device),
        reach=_to(reach, device, torch.int32),
        longest=max(reach),
        rows=None if in_place else _to(flat, device),
        width=len(rows[0]),
        places=_to(places, device),
        targets=_to(flat[places], device),
    )


def _long(pattern: RowPattern, members: Sequence[int], device: torch.device) -> Ragged:
    runs = [pattern.chain_runs[number] for number in members]
    lengths = [len(run) for run in runs]
    return Ragged(
        sequences=_to(members, device),
        reach=_to(lengths, device, torch.int32),
        rows=_to(np.concatenate([np.arange(run.start, run.stop) for run in runs]), device),
        bounds=_to(np.cumsum([0, *lengths]), device, torch.int32),
        widest=max(lengths),
    )


def _to(values: Ints | Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device=device, dtype=dtype)
