"""Whether drafts that no mask made pay: those of one step together, and reading texts for them at all. Torch-free.

A draft's own price says where a chain of them ends. Whether the first row more pays is another question: a step of as
many rows as sequences is the cheapest there is, and what it costs to leave it is shared by all drafts of the step.
"""

from __future__ import annotations

MARGIN = 1.1
"""How many times what their time is worth the drafts of a step must bring: costs are noisy, and who looks best is often
lucky."""

RETRY = 64
"""Of steps that do not pay, one in so many is taken all the same: what it costs must stay known."""

READING = 5e-6
"""Seconds that reading one more id of a text takes, and proposing: measured, in Python."""

WINDOW, NAP, LONGEST_NAP = 128, 512, 8192
"""Steps over which reading must pay for itself; of a nap, and of the longest: each in a row is twice as long."""


class ProposalWorth:
    """Looks at steps in which nobody drafts from masks."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._saved = self._spent = 0.0  # seconds: by drafts that were taken, and for reading
        self._num_steps = 0  # of the window, or of the nap
        self._nap = NAP  # steps of the next one
        self._size = 0  # sequences when it began
        self.naps = False  # texts are not read

    def pays(self, tokens: float, seconds: float, rate: float) -> bool:
        """Whether a step takes drafts that bring so many `tokens` more and take so many `seconds` more.

        `rate`: tokens per second without them.
        """
        saved = tokens / rate - MARGIN * seconds
        if saved <= 0.0:
            self._num_refused += 1
            if self._num_refused % RETRY:
                return False
        self._saved += saved
        return True

    def stepped(self, num_sequences: int) -> None:
        """A step of so many sequences, whether there were such drafts or not."""
        self._num_steps += 1
        if self.naps:
            if self._num_steps >= self._nap or 2 * num_sequences <= self._size:
                self._nap = min(2 * self._nap, LONGEST_NAP) if self._num_steps >= self._nap else self._nap
                self.wake()
            return
        self._spent += READING * num_sequences
        if self._num_steps < WINDOW:
            return
        if self._saved < self._spent:
            self.naps, self._size = True, num_sequences
        else:
            self._nap = NAP
        self._begin()

    def wake(self) -> None:
        """Texts are read again: somebody drafts from masks, or a nap is over."""
        self.naps = False
        self._begin()

    def _begin(self) -> None:
        self._saved = self._spent = 0.0
        self._num_steps = 0
