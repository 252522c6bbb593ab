"""Which rows a step has, and which slots of the paged keys and values each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from space_kernels.attention_plan import AttentionPlan, PlanKey

Ints = npt.NDArray[np.int64]


# chain rows of all sequences           mask rows of all sequences                    padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ len(positions))      [len(positions) ... num_padded)
#  K, V go to the pages first            K, V live in the step only                    writes nothing, result unused
@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step. Rows of a sequence are two runs: its chain rows, and its mask rows, group after group.

    A row attends the first `visible` slots of its sequence (fewer with a sliding window); a mask row also the masks
    before it in its group, and itself.
    """

    positions: Ints  # [rows] absolute position
    visible: Ints  # [rows] leading slots the row may attend
    chain_runs: Sequence[range]  # per sequence: flat row numbers of its chain rows; positions are consecutive
    mask_runs: Sequence[range]  # per sequence: flat row numbers of its mask rows
    group: Ints  # [rows] a number shared by the masks of one group of one sequence, -1 for chain rows
    pages: Sequence[Sequence[int]]  # per sequence: block numbers, position 0 onwards
    num_chain_rows: int
    num_padded: int
    block_size: int
    device: torch.device
    plans: dict[PlanKey, AttentionPlan] = field(default_factory=dict)  # built on first use, shared by all layers

    @cached_property
    def page_table(self) -> Ints:
        """[sequences, most pages] block numbers; 0 where a sequence holds fewer."""
        table = np.zeros((len(self.pages), max(map(len, self.pages), default=0)), dtype=np.int64)
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = pages
        return table

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """Per sequence: first flat row of its chain, and how many there are."""
        return _bounds(self.chain_runs)

    @cached_property
    def masks(self) -> tuple[Ints, Ints]:
        """Per sequence: first flat row of its masks, and how many there are."""
        return _bounds(self.mask_runs)

    def chain_slots(self) -> Ints:
        """[chain rows] the slot each chain row writes: block number · block size + offset in the block."""
        owner = np.repeat(np.arange(len(self.pages)), self.chains[1])
        blocks, offsets = np.divmod(self.positions[: self.num_chain_rows], self.block_size)
        return self.page_table[owner, blocks] * self.block_size + offsets


def _bounds(runs: Sequence[range]) -> tuple[Ints, Ints]:
    starts = np.array([run.start for run in runs], dtype=np.int64)
    return starts, np.array([len(run) for run in runs], dtype=np.int64)
