"""How many rows the output head takes at the price of reading its weights twice: measured where a model is loaded.

A step needs logits of its chain rows, and then of the masks of the one group that the verdict selected. Up to so many
rows it is cheaper to have them of all masks at once, before the verdict: the weights are read a single time.

Other work on the machine only ever adds to a time, so the least of many counts. Two rows, which all others are held
against, are timed anew beside each of them, and rows that took longer than more rows did were disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UNMEASURED = 64
"""Of a device that rows cost nothing for as long."""

BASE = 2
"""Rows whose time is that of reading the weights."""

TRIED = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of rows."""

WHOLE_ROUNDS, STEADY_ROUNDS, STEADY = 2, 8, 0.01
"""Of measuring all of them; then of measuring those at the border alone, until so many have made no least time smaller
by more than this share."""

SECONDS, MOST_SECONDS = 0.3, 1.0
"""After which no round is begun: on a quiet machine, and where times still fall."""


def head_rows(
    logits: Callable[[Tensor], Tensor],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] | None = None,
) -> int:
    """Most rows [R, hidden_size] whose `logits` take no longer than twice those of two; 0: not even few do.

    `clock`, in seconds: None takes the processor time of this thread where it works alone, which other work hardly
    changes, and the wall's where there are several.
    """
    if device.type != "cpu":
        return UNMEASURED
    if clock is None:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    rows = torch.zeros(max(TRIED), hidden_size, dtype=dtype, device=device)
    logits(rows[:BASE])  # the first one is slow
    least: dict[int, float] = {}
    begun, num_rounds, last_fall = clock(), 0, 0
    tried: Sequence[int] = TRIED
    while num_rounds < WHOLE_ROUNDS + STEADY_ROUNDS or num_rounds - last_fall < STEADY_ROUNDS:
        for count in (number for one in tried for number in (BASE, one)):
            started = clock()
            logits(rows[:count])
            taken = clock() - started
            if taken < (1.0 - STEADY) * least.get(count, math.inf):
                last_fall = num_rounds
            least[count] = min(least.get(count, taken), taken)
        num_rounds += 1
        fitting = [count for count in TRIED if _at_most(least, count) <= 2.0 * least[BASE]]
        if num_rounds >= WHOLE_ROUNDS:
            tried = [*fitting[-1:], *TRIED[len(fitting) : len(fitting) + 1]]
        if clock() - begun > (MOST_SECONDS if last_fall + 2 > num_rounds - WHOLE_ROUNDS else SECONDS):
            break
    return max(fitting, default=0)


def _at_most(least: dict[int, float], count: int) -> float:
    """The least that so many rows took: no longer than more rows did."""
    return min(taken for rows, taken in least.items() if rows >= count)
