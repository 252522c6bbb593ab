"""Statistics of paired rounds: percentiles, ranges, and confidence bounds of medians."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 4000
"""Enough that another seed moves the bounds by less than 1 % of their distance."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; nan for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)] if ordered else math.nan


def bootstrap(
    values: Sequence[float],
    groups: Sequence[Hashable] = (),
    *,
    share: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Return bounds that contain the median of `share` of the resamples of `values` with replacement.

    The percentile bootstrap (Efron 1979): each resample has as many values as `values`; the remaining share is split
    evenly below and above the bounds. `groups`: the group of each value; values of a group are correlated, so groups
    are drawn first, and then as many values of each as it has.
    """
    source = random.Random(seed)
    grouped: dict[Hashable, list[float]] = {}
    for value, group in zip(values, groups or [0] * len(values), strict=True):
        grouped.setdefault(group, []).append(value)
    kinds = list(grouped.values())

    def drawn() -> list[float]:
        chosen = kinds if len(kinds) == 1 else source.choices(kinds, k=len(kinds))
        return [value for kind in chosen for value in source.choices(kind, k=len(kind))]

    medians = [statistics.median(drawn()) for _ in range(num_resamples)]
    outside = (1 - share) / 2
    return percentile(medians, outside), percentile(medians, 1 - outside)


@dataclass(frozen=True)
class Spread:
    """A median, and the range of the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls.without_tails(values, 0.0)

    @classmethod
    def without_tails(cls, values: Sequence[float], share: float) -> Spread:
        """Leave `share` of the values out of the range on either side."""
        return Spread(statistics.median(values), percentile(values, share), percentile(values, 1 - share))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Ratio(Spread):
    """Median of per-round ratios, and its 95 % bootstrap bounds."""

    num: int  # rounds

    @classmethod
    def of(cls, values: Sequence[float], starts: Sequence[int] = ()) -> Ratio:
        """`starts`: the number of the servers' start that each ratio was measured on."""
        low, high = bootstrap(values, starts)
        return cls(statistics.median(values), low, high, len(values))

    def shown(self, digits: int = 3) -> str:
        """Format with the lower bound first, as claims must be based on it."""
        middle, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{middle} (≥ {low}, ≤ {high})" if self.num > 1 else middle
