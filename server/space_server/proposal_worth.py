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

READING = 15e-6
"""Seconds a step that reading one sequence's text takes, proposing and planning with proposals. Measured with 8 and 32
sequences of the embedded model, with and without, in turn; read alone, in a loop that does nothing else, 3.4e-6."""

WINDOW, NAP, LONGEST_NAP = 64, 512, 2048
"""Steps over which reading must pay for itself; of a nap, and of the longest: each in a row is twice as long."""


class ProposalWorth:
    """Looks at steps in which nobody drafts from masks."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._saved = self._spent = 0.0  # seconds of this window: by drafts that were taken, and for reading
        self._num_steps = 0  # of the window
        self._num_left = 0  # steps of the nap
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
        self._num_left = max(0, self._num_left - 1)
        self.naps = self._num_left > 0 and 2 * num_sequences > self._size  # of few, each one's drafts cost less
        if self.naps:
            return
        self._spent += READING * num_sequences
        self._num_steps += 1
        if self._num_steps < WINDOW:
            return
        if self._saved < self._spent:
            self.naps, self._size, self._num_left = True, num_sequences, self._nap
            self._nap = min(2 * self._nap, LONGEST_NAP)
        elif not self._num_left:  # else these are few, and the many nap on
            self._nap = NAP
        self._saved = self._spent = 0.0
        self._num_steps = 0

    def wake(self) -> None:
        """Somebody drafts from masks: texts are read beside."""
        self.naps = False
