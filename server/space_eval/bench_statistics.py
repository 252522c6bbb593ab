"""The statistics of paired rounds: percentiles, and how sure a median is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 4000
"""Enough that the bounds move by less than 1 % of their distance from one seed to another."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)] if ordered else math.nan


def bootstrap(
    values: Sequence[float], *, share: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The bounds within which the median lies in `share` of the samples drawn from `values` with replacement.

    The percentile bootstrap (Efron 1979): each resample has as many values as there are; half of what is left out lies
    below the lower bound and half above the upper one.
    """
    source = random.Random(seed)
    medians = [statistics.median(source.choices(values, k=len(values))) for _ in range(num_resamples)]
    outside = (1 - share) / 2
    return percentile(medians, outside), percentile(medians, 1 - outside)


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, each of one round, and its 95 % bootstrap bounds."""

    median: float
    low: float
    high: float
    num: int  # rounds

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        low, high = bootstrap(ratios)
        return cls(statistics.median(ratios), low, high, len(ratios))

    def shown(self) -> str:
        """With its lower bound first, which is what a promise is held to."""
        return f"{self.median:.3f} (≥ {self.low:.3f}, ≤ {self.high:.3f})" if self.num > 1 else f"{self.median:.3f}"
