"""Log-probabilities that a device step reports: computed on the device, read on the host.

result of a step    [batch size · width]    [sequences with logprobs · rows · (1 + 2T)]
                     of every sequence       of each row: the sampled id's, the T most probable ids, and theirs
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from space_kernels.sampling.choice import IdLogprobs
from space_kernels.sampling.device_sampling import log_probabilities
from torch import Tensor

MOST_TOP = 20
"""Most alternatives per id in a device step; sequences that want more are stepped on the host."""

_TOPS = (0, 5, MOST_TOP)
_ASKING = 4
_ROWS_AT_ONCE = 64
"""Rows whose whole vocabulary is sorted at once."""


def num_cells(num_with_logprobs: int, num_rows: int, num_top: int) -> int:
    """Return the number of int32 values in a report."""
    return num_with_logprobs * num_rows * (1 + 2 * num_top)


def round_up_top(num_top: int) -> int:
    """Round the number of alternatives up to one of three sizes: few sizes, few graphs."""
    return min(top for top in _TOPS if top >= num_top)


def round_up_count(count: int, batch_size: int) -> int:
    """Round the number of sequences that want log-probabilities up to a power of 4, at most `batch_size`."""
    size = min(count, 1)
    while size < count:
        size *= _ASKING
    return min(size, batch_size)


def report(raw: Tensor, ids: Tensor, num_top: int) -> Tensor:
    """Return log-probabilities of sampled ids as a flat int32 tensor that holds floats as their bits.

    raw [A, J, V] logits, ids [A, J] (any value where nothing was sampled) -> [num_cells(A, J, T)]
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
    """A report, decoded on the host."""

    def __init__(self, cells: Tensor, num_with_logprobs: int, num_rows: int) -> None:
        """cells [num_cells(num_asking, num_rows, T)] int32"""
        shape = num_with_logprobs, num_rows, -1
        self._ids, self._floats = cells.view(shape).tolist(), cells.view(torch.float32).view(shape).tolist()

    def of(self, number: int, ids: Sequence[int], num_top: int) -> list[IdLogprobs]:
        """Return those of the ids that the `number`-th sequence with log-probabilities emitted."""
        width = len(self._ids[number][0]) // 2  # T
        count = min(num_top, width)
        found = []
        for id_, row, floats in zip(ids, self._ids[number], self._floats[number], strict=False):
            top = tuple(floats[1 + width : 1 + width + count])
            found.append(IdLogprobs(id_, floats[0], tuple(row[1 : 1 + count]), top))
        return found
