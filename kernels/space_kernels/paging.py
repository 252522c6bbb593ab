"""Which rows a step has, which pages they see, and the index arithmetic that finds both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step: chain rows of all sequences first, then mask rows, then padding.

    A row attends the first `visible` slots of its sequence's pages (fewer with a sliding window); a mask row also the
    masks before it in its group, and itself.
    """

    positions: Ints  # [rows] absolute position, padding excluded
    visible: Ints  # [rows] leading slots the row may attend
    owner: Ints  # [rows] number of the row's sequence in `pages`
    num_chain_rows: int  # the first rows: their keys and values go to the pages, at their positions
    groups: Sequence[range]  # the other rows: flat row numbers of every mask group
    pages: Sequence[Sequence[int]]  # per sequence: block numbers, position 0 onwards
    block_size: int
    num_padded: int  # rows with padding
    device: torch.device
    plans: dict[Any, Any] = field(default_factory=dict)  # attention plans of this step, by head counts and window

    def slot_of_chain(self) -> Ints:
        """[chain rows] slot each chain row writes: block number · block size + offset in the block."""
        chain = self.num_chain_rows
        positions, owner = self.positions[:chain], self.owner[:chain]
        blocks = np.empty(chain, dtype=np.int64)
        for number, pages in enumerate(self.pages):
            mine = owner == number
            blocks[mine] = np.asarray(pages, dtype=np.int64)[positions[mine] // self.block_size]
        return blocks * self.block_size + positions % self.block_size
