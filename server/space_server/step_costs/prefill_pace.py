"""How far prompt steps are off what they should cost: by how much on average, and how much more is to be feared.

A prompt's steps are all new places, one behind the other, each with more keys than the last: what was wrong of one is
wrong of the next, and whom a step keeps waiting is not helped by its being right on average. So both the mean of the
error and its mean deviation are followed, as TCP follows the time of a round trip to know how long to wait for an
answer (Jacobson, Congestion Avoidance and Control, SIGCOMM 1988), in logarithms: a step is feared to take the mean and
`CAUTION` deviations more. On a quiet machine the deviation shrinks and chunks grow up to the budget; on one whose
speed jumps about it stays large, and chunks small.
"""

from __future__ import annotations

import math

MEAN_RATE, DEVIATION_RATE = 0.25, 0.25
"""How fast the two follow, per step."""

CAUTION = 2.0
"""Deviations beyond the mean that are feared."""

UNTRIED = math.log(1.25)
"""The deviation before anything is known: the first chunk is some two thirds of what should fit."""

MOST = math.log(4.0)
"""An error beyond this, either way, teaches no more than this: the machine was away."""

NEAR, PER_DOUBLING = 256, 0.35
"""Keys behind those that were ever read, and how much more each doubling of them beyond these is feared to cost: nobody
knows which cache they do not fit into. A prompt's own steps never come so far at once; one whose beginning was computed
for somebody else may start there."""


class PrefillPace:
    """Follows prompt steps. Errors are logarithms of measured over expected seconds."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = UNTRIED
        self._farthest = 0.0  # most ids computed before, on average over a step's prompt rows

    def fear(self, num_before: float) -> float:
        """By how much, beyond the mean, a step is feared to be off whose rows have so many ids computed before them."""
        untried = math.log2((num_before + NEAR) / (self._farthest + NEAR))
        return CAUTION * self._deviation + PER_DOUBLING * max(0.0, untried)

    def learn(self, error: float, num_before: float) -> None:
        """A step was off by `error`, the mean not taken into account."""
        beyond = max(-MOST, min(MOST, error)) - self.mean
        self.mean += MEAN_RATE * beyond
        self._deviation += DEVIATION_RATE * (abs(beyond) - self._deviation)
        self._farthest = max(self._farthest, num_before)
