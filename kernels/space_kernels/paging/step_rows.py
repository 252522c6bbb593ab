"""The rows of a step: their relative layout, and the KV cache slots that each of them sees."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


# chain rows of all sequences           mask rows of all sequences                    padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ num_rows)            [num_rows ... num_padded)
#  K, V go to the pages first            K, V live in the step only                    writes nothing, result unused
@dataclass(frozen=True, eq=False)
class RowPattern:
    """The rows of a step, with positions relative to the first chain row of their sequence.

    A sequence has two runs of rows: its chain rows, and its mask rows, group after group. Consecutive steps with the
    same draft layout share the pattern, so everything derived from it alone is cached in `parts`.
    """

    chain_runs: Sequence[range]  # per sequence: flat row numbers of its chain rows; positions are consecutive
    mask_runs: Sequence[range]  # per sequence: flat row numbers of its mask rows
    offsets: Ints  # [rows] position relative to the sequence's first chain row
    reach: Ints  # [rows] slots, from that row on, that the row may attend: its own or its base row's offset plus one
    group: Ints  # [rows] a number shared by the masks of one group of one sequence, -1 for chain rows
    num_chain_rows: int
    num_padded: int
    parts: dict[Hashable, object] = field(default_factory=dict)  # filled on first use, shared by all steps

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """First flat row and number of the chain rows, per sequence."""
        return _bounds(self.chain_runs)

    @cached_property
    def masks(self) -> tuple[Ints, Ints]:
        """First flat row and number of the mask rows, per sequence."""
        return _bounds(self.mask_runs)

    @cached_property
    def owner(self) -> Ints:
        """[rows] sequence of each row."""
        owner = np.empty(len(self.offsets), dtype=np.int64)
        for number, (chain, masks) in enumerate(zip(self.chain_runs, self.mask_runs, strict=True)):
            owner[chain.start : chain.stop] = number
            owner[masks.start : masks.stop] = number
        return owner


def _bounds(runs: Sequence[range]) -> tuple[Ints, Ints]:
    starts = np.array([run.start for run in runs], dtype=np.int64)
    return starts, np.array([len(run) for run in runs], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step: a pattern, and the position and pages of each sequence.

    A row attends the slots of its sequence up to its reach (fewer with a sliding window); a mask row also attends
    itself and the masks before it in its group.
    """

    pattern: RowPattern
    starts: Ints  # [S] position of each sequence's first chain row
    pages: Sequence[Sequence[int] | Ints]  # per sequence: block numbers, position 0 onwards
    block_size: int
    device: torch.device
    parts: dict[Hashable, object] = field(default_factory=dict)  # filled on first use, shared by all layers

    @property
    def chain_runs(self) -> Sequence[range]:
        """Flat row numbers of the chain rows, per sequence."""
        return self.pattern.chain_runs

    @property
    def num_chain_rows(self) -> int:
        """Number of chain rows, which come first and store their keys and values."""
        return self.pattern.num_chain_rows

    @cached_property
    def positions(self) -> Ints:
        """[rows] absolute position."""
        return self.starts[self.pattern.owner] + self.pattern.offsets

    @cached_property
    def written(self) -> Ints:
        """[S] slots that hold keys and values after this step's store."""
        return self.starts + self.pattern.chains[1]

    @cached_property
    def page_table(self) -> Ints:
        """[S, most pages] block numbers, padded with 0; the last step's array if no sequence got a new page.

        Arrays of pages are immutable, so an identical array means identical pages; a list may have grown.
        """
        known = self.pattern.parts.get(_PageTable)
        if isinstance(known, _PageTable) and all(map(is_, known.pages, self.pages)):
            return known.table
        counts = list(map(len, self.pages))
        table = np.zeros((len(counts), max(counts, default=0)), dtype=np.int64)
        for row, pages, count in zip(table, self.pages, counts, strict=True):
            row[:count] = pages
        if all(isinstance(pages, np.ndarray) for pages in self.pages):
            self.pattern.parts[_PageTable] = _PageTable(self.pages, table)
        return table

    def chain_slots(self) -> Ints:
        """Return the slot that each chain row writes: block number · block size + offset in the block."""
        chain = self.pattern.num_chain_rows
        positions = self.positions[:chain]
        blocks = positions // self.block_size
        pages = self.page_table[self.pattern.owner[:chain], blocks]
        return positions + (pages - blocks) * self.block_size


@dataclass(frozen=True, slots=True)
class _PageTable:
    """The page table of the last step with a pattern."""

    pages: Sequence[Sequence[int] | Ints]
    table: Ints
