"""Estimates of prefill and decode times from the workers' step reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from space_proto import worker_pb2

PAST_WEIGHT = 0.95  # decay of the averages per step
SAFETY_FACTOR = 0.5  # minimum times are this share of the measured ones, so that a faster phase is not ruled out
RECENT = 32  # steps of which the fastest gives the minimum time
MIN_STEPS = 5  # measured steps before a minimum time is claimed
HALF_LIFE = 30.0  # seconds without a step of the kind in which its minimum time halves


class Rate:
    """Seconds per id in steps of one kind: the average and the recent minimum; 0 while unknown."""

    def __init__(self) -> None:
        self._seconds = self._num_ids = 0.0  # decayed sums, so a step is weighted by its ids
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds per id
        self._learnt_at = 0.0

    def learn(self, seconds: float, num_ids: float, now: float, *, full: float = 0.0) -> None:
        """Add a step that took `seconds` for `num_ids` ids.

        `full`: maximum ids of a step. A small step takes mostly fixed time, so as a minimum its time is divided by
        `full`: a full step takes at least as long.
        """
        self._seconds = PAST_WEIGHT * self._seconds + seconds
        self._num_ids = PAST_WEIGHT * self._num_ids + num_ids
        self._recent.append(seconds / max(num_ids, full))
        self._learnt_at = now

    @property
    def average(self) -> float:
        return self._seconds / self._num_ids if self._num_ids else 0.0

    def least(self, now: float) -> float:
        """Return the minimum seconds per id.

        It decays with time: requests rejected because of it run no steps that could correct it.
        """
        if len(self._recent) < MIN_STEPS:
            return 0.0
        return min(self._recent) * math.exp2((self._learnt_at - now) / HALF_LIFE)


class ThroughputEstimator:
    """Estimates the seconds that prompts and outputs take."""

    def __init__(self, max_prefill_rows: int) -> None:
        """`max_prefill_rows`: maximum prompt ids per step."""
        self.prompts = Rate()
        self.tokens = Rate()  # per output token of one sequence
        self._max_prefill_rows = max_prefill_rows

    def learn(self, report: worker_pb2.StepReport, decoded: Sequence[int], now: float) -> None:
        """Add a step. `decoded`: tokens of each decoding sequence; `now`: seconds on the engine's clock."""
        if not report.stepped:
            return
        stats, seconds = report.stats, step_seconds(report.stats)
        if stats.prefill_rows > stats.chain_rows + stats.mask_rows:
            num_rows = stats.prefill_rows + stats.chain_rows + stats.mask_rows
            self.prompts.learn(seconds, num_rows, now, full=self._max_prefill_rows)
        elif given := [number for number in decoded if number]:  # a failed sequence has no tokens
            self.tokens.learn(seconds, sum(given) / len(given), now)

    def seconds(self, num_prompt_ids: int, num_tokens: float) -> float:
        """Return the expected seconds to prefill `num_prompt_ids` and generate `num_tokens`."""
        return num_prompt_ids * self.prompts.average + num_tokens * self.tokens.average

    def least_seconds(self, num_prompt_ids: int, num_tokens: int, now: float) -> float:
        """Return the minimum seconds for the same work."""
        return SAFETY_FACTOR * (num_prompt_ids * self.prompts.least(now) + num_tokens * self.tokens.least(now))


def step_seconds(stats: worker_pb2.StepStats) -> float:
    """Return the duration of a step, all phases together."""
    return stats.forward_seconds + stats.sample_seconds + stats.draft_seconds + stats.host_seconds
