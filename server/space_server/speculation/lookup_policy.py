"""Decides whether drafts from no mask save time, per step, and whether to read texts for them at all. Torch-free.

A draft's own price ends a chain of drafts. The first extra row is a separate question: a step with one row per
sequence is the cheapest kernel shape, and the cost of leaving it is shared by all drafts of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 1.1
"""The drafts' tokens must be worth so many times the time they take: costs are noisy, and the best estimate is often
too good.
"""

RETRY = 64
"""One in so many steps that do not save time is run anyway, so that its cost stays known."""

READING = 40e-6
"""Seconds per step for reading one sequence's text, proposing, and planning with proposals. Measured with the embedded
model, with and without, in turn: 60e-6 to 90e-6 alone, 43e-6 among 8, 24e-6 among 32. Most of it is cache misses after
a pass over the weights; in a loop that does nothing else it is 3.4e-6.
"""

WINDOW, LEAST_STEPS = 64, 8
"""Readings (one text, one step) over which they must save what they cost, and the least number of steps for that."""

PAUSE_STEPS, LONGEST_PAUSE_STEPS = 512, 2048
"""Steps of the first pause, and of the longest: each in a row is twice as long."""

ASKED_EVERY = 4
"""One in so many steps with mask drafts also estimates what drafts without masks would have saved."""

GAIN_RATE = 1 / 128
"""Rate, per step, of the moving average of what drafts save."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Expected gain and cost of a step's drafts that no mask made."""

    tokens: float  # expected, beyond those of a plain step
    seconds: float  # beyond those of a plain step
    plain_tokens: float  # of a plain step
    plain_seconds: float

    @property
    def saved(self) -> float:
        """Seconds of plain decoding that the tokens are worth, less those they take; negative if drafts slow down."""
        return self.tokens * self.plain_seconds / self.plain_tokens - MARGIN * self.seconds


class LookupPolicy:
    """Tracks the steps of a batch."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._gain = 0.0  # seconds saved per second of plain decoding
        self._saved = self._spent = 0.0  # seconds in this window: saved by drafts, spent reading
        self._num_steps = self._num_readings = 0  # of the window
        self._num_left = 0  # steps left of the pause
        self._next_pause = PAUSE_STEPS  # steps of the next pause
        self._size = 0  # sequences when the pause began
        self.is_paused = False  # texts are not read while paused
        self._num_by_masks = 0  # steps in which masks drafted

    @property
    def gain(self) -> float:
        """Recent share by which such drafts speed up plain decoding."""
        return 0.0 if self.is_paused else self._gain

    @property
    def asks(self) -> bool:
        """Whether this step, in which masks draft, should estimate drafts without masks."""
        return self._num_by_masks % ASKED_EVERY == 0

    def stepped(self, num_sequences: int, num_read: int, *, by_masks: bool) -> None:
        """Start a step in which `num_read` texts can be read. `by_masks`: masks draft in it, too."""
        self._gain -= GAIN_RATE * self._gain
        self._num_by_masks += by_masks
        self._num_left = max(0, self._num_left - 1)
        # A batch of half the size resumes: there drafts cost less.
        self.is_paused = not by_masks and self._num_left > 0 and 2 * num_sequences > self._size
        if self.is_paused or by_masks or not num_read:
            return
        self._spent += READING * num_read
        self._num_steps += 1
        self._num_readings += num_read
        if self._num_readings < WINDOW or self._num_steps < LEAST_STEPS:
            return
        if self._saved < self._spent:
            self.is_paused, self._size, self._num_left = True, num_sequences, self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE_STEPS)
        elif not self._num_left:  # else this smaller batch resumed early, and the pause still holds for the larger
            self._next_pause = PAUSE_STEPS
        self._saved = self._spent = 0.0
        self._num_steps = self._num_readings = 0

    def pays(self, offer: Offer) -> bool:
        """Whether a step without mask drafts should verify this offer."""
        if offer.saved <= 0.0:
            self._num_refused += 1
            if self._num_refused % RETRY:
                return False
        self._saved += offer.saved
        self._gain += GAIN_RATE * offer.saved / offer.plain_seconds
        return True

    def would_pay(self, offer: Offer) -> None:
        """Record an estimate made because of `asks`; it stands for the steps in between."""
        self._gain += ASKED_EVERY * GAIN_RATE * max(0.0, offer.saved) / offer.plain_seconds
