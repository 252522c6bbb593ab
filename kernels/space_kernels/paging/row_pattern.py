"""The relative layout of a step's rows: everything that does not change when the sequences advance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

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
