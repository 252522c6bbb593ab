"""How fast the workers are, as their reports tell."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from space_proto import worker_pb2

MEMORY = 0.95  # weight of the past per step
SURELY = 0.5  # of the time that things take now: nothing is called impossible that a faster hour could do
RECENT = 32  # steps, the fastest of which says what is possible: a slow one among them says nothing
KNOWN = 5  # steps without which nothing is called impossible
FADING = 30.0  # seconds without a step of its kind, in which half of what was sure is forgotten


class Rate:
    """Seconds per id in steps of one kind: on average, and in the fastest of the last ones; 0 while unknown."""

    def __init__(self) -> None:
        self._seconds = self._num_ids = 0.0  # decayed sums: a step counts by the ids that it computes
        self._recent: deque[float] = deque(maxlen=RECENT)  # least seconds per id
        self._learnt_at = 0.0

    def learn(self, seconds: float, num_ids: float, now: float, *, full: float = 0.0) -> None:
        """One more step, that took so long for so many ids. `full`: most ids that fit into one: what a small step
        takes is mostly what any step does, so for many ids it only tells that a full one takes no less.
        """
        self._seconds = MEMORY * self._seconds + seconds
        self._num_ids = MEMORY * self._num_ids + num_ids
        self._recent.append(seconds / max(num_ids, full))
        self._learnt_at = now

    @property
    def average(self) -> float:
        return self._seconds / self._num_ids if self._num_ids else 0.0

    def least(self, now: float) -> float:
        """It fades with time: who is refused on it runs no step, from which something else could be learnt."""
        if len(self._recent) < KNOWN:
            return 0.0
        return min(self._recent) * math.exp2((self._learnt_at - now) / FADING)


class ThroughputEstimator:
    """Seconds that prompts and answers take, learnt from steps."""

    def __init__(self, max_prefill_rows: int) -> None:
        """`max_prefill_rows`: prompt ids that a step computes at most."""
        self.prompts = Rate()
        self.tokens = Rate()  # of one stream
        self._max_prefill_rows = max_prefill_rows

    def learn(self, report: worker_pb2.StepReport, decoded: Sequence[int], now: float) -> None:
        """One more step; `decoded`: tokens of each that decodes in it; `now` in seconds on the engine's clock."""
        if not report.stepped:
            return
        stats, seconds = report.stats, step_seconds(report.stats)
        if stats.prefill_rows > stats.chain_rows + stats.mask_rows:
            num_rows = stats.prefill_rows + stats.chain_rows + stats.mask_rows
            self.prompts.learn(seconds, num_rows, now, full=self._max_prefill_rows)
        elif given := [number for number in decoded if number]:  # who failed got none
            self.tokens.learn(seconds, sum(given) / len(given), now)

    def seconds(self, num_prompt_ids: int, num_tokens: float) -> float:
        """What computing a prompt and generating so many ids takes at this pace."""
        return num_prompt_ids * self.prompts.average + num_tokens * self.tokens.average

    def least_seconds(self, num_prompt_ids: int, num_tokens: int, now: float) -> float:
        """What it surely takes."""
        return SURELY * (num_prompt_ids * self.prompts.least(now) + num_tokens * self.tokens.least(now))


def step_seconds(stats: worker_pb2.StepStats) -> float:
    """How long a step took, all its phases together."""
    return stats.forward_seconds + stats.sample_seconds + stats.draft_seconds + stats.host_seconds
