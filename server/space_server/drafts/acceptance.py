"""Acceptance probability of drafts: a profile shared by all sequences, and one sequence's deviation from it. Torch-
free.

p_j is the probability that draft j is accepted, given that those before it are. The shape holds p_1, p_2, … as decayed
averages over all verified drafts. A sequence differs from it by one number, a shift of all log-odds that follows its
own verified drafts; with few of them it stays near the average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from space_model.model_facts import ModelFacts

TYPICAL = (0.70, 0.65, 0.62, 0.60, 0.58, 0.57, 0.56, 0.55)
"""p_1, p_2, … of an unknown checkpoint; deeper drafts use the last."""

PRIOR_WEIGHT = 40.0  # verified drafts that the prior counts for
SHAPE_MEMORY = 0.998  # decay per verified draft: the shape follows about the last 500
STEP = 0.06  # change of a sequence's log-odds per verified draft and unit of surprise
FORGET = 0.004
"""Share of a sequence's shift forgotten at each of its steps, so that a sequence without drafts is tried again."""

LEVELS_PER_UNIT = 2
MOST_LEVEL = 8  # shifts are rounded to halves of a unit of log-odds, up to 4 either way
SNAPSHOT_EVERY, EARLY = 200, (16, 48, 100)
"""Verified drafts between two snapshots of the shape, and the counts of the first ones, while the prior fades."""

_LEAST, _MOST = 0.02, 0.98


class AcceptanceShape:
    """p_1, p_2, … of a model's masks, or of another draft source, over all sequences."""

    def __init__(self, prior: Sequence[float] = TYPICAL, num_drafts: int = len(TYPICAL)) -> None:
        """`prior`: p_1, p_2, … from the checkpoint's card."""
        self.prior = prior
        filled = [prior[min(j, len(prior) - 1)] for j in range(num_drafts)]
        self._accepted = [PRIOR_WEIGHT * min(max(p, _LEAST), _MOST) for p in filled]
        self._verified = [PRIOR_WEIGHT] * num_drafts
        self._num_learnt = 0
        self._take_snapshot()

    @property
    def num_drafts(self) -> int:
        """Depths with a probability of their own."""
        return len(self._verified)

    @property
    def snapshot(self) -> tuple[float, ...]:
        """Log-odds of p_1, p_2, … rounded to a quarter and at most `SNAPSHOT_EVERY` drafts old, so that results
        computed from them can be cached.
        """
        return self._snapshot

    def log_odds(self, depth: int) -> float:
        """Return the log-odds of p_depth; depths count from 1, and those beyond the last equal it."""
        p = self.mean(depth)
        return math.log(p / (1.0 - p))

    def mean(self, depth: int) -> float:
        """Return p_depth over all sequences, kept away from 0 and 1."""
        at = min(depth, len(self._verified)) - 1
        p = self._accepted[at] / self._verified[at]
        return _LEAST if p < _LEAST else min(p, _MOST)

    def learn(self, depth: int, accepted: bool) -> float:
        """Record one verified draft; return p_depth as it was before, kept away from 0 and 1."""
        at = min(depth, len(self._verified)) - 1
        num_accepted, num_verified = self._accepted[at], self._verified[at]
        self._accepted[at] = SHAPE_MEMORY * num_accepted + accepted
        self._verified[at] = SHAPE_MEMORY * num_verified + 1.0
        self._num_learnt += 1
        if self._num_learnt % SNAPSHOT_EVERY == 0 or self._num_learnt in EARLY:
            self._take_snapshot()
        p = num_accepted / num_verified
        return _LEAST if p < _LEAST else min(p, _MOST)

    def _take_snapshot(self) -> None:
        self._snapshot = tuple(round(4 * self.log_odds(j)) / 4 for j in range(1, self.num_drafts + 1))


class Acceptance:
    """Acceptance probabilities of one sequence's drafts from one source."""

    __slots__ = ("shape", "shift")

    def __init__(self, shape: AcceptanceShape) -> None:
        self.shape = shape
        self.shift = 0.0  # of all log-odds

    @property
    def level(self) -> int:
        """The rounded shift: sequences of one level are treated alike."""
        return max(-MOST_LEVEL, min(MOST_LEVEL, round(LEVELS_PER_UNIT * self.shift)))

    def step(self, first_depth: int, num_verified: int, num_accepted: int) -> None:
        """Record one step's drafts of depth first_depth, first_depth+1, …, of which `num_accepted` were accepted."""
        shift = (1.0 - FORGET) * self.shift
        if num_verified:
            against = math.exp(-shift)  # what the odds of a rejection are multiplied by
            for number in range(min(num_accepted + 1, num_verified)):
                accepted = number < num_accepted
                p = self.shape.learn(first_depth + number, accepted)
                shift += STEP * (accepted - p / (p + (1.0 - p) * against))
        self.shift = shift


def shapes_by_adapter(facts: ModelFacts) -> dict[int | None, AcceptanceShape]:
    """Return a shape for the checkpoint's own masks (None) and for each adapter's, with the priors of their cards."""
    known: dict[int | None, tuple[tuple[float, ...], int]] = {None: (facts.acceptance, facts.num_masks)}
    known |= {number: (adapter.acceptance, adapter.num_masks) for number, adapter in enumerate(facts.adapters)}
    return {number: AcceptanceShape(prior or TYPICAL, max(1, masks)) for number, (prior, masks) in known.items()}
