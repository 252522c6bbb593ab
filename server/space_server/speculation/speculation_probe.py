"""Short trials of drafting where it is expected to be slower: without them one cost measured in a bad moment would keep
plain decoding for good.
"""

from __future__ import annotations

import math

STEPS, AFTER, SELDOM, WORTH, FORGOTTEN = 16, 192, 6144, 0.92, 0.9
"""Steps of a trial; plain steps before the first; most plain steps between trials, whose distance doubles after each
failure; the share of plain decoding that drafting must be expected to bring; and the factor by which each look at
which drafting is faster shortens the distance.
"""

DOUBTED = 4
"""Trials of drafting that looks too slow, after its measured cost became doubtful."""


class SpeculationProbe:
    """Schedules the trials."""

    def __init__(self) -> None:
        self._num_left = 0  # steps left of the running trial
        self._wait = AFTER  # plain steps before the next trial
        self._num_doubted = 0  # trials left that run however slow drafting looks

    @property
    def rarity(self) -> float:
        """How many times the first distance the next trial waits."""
        return self._wait / AFTER

    def is_due(self, worth: float, num_plain: int) -> bool:
        """Whether to start a trial after `num_plain` plain steps, if drafting is expected to bring `worth` of plain
        decoding.

        Where costs are doubted, drafting that looks k times too slow is tried k² times as rarely.
        """
        rarer = 1.0 if worth > WORTH else (WORTH / worth) ** 2 if self._num_doubted and worth > 0.0 else math.inf
        return num_plain >= rarer * self._wait

    def begin(self) -> None:
        """Start a trial."""
        self._num_left = STEPS
        self._num_doubted = max(0, self._num_doubted - 1)

    def doubt(self) -> None:
        """Discard what trials have shown: the machine's speed changed, or its costs were measured beside other work."""
        self._num_doubted, self._wait = DOUBTED, AFTER

    def goes_on(self, num_steps: int) -> bool:
        """Whether the trial still runs after `num_steps` more steps."""
        self._num_left = max(0, self._num_left - num_steps)
        return self._num_left > 0

    def failed(self) -> None:
        """Record that drafting was slower."""
        self._num_left, self._wait = 0, min(2 * self._wait, SELDOM)

    def paid(self) -> None:
        """Record that drafting is faster."""
        self._num_left, self._wait = 0, max(AFTER, int(FORGOTTEN * self._wait))
