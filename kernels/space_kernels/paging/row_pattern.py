"""How a step's rows stand to each other: all that does not change when every sequence moves on by some positions."""

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
    """The rows of a step, with positions counted from the first chain row of their sequence.

    Rows of a sequence are two runs: its chain rows, and its mask rows, group after group. Steps that lay out the same
    have the same pattern, step after step, so what follows from it alone is kept in `parts`.
    """

    chain_runs: Sequence[range]  # per sequence: flat row numbers of its chain rows; positions are consecutive
    mask_runs: Sequence[range]  # per sequence: flat row numbers of its mask rows
    offsets: Ints  # [rows] position behind the sequence's first chain row
    reach: Ints  # [rows] slots from there on that the row may attend: one more than its chain or base row's offset
    group: Ints  # [rows] a number shared by the masks of one group of one sequence, -1 for chain rows
    num_chain_rows: int
    num_padded: int
    parts: dict[Hashable, object] = field(default_factory=dict)  # filled on first use, shared by all steps

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """Per sequence: first flat row of its chain, and how many there are."""
        return _bounds(self.chain_runs)

    @cached_property
    def masks(self) -> tuple[Ints, Ints]:
        """Per sequence: first flat row of its masks, and how many there are."""
        return _bounds(self.mask_runs)

    @cached_property
    def owner(self) -> Ints:
        """[rows] which sequence a row is of."""
        owner = np.empty(len(self.offsets), dtype=np.int64)
        for number, (chain, masks) in enumerate(zip(self.chain_runs, self.mask_runs, strict=True)):
            owner[chain.start : chain.stop] = number
            owner[masks.start : masks.stop] = number
        return owner


def _bounds(runs: Sequence[range]) -> tuple[Ints, Ints]:
    starts = np.array([run.start for run in runs], dtype=np.int64)
    return starts, np.array([len(run) for run in runs], dtype=np.int64)
