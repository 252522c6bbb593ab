"""How much of the tokens per second that a rule promises comes true: beginnings and ends are in no cost model."""

from __future__ import annotations

import math

from space_server.step_costs.step_cost import OUTLIER

RATE, STEPS, FORGIVEN = 0.2, 96, 0.002
"""How fast the share that came true is followed, per look: as the steps of sequences since the last one are to so many,
for one text is no rule, and no faster than the first; and how much of what is missing is forgotten in each step of
plain decoding, so that drafts are tried again.
"""

LEAST, MOST = 0.4, 1.1

PAUSE_RATE, LONGEST_PAUSE = 0.02, 0.005
"""How fast the pauses between steps are followed, in which reports go out and the host has its turn; longer ones are no
part of stepping.
"""


class RealizedSpeedup:
    """What a rule promised at the last look, and what its steps have brought since."""

    def __init__(self) -> None:
        self.share = 1.0  # of what is promised, what comes true
        self.pause = 0.0  # between two steps: what every step costs beside itself
        self._promised = 1.0  # tokens per second, as they were reckoned
        self._usual = math.inf  # seconds of a step, as they were reckoned
        self._tokens, self._seconds = 0, 0.0  # of its steps since then

    def give(self, rate: float, step_seconds: float) -> None:
        """From now on so many tokens per second are expected, in steps of so many seconds."""
        self._promised, self._usual = rate, step_seconds

    def paused(self, seconds: float) -> None:
        """So long it was from one step to the next."""
        self.pause += PAUSE_RATE * (min(seconds, LONGEST_PAUSE) - self.pause)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step by the rule. What costs are learnt from leaves out as much of a hiccup."""
        self._tokens += num_tokens
        self._seconds += min(seconds + self.pause, OUTLIER * self._usual)

    def look_back(self, num_steps: int) -> bool:
        """Follow what came true in the steps of so many sequences; False: there was none by the rule."""
        if not self._seconds:
            return False
        kept = self._tokens / (self._seconds * self._promised)
        self.share += min(RATE, num_steps / STEPS) * (min(MOST, max(LEAST, kept)) - self.share)
        self._tokens, self._seconds = 0, 0.0
        return True

    def begin_anew(self) -> None:
        """The machine has turned slower or faster: what came true was of another one."""
        self.share = 1.0
        self._tokens, self._seconds = 0, 0.0

    def forgive(self, num_steps: float) -> None:
        """So many plain steps have passed."""
        self.share += (1.0 - self.share) * min(1.0, FORGIVEN * num_steps)
