"""Compares two models on the same records: the difference of scores with a bootstrap confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 10_000
LEVEL = 0.95
_NUMBERS_AT_ONCE = 200_000  # drawn records in memory at a time: a few MB
Parts = Mapping[str, tuple[float, float]]
"""Numerator and denominator per record; a score is the ratio of their sums (a mean if all denominators are 1)."""


class Finding(StrEnum):
    """Result of a comparison."""

    NO_SIGNAL = "no signal"  # both score 0, so the task shows nothing
    EQUAL = "equal on every record"
    BETTER = "better"
    WORSE = "worse"
    OPEN = "not told apart"  # the interval contains 0
    TOO_FEW = "too few records"  # a single record has no interval


@dataclass(frozen=True)
class ConfidenceInterval:
    """A value and its confidence bounds over records; the bounds are nan for fewer than two records."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """One score of one model on one task."""

    name: str
    parts: Parts
    exponential: bool = False  # the value is exp(ratio): perplexity
    lower_is_better: bool = False

    @property
    def value(self) -> float:
        """The score over all records; nan without any."""
        return float(_figures(self, _array(self, list(self.parts)).sum(axis=0)[None])[0])

    @property
    def has_signal(self) -> bool:
        """Whether any record scores above 0."""
        return any(numerator for numerator, _ in self.parts.values())


def interval(score: Score, *, seed: int = 0) -> ConfidenceInterval:
    """Return the score with its bootstrap interval over records."""
    resampled = _resampled(score, list(score.parts), seed)
    return ConfidenceInterval(score.value, *_bounds(resampled, len(score.parts)))


@dataclass(frozen=True)
class Comparison:
    """`model` minus `base` over their common records."""

    difference: ConfidenceInterval
    finding: Finding
    num_records: int


def compare(model: Score, base: Score, *, seed: int = 0) -> Comparison:
    """Compare with a paired bootstrap: each resample draws records and uses both models' parts of them."""
    keys = [key for key in model.parts if key in base.parts]
    if not keys:
        raise ValueError(f"There is no record that both models did for {model.name}.")
    ours, theirs = _array(model, keys), _array(base, keys)
    totals = [float(_figures(s, n.sum(axis=0)[None])[0]) for s, n in ((model, ours), (base, theirs))]
    low, high = _bounds(_resampled(model, keys, seed) - _resampled(base, keys, seed), len(keys))
    return Comparison(
        ConfidenceInterval(totals[0] - totals[1], low, high), _finding(model, ours, theirs, low, high), len(keys)
    )


def _finding(
    score: Score, ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64], low: float, high: float
) -> Finding:
    if not ours[:, 0].any() and not theirs[:, 0].any():  # Score.has_signal on the common records
        return Finding.NO_SIGNAL
    if np.array_equal(ours, theirs):
        return Finding.EQUAL
    if math.isnan(low):
        return Finding.TOO_FEW
    if low <= 0.0 <= high:
        return Finding.OPEN
    return Finding.BETTER if (low > 0.0) != score.lower_is_better else Finding.WORSE


def _array(score: Score, keys: Sequence[str]) -> npt.NDArray[np.float64]:
    return np.array([score.parts[key] for key in keys], dtype=np.float64).reshape(-1, 2)  # [records, 2]


def _figures(score: Score, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values [N] of numerator and denominator sums [N, 2]."""
    ratios = np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] != 0)
    figures: npt.NDArray[np.float64] = np.exp(ratios) if score.exponential else ratios
    return figures


def _resampled(score: Score, keys: Sequence[str], seed: int) -> npt.NDArray[np.float64]:
    """Return the value of each resample [NUM_RESAMPLES]; equal seed and number of keys draw the same records."""
    numbers = _array(score, keys)
    generator = np.random.default_rng(seed)
    sums = np.empty((NUM_RESAMPLES, 2))
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, len(keys)))
    for first in range(0, NUM_RESAMPLES, at_once):
        count = min(at_once, NUM_RESAMPLES - first)
        drawn = generator.integers(len(keys), size=(count, len(keys)))
        sums[first : first + count] = numbers[drawn].sum(axis=1)  # [count, records, 2] -> [count, 2]
    return _figures(score, sums)


def _bounds(figures: npt.NDArray[np.float64], num_records: int) -> tuple[float, float]:
    if num_records < 2:
        return math.nan, math.nan
    low, high = np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
