"""Log-probabilities that a step on the device reports, for those of its lines that ask: made there, read on the host.

result of a step    [lines · width]    [asking · rows · (1 + 2T)]
                     everybody's        of each row: the chosen id's, the T most probable ids, and theirs
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from space_kernels.sampling.choice import IdLogprobs
from space_kernels.sampling.device_sampling import log_probabilities
from torch import Tensor

MOST_TOP = 20
"""Alternatives per id that a step reports at most; sequences that ask for more are stepped on the host."""

_TOPS = (0, 5, MOST_TOP)
_ASKING = 4
_ROWS_AT_ONCE = 64
"""Rows whose whole vocabulary is sorted at once."""


def num_cells(num_asking: int, num_rows: int, num_top: int) -> int:
    """int32 numbers in a report."""
    return num_asking * num_rows * (1 + 2 * num_top)


def few_tops(num_top: int) -> int:
    """One of three numbers of alternatives that is no smaller: few numbers, so few graphs."""
    return min(top for top in _TOPS if top >= num_top)


def few_asking(count: int, num_lines: int) -> int:
    """How many lines a step reports of where `count` of its lines ask."""
    size = min(count, 1)
    while size < count:
        size *= _ASKING
    return min(size, num_lines)


def report(raw: Tensor, ids: Tensor, num_top: int) -> Tensor:
    """What is to be said of chosen ids, as one list of int32 in which floats stand as their bits.

    raw [A, J, V] logits, ids [A, J] (any where nothing could be chosen) -> [num_cells(A, J, T)]
    """
    V = raw.shape[2]
    rows, chosen = raw.flatten(0, 1), ids.flatten().clamp(0, V - 1)
    parts = []
    for some, of_some in zip(torch.split(rows, _ROWS_AT_ONCE), torch.split(chosen, _ROWS_AT_ONCE), strict=True):
        logprobs, top_ids, top = log_probabilities(some, of_some, num_top)
        bits = logprobs[:, None].view(torch.int32)
        parts.append(torch.cat([bits, top_ids.to(torch.int32), top.contiguous().view(torch.int32)], dim=1))
    return torch.cat(parts).flatten()


class LogprobReport:
    """A report on the host."""

    def __init__(self, cells: Tensor, num_asking: int, num_rows: int) -> None:
        """cells [num_cells(num_asking, num_rows, T)] int32"""
        shape = num_asking, num_rows, -1
        self._ids, self._floats = cells.view(shape).tolist(), cells.view(torch.float32).view(shape).tolist()

    def of(self, number: int, ids: Sequence[int], num_top: int) -> list[IdLogprobs]:
        """Of what the `number`-th of those who ask emitted."""
        width = len(self._ids[number][0]) // 2  # T
        count = min(num_top, width)
        found = []
        for id_, row, floats in zip(ids, self._ids[number], self._floats[number], strict=False):
            top = tuple(floats[1 + width : 1 + width + count])
            found.append(IdLogprobs(id_, floats[0], tuple(row[1 : 1 + count]), top))
        return found
