"""Measures at load how many rows the output head computes in the time of reading its weights twice.

A step needs logits of its chain rows, and then of the masks of the group that verification selects. Up to so many rows
it is cheaper to compute all masks' logits before verification, because the weights are read only once.

Other load only lengthens a measurement, so the minimum of many is used. Two rows, with which all others are compared,
are timed again next to each; a count that took longer than a larger count was disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UNMEASURED = 64
"""The result on devices that are not measured."""

BASE = 2
"""Number of rows that takes the time of reading the weights."""

TRIED = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Numbers of rows to try."""

WHOLE_ROUNDS, STEADY_ROUNDS, STEADY = 2, 8, 0.01
"""Rounds that time all counts; then rounds that time only the counts at the limit, until so many in a row lower no
minimum by more than this share."""

SECONDS, MOST_SECONDS = 0.3, 1.0
"""Time limits for starting a round: normally, and while minima still fall."""


def head_rows(
    logits: Callable[[Tensor], Tensor],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] | None = None,
) -> int:
    """Return the most rows [R, hidden_size] whose `logits` take at most twice as long as two rows; 0 if none do.

    `clock` in seconds; None: with one thread its CPU time, which other load hardly affects; with several, wall time.
    """
    if device.type != "cpu":
        return UNMEASURED
    if clock is None:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    rows = torch.zeros(max(TRIED), hidden_size, dtype=dtype, device=device)
    logits(rows[:BASE])  # warm-up
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
    """Return the minimum time of this many rows, at most that of larger counts."""
    return min(taken for rows, taken in least.items() if rows >= count)
