"""Tracks by how much prefill steps miss their expected duration, on average and at worst.

A prompt's chunks have shapes never seen before, each with more keys than the last, so errors repeat from one chunk to
the next, and an estimate that is right on average does not help the sequences that wait. So both the mean error and its
mean deviation are tracked in logarithms, as TCP does for round-trip times (Jacobson, Congestion Avoidance and Control,
SIGCOMM 1988); the bound is the mean plus `CAUTION` deviations. On a quiet machine the deviation shrinks and chunks grow
up to the budget; on a noisy one it stays large, and chunks small.
"""

from __future__ import annotations

import math

MEAN_RATE, DEVIATION_RATE = 0.25, 0.25
"""Rates of the two moving averages, per step."""

CAUTION = 2.0
"""Deviations added to the mean for the bound."""

UNTRIED = math.log(1.25)
"""Initial deviation: the first chunk is some two thirds of what should fit."""

MOST = math.log(4.0)
"""Bound on the error of one step, either way: larger ones are interruptions of the machine."""

NEAR, PER_DOUBLING = 256, 0.35
"""Ids added to both lengths, and the extra log cost per doubling of the prefix beyond the longest measured one: its
keys may not fit a cache. Only a prompt whose prefix is cached can start so far out.
"""


class PrefillPace:
    """Tracks prefill steps. Errors are logarithms of measured over expected seconds."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = UNTRIED
        self._farthest = 0.0  # longest prefix measured, averaged over a step's prompt rows

    def fear(self, num_before: float) -> float:
        """Return the log margin, beyond the mean, of a step whose rows have `num_before` computed ids before them."""
        untried = math.log2((num_before + NEAR) / (self._farthest + NEAR))
        return CAUTION * self._deviation + PER_DOUBLING * max(0.0, untried)

    def learn(self, error: float, num_before: float) -> None:
        """Record a step that missed its expectation by `error`, not counting the mean."""
        beyond = max(-MOST, min(MOST, error)) - self.mean
        self.mean += MEAN_RATE * beyond
        self._deviation += DEVIATION_RATE * (abs(beyond) - self._deviation)
        self._farthest = max(self._farthest, num_before)
