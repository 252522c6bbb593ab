"""How many rows the output head takes at the price of reading its weights twice: measured where a model is loaded.

A step needs logits of its chain rows, and then of the masks of the one group that the verdict selected. Up to so many
rows it is cheaper to have them of all masks at once, before the verdict: the weights are read a single time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

UNMEASURED = 64
"""Of a device that rows cost nothing for as long."""

TRIED = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of rows."""

ROUNDS, SECONDS = 5, 0.3
"""Of measuring: the least of so many counts, and no more is begun behind the seconds."""


def head_rows(
    logits: Callable[[Tensor], Tensor],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Most rows [R, hidden_size] whose `logits` take no longer than twice those of two; 0: not even few do."""
    if device.type != "cpu":
        return UNMEASURED
    rows = torch.zeros(max(TRIED), hidden_size, dtype=dtype, device=device)
    logits(rows[:2])  # the first one is slow
    least: dict[int, float] = {}
    begun = clock()
    for _ in range(ROUNDS):
        for count in (2, *TRIED):
            started = clock()
            logits(rows[:count])
            ended = clock()
            least[count] = min(least.get(count, ended - started), ended - started)
            if count > 2 and least[count] > 3.0 * least[2]:
                break
        if clock() - begun > SECONDS:
            break
    fit = 0
    for count in TRIED:
        if least.get(count, float("inf")) > 2.0 * least[2]:
            break
        fit = count
    return fit
