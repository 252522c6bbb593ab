"""Measured share of a rule's predicted tokens per second: the cost model ignores how speculation starts and ends."""

from __future__ import annotations

import math

from space_server.step_costs.step_cost import OUTLIER

RATE, STEPS, FORGIVEN = 0.2, 96, 0.002
"""How fast the measured share is followed per look, in proportion to sequence steps over STEPS and at most RATE; and
the part of the shortfall that each plain step forgets, so that drafts are tried again.
"""

LEAST, MOST = 0.4, 1.1

PAUSE_RATE, LONGEST_PAUSE = 0.02, 0.005
"""How fast the pause between steps is followed, in which reports go out; longer pauses are not part of stepping."""


class RealizedSpeedup:
    """Compares a rule's predicted rate with what its steps have brought since the last look."""

    def __init__(self) -> None:
        self.share = 1.0  # measured rate over predicted rate
        self.pause = 0.0  # mean seconds between two steps
        self._predicted_rate = 1.0  # predicted tokens per second
        self._predicted_seconds = math.inf  # predicted seconds of a step
        self._tokens, self._seconds = 0, 0.0  # of the steps since then

    def predict(self, rate: float, step_seconds: float) -> None:
        """Set the predicted tokens per second and seconds per step."""
        self._predicted_rate, self._predicted_seconds = rate, step_seconds

    def paused(self, seconds: float) -> None:
        """Record the seconds between two steps."""
        self.pause += PAUSE_RATE * (min(seconds, LONGEST_PAUSE) - self.pause)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Record a step by the rule. Outliers are capped as in the cost model."""
        self._tokens += num_tokens
        self._seconds += min(seconds + self.pause, OUTLIER * self._predicted_seconds)

    def look_back(self, num_steps: int) -> bool:
        """Update the share from the steps since the last look; False if none followed the rule."""
        if not self._seconds:
            return False
        kept = self._tokens / (self._seconds * self._predicted_rate)
        self.share += min(RATE, num_steps / STEPS) * (min(MOST, max(LEAST, kept)) - self.share)
        self._tokens, self._seconds = 0, 0.0
        return True

    def reset(self) -> None:
        """Reset: the machine's speed has changed, so earlier measurements do not apply."""
        self.share = 1.0
        self._tokens, self._seconds = 0, 0.0

    def forgive(self, num_steps: float) -> None:
        """Move the share towards 1 after `num_steps` plain steps."""
        self.share += (1.0 - self.share) * min(1.0, FORGIVEN * num_steps)
