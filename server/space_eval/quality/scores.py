"""Scores of answers against references and against the base model: ROUGE-L, pass@k, agreement."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from space_eval.plots import Bar, PlotError, bar_plot
from space_eval.report import columns_table, markdown_facts

_NO_WORD = re.compile(r"[^a-z0-9]+")


def words(text: str) -> list[str]:
    """Return the text's words."""
    return [word for word in _NO_WORD.split(text.lower()) if word]


def rouge_l(reference: str, candidate: str) -> float:
    """Return the F-measure of the longest common subsequence of both texts' words, 0 to 1."""
    wanted, given = words(reference), words(candidate)
    return _f_measure(len(_lcs_positions(wanted, given)), len(wanted), len(given))


def rouge_l_sum(reference: str, candidate: str) -> float:
    """Return the summary-level F-measure: sentences are lines; each reference line scores the union of its common
    subsequences with all candidate lines, with each word occurrence used at most once on either side."""
    wanted, given = ([words(line) for line in text.split("\n") if line] for text in (reference, candidate))
    left_wanted, left_given = (Counter(word for line in lines for word in line) for lines in (wanted, given))
    num_common = 0
    for line in wanted:
        in_union = sorted({at for other in given for at in _lcs_positions(line, other)})
        for word in (line[at] for at in in_union):
            if left_wanted[word] > 0 and left_given[word] > 0:
                num_common += 1
                left_wanted[word] -= 1
                left_given[word] -= 1
    return _f_measure(num_common, sum(map(len, wanted)), sum(map(len, given)))


def _f_measure(num_common: int, num_wanted: int, num_given: int) -> float:
    """Return the harmonic mean of recall (common / wanted) and precision (common / given)."""
    return 2 * num_common / (num_wanted + num_given) if num_common else 0.0


def _lcs_positions(reference: Sequence[str], candidate: Sequence[str]) -> list[int]:
    """Return the positions in `reference` of one longest common subsequence; ties move back in the reference first, as
    in the reference implementation."""
    num_rows, num_columns = len(reference), len(candidate)
    table = [[0] * (num_columns + 1) for _ in range(num_rows + 1)]
    for i in range(1, num_rows + 1):
        for j in range(1, num_columns + 1):
            same = reference[i - 1] == candidate[j - 1]
            table[i][j] = table[i - 1][j - 1] + 1 if same else max(table[i - 1][j], table[i][j - 1])
    found: list[int] = []
    i, j = num_rows, num_columns
    while i and j:
        if reference[i - 1] == candidate[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return found[::-1]


NUM_RESAMPLES = 10_000
LEVEL = 0.95
_NUMBERS_AT_ONCE = 200_000  # drawn records in memory at a time: a few MB
Parts = Mapping[str, tuple[float, float]]
"""Numerator and denominator per record; a score is the ratio of their sums (a mean if all denominators are 1)."""


class ComparisonOutcome(StrEnum):
    """Result of a comparison."""

    NO_SIGNAL = "no signal"  # both score 0, so the task shows nothing
    EQUAL = "equal on every record"
    BETTER = "better"
    WORSE = "worse"
    OPEN = "no difference shown"  # the interval contains 0
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
    finding: ComparisonOutcome
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
) -> ComparisonOutcome:
    if not ours[:, 0].any() and not theirs[:, 0].any():  # Score.has_signal on the common records
        return ComparisonOutcome.NO_SIGNAL
    if np.array_equal(ours, theirs):
        return ComparisonOutcome.EQUAL
    if math.isnan(low):
        return ComparisonOutcome.TOO_FEW
    if low <= 0.0 <= high:
        return ComparisonOutcome.OPEN
    return ComparisonOutcome.BETTER if (low > 0.0) != score.lower_is_better else ComparisonOutcome.WORSE


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


@dataclass(frozen=True)
class ScoreRow:
    """One score of one task."""

    task: str
    score: str
    num_records: int
    model: ConfidenceInterval
    base: ConfidenceInterval | None
    difference: ConfidenceInterval | None
    finding: str  # "" for a model without base that scores above 0


def rows_of(task: str, model: Sequence[Score], base: Sequence[Score] | None) -> list[ScoreRow]:
    """Return rows of the scores both models have, or of the model's without a base."""
    others = None if base is None else {score.name: score for score in base}
    rows = []
    for score in model:
        ours = interval(score)
        if others is None:
            finding = "" if score.has_signal else ComparisonOutcome.NO_SIGNAL.value
            rows.append(ScoreRow(task, score.name, len(score.parts), ours, None, None, finding))
        elif (other := others.get(score.name)) is not None:
            found = compare(score, other)
            beside = interval(other), found.difference, found.finding.value
            rows.append(ScoreRow(task, score.name, found.num_records, ours, *beside))
    return rows


def generation_facts(answers: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return facts besides the score: finish reasons, looping texts, tokens per step."""
    written = [answer for answer in answers if "text" in answer]
    if not written:
        return {}
    steps = sum(answer["num_steps"] for answer in written)
    facts: dict[str, object] = {
        "texts": len(written),
        "tokens": sum(answer["num_tokens"] for answer in written),
        "tokens per step": round(sum(answer["num_decoded"] for answer in written) / steps, 3) if steps else None,
        "looping": sum(answer["looping"] for answer in written),
    }
    ends = Counter(answer["end"] for answer in written if "end" in answer)
    if ends:
        facts["programs"] = dict(sorted(ends.items()))
    return facts


def to_markdown(
    facts: Mapping[str, object], rows: Sequence[ScoreRow], details: Mapping[str, Mapping[str, Mapping[str, object]]]
) -> str:
    """Return the facts of the run, the table, and details of each task as Markdown."""
    columns: list[tuple[str, Callable[[ScoreRow], str]]] = [
        ("task", lambda row: row.task),
        ("score", lambda row: row.score),
        ("records", lambda row: str(row.num_records)),
        ("model", lambda row: _interval(row.model)),
    ]
    if any(row.base is not None for row in rows):
        columns += [
            ("base", lambda row: _interval(row.base)),
            ("model − base", lambda row: _interval(row.difference, sign="+")),
        ]
    columns.append(("finding", lambda row: row.finding))
    lines = [markdown_facts(facts), columns_table(columns, rows)]
    lines += ["In brackets: the 95 % interval of a bootstrap over records, paired for the difference.", ""]
    for task, of_models in details.items():
        for model, found in of_models.items():
            if found:
                words = "; ".join(f"{name} {_words(value)}" for name, value in found.items())
                lines += [f"{task}, {model}: {words}", ""]
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[ScoreRow]) -> Path:
    """Draw the main scores with their intervals. Raises PlotError without scores or without matplotlib."""
    shown = [row for row in rows if row.score in {"pass@1", "pass@10", "pass@100", "ROUGE-L", "bits per byte"}]
    if not shown:
        raise PlotError("there is no figure to draw")
    bars = {"model": {f"{row.task}\n{row.score}": _bar(row.model) for row in shown}}
    if any(row.base for row in shown):
        bars["base"] = {f"{row.task}\n{row.score}": _bar(row.base) for row in shown if row.base}
    return bar_plot(path, bars, title="Quality", y="score", digits=3, note="95 % intervals over records")


def _bar(found: ConfidenceInterval) -> Bar:
    known = not math.isnan(found.low)
    return Bar(found.value, found.low if known else None, found.high if known else None)


def _interval(found: ConfidenceInterval | None, sign: str = "") -> str:
    if found is None:
        return "–"
    if math.isnan(found.low):
        return f"{found.value:{sign}.4g}"
    return f"{found.value:{sign}.4g} [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"


def _words(value: object) -> str:
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, Mapping) else str(value)
