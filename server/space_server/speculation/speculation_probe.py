"""Short spells of drafting where it is expected not to pay: a cost that was measured in a bad moment would keep plain
decoding for ever, and nobody would learn better.
"""

from __future__ import annotations

import math

STEPS, AFTER, SELDOM, WORTH, FORGOTTEN = 16, 192, 6144, 0.92, 0.9
"""Steps of a trial; plain steps before one; before one at most, where each ends plainly and the next waits twice as
long; the share of plain decoding that drafting must be expected to bring; and what is left of that waiting with each
look at which drafting pays.
"""

DOUBTED = 4
"""Trials of what looks too dear, where what it costs is doubted."""


class SpeculationProbe:
    """When one begins, and whether it still runs."""

    def __init__(self) -> None:
        self._num_left = 0  # steps of the one under way
        self._wait = AFTER  # plain steps before the next one
        self._num_doubted = 0  # trials to come that drafting gets however dear it looks

    @property
    def rarity(self) -> float:
        """How many times as long as at first the next one waits."""
        return self._wait / AFTER

    def is_due(self, worth: float, num_plain: int) -> bool:
        """Whether to begin, after so many plain steps, where drafting is expected to bring this share of plain.

        Where costs are doubted, what looks k times too dear is tried k² times as seldom: it costs less the worse it
        looks, but it is tried.
        """
        rarer = 1.0 if worth > WORTH else (WORTH / worth) ** 2 if self._num_doubted and worth > 0.0 else math.inf
        return num_plain >= rarer * self._wait

    def begin(self) -> None:
        """Draft for some steps, whatever is expected."""
        self._num_left = STEPS
        self._num_doubted = max(0, self._num_doubted - 1)

    def doubt(self) -> None:
        """The machine has turned slower or faster, or what steps cost was measured beside other work: what is expected
        and what trials have shown was of another machine.
        """
        self._num_doubted, self._wait = DOUBTED, AFTER

    def goes_on(self, num_steps: int) -> bool:
        """Whether it is not over yet, so many steps later."""
        self._num_left = max(0, self._num_left - num_steps)
        return self._num_left > 0

    def failed(self) -> None:
        """Drafting did not pay."""
        self._num_left, self._wait = 0, min(2 * self._wait, SELDOM)

    def paid(self) -> None:
        """Drafting pays."""
        self._num_left, self._wait = 0, max(AFTER, int(FORGOTTEN * self._wait))
