"""The rows of a step and the KV cache slots that each of them sees."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch

from space_kernels.paging.row_pattern import Ints, RowPattern

if TYPE_CHECKING:
    from space_kernels.paging.attention_plan import AttentionPlan
    from space_kernels.paging.bucket_pattern import PlanKey


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
    plans: dict[PlanKey, AttentionPlan] = field(default_factory=dict)  # built on first use, shared by all layers
    parts: dict[Hashable, object] = field(default_factory=dict)  # likewise, for other kernels

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
