"""The statistics of paired rounds: percentiles, ranges, and how sure a median is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 4000
"""Enough that the bounds move by less than 1 % of their distance from one seed to another."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan of none."""
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
    """The bounds within which the median lies in `share` of the samples drawn from `values` with replacement.

    The percentile bootstrap (Efron 1979): each resample has as many values as there are; half of what is left out lies
    below the lower bound and half above the upper one. `groups`, one for each value: values of one have something in
    common, so that groups are drawn first, and then as many values of each as it has.
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
    """The middle of several rounds, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, each of one round, and its 95 % bootstrap bounds."""

    median: float
    low: float
    high: float
    num: int  # rounds

    @classmethod
    def of(cls, ratios: Sequence[float], starts: Sequence[int] = ()) -> Ratio:
        """`starts`: of each, which start of the servers it was measured on."""
        low, high = bootstrap(ratios, starts)
        return cls(statistics.median(ratios), low, high, len(ratios))

    def shown(self) -> str:
        """With its lower bound first, which is what a promise is held to."""
        return f"{self.median:.3f} (≥ {self.low:.3f}, ≤ {self.high:.3f})" if self.num > 1 else f"{self.median:.3f}"
