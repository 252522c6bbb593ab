"""Whether drafts that no mask made pay: those of one step together, and reading texts for them at all. Torch-free.

A draft's own price says where a chain of them ends. Whether the first row more pays is another question: a step of as
many rows as sequences is the cheapest there is, and what it costs to leave it is shared by all drafts of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 1.1
"""How many times what their time is worth the drafts of a step must bring: costs are noisy, and who looks best is often
lucky."""

RETRY = 64
"""Of steps that do not pay, one in so many is taken all the same: what it costs must stay known."""

READING = 40e-6
"""Seconds a step that reading one sequence's text takes, proposing and planning with proposals. Measured with the
embedded model, with and without, in turn: 60e-6 to 90e-6 alone, 43e-6 among 8, 24e-6 among 32, most of it because a
pass over the weights leaves nothing of all that in the cache; in a loop that does nothing else it is 3.4e-6."""

WINDOW, LEAST_STEPS = 64, 8
"""Texts read, one step each, over which that must pay for itself: eight tell in eight steps what one does in all of
these. But not in fewer steps."""

NAP, LONGEST_NAP = 512, 2048
"""Steps of a nap, and of the longest: each in a row is twice as long."""

ASKED_EVERY = 4
"""Steps in which masks draft, of which one is asked what drafts without them would have brought."""

GAIN_RATE = 1 / 128
"""How fast what drafts save is followed, per step: a text or two."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a step's drafts that no mask made bring, and take."""

    tokens: float  # expected, more than without them
    seconds: float  # more than without them
    plain_tokens: float  # of a plain step
    plain_seconds: float

    @property
    def saved(self) -> float:
        """Seconds of plain decoding that its tokens are worth, less those that it takes; below 0 if it does not pay."""
        return self.tokens * self.plain_seconds / self.plain_tokens - MARGIN * self.seconds


class LookupPolicy:
    """Follows a crowd's steps."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._gain = 0.0  # seconds saved per second of plain decoding
        self._saved = self._spent = 0.0  # seconds of this window: by drafts that were taken, and for reading
        self._num_steps = self._num_readings = 0  # of the window
        self._num_left = 0  # steps of the nap
        self._nap = NAP  # steps of the next one
        self._size = 0  # sequences when it began
        self.naps = False  # texts are not read
        self._num_by_masks = 0  # steps in which masks drafted

    @property
    def gain(self) -> float:
        """By what share plain decoding with such drafts is faster than without, as it went of late."""
        return 0.0 if self.naps else self._gain

    @property
    def asks(self) -> bool:
        """Whether it wants to know what this step, in which masks draft, could have had without them."""
        return self._num_by_masks % ASKED_EVERY == 0

    def stepped(self, num_sequences: int, num_read: int, *, by_masks: bool) -> None:
        """A step begins, in which the texts of `num_read` can be read. `by_masks`: others' masks draft beside."""
        self._gain -= GAIN_RATE * self._gain
        self._num_by_masks += by_masks
        self._num_left = max(0, self._num_left - 1)
        # Of few, each one's drafts cost less.
        self.naps = not by_masks and self._num_left > 0 and 2 * num_sequences > self._size
        if self.naps or by_masks or not num_read:
            return
        self._spent += READING * num_read
        self._num_steps += 1
        self._num_readings += num_read
        if self._num_readings < WINDOW or self._num_steps < LEAST_STEPS:
            return
        if self._saved < self._spent:
            self.naps, self._size, self._num_left = True, num_sequences, self._nap
            self._nap = min(2 * self._nap, LONGEST_NAP)
        elif not self._num_left:  # else these are few, and the many nap on
            self._nap = NAP
        self._saved = self._spent = 0.0
        self._num_steps = self._num_readings = 0

    def pays(self, offer: Offer) -> bool:
        """Whether a step takes it, where no masks draft."""
        if offer.saved <= 0.0:
            self._num_refused += 1
            if self._num_refused % RETRY:
                return False
        self._saved += offer.saved
        self._gain += GAIN_RATE * offer.saved / offer.plain_seconds
        return True

    def would_pay(self, offer: Offer) -> None:
        """What a step that `asks` could have had without masks; it stands for those between."""
        self._gain += ASKED_EVERY * GAIN_RATE * max(0.0, offer.saved) / offer.plain_seconds
