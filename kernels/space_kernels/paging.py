"""Which rows a step has, and which slots of the paged keys and values each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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

    def page_table(self, num_pages: int) -> Ints:
        """[sequences, num_pages] block numbers; a page that a sequence does not hold reads as block 0, masked later."""
        table = np.zeros((len(self.pages), num_pages), dtype=np.int64)
        for row, pages in zip(table, self.pages, strict=True):
            held = min(len(pages), num_pages)
            row[:held] = pages[:held]
        return table

    def chain_slots(self) -> Ints:
        """[chain rows] the slot each chain row writes: block number · block size + offset in the block."""
        slots = np.empty(self.num_chain_rows, dtype=np.int64)
        for run, pages in zip(self.chain_runs, self.pages, strict=True):
            positions = self.positions[run.start : run.stop]
            blocks, offsets = np.divmod(positions, self.block_size)
            first = int(blocks[0])
            held = np.array(pages[first : int(blocks[-1]) + 1], dtype=np.int64)
            slots[run.start : run.stop] = held[blocks - first] * self.block_size + offsets
        return slots
