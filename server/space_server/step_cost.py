"""Predicts the duration of steps on this machine from their shape. Torch-free.

Points measured at start are fitted by a sum of non-decreasing parts: a constant, one per sequence, per sampled row,
per drafting sequence, per draft of the recurrent head and per key read, and a piecewise linear part in the rows that
bends at the machine's roofline ridge. While serving, every step corrects the overall level (drift) and its place
(this shape is cheaper than its neighbours suggest). If the machine's speed changes all at once, because other work
starts or ends, only the level follows, so that shapes not seen since keep their relation. Steps with prompt rows
correct the expectation of later ones (`PrefillPace`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

BENDS = (0, 4, 8, 16, 32, 64, 128, 256, 512)  # row counts at which the cost of a row may change
CROWDS = (0, 2, 8, 32)  # batch sizes at which the cost of a sequence may change
DEPTHS = (1024, 4096, 16384)
"""Computed prompt ids from which each further one may cost more: the keys no longer fit a cache."""

DRIFT_RATE, PLACE_RATE = 0.02, 0.06
"""How fast the drift and a place follow measurements, per step; a new place follows at once."""

KNOWN = 8  # steps after which a place is no longer new; places measured at start are not new
SURPRISE = 1.1
"""Ratio of change of a place's cost that counts as a surprise, after which choices are re-evaluated. A single step of a
known place never does: on a noisy machine every tenth step is off by a quarter."""

SMOOTHNESS = 0.1  # penalty on bends in the fit, relative to the points: without measurements the cost stays linear
BESIDE_ROWS = 0.2
"""Penalty on what a chain row costs more than another row, on what a drafting sequence costs, and on the cost of keys,
relative to the points: where few steps were measured, all of them grow with the rows, and the fit must take time for
that of rows. Otherwise a draft, or a longer context, would cost many times too much."""

PARTS_BESIDE_ROWS = range(1 + len(CROWDS), 5 + len(CROWDS))
"""Their numbers in `_parts`: chain rows, drafting sequences, keys read by each sequence, and by each row."""

LEAK = 0.002  # share of a place's correction forgotten at each of its steps, so that common errors move to the drift
NEAR, CAUTION = 3, 0.02
"""Distance, in eighths of a doubling, up to which a larger place is trusted like a known one; each further eighth adds
CAUTION to its expected cost. So unseen shapes are tried only for a large expected gain."""

TURN, TURN_RATE, TURN_STEPS = math.log(1.5), 0.1, 32
"""The machine's speed has changed if known places are off by TURN (log), averaged at TURN_RATE; then TURN_STEPS steps
correct the drift alone. A known place does not change so much by itself."""

FOLLOW_RATE = 0.25  # how fast the drift follows in these steps
STILL_KNOWN = 2
"""Steps that a place counts as known from after a change of speed: relative costs may have changed as well."""

OUTLIER, NEW_OUTLIER = 2.0, 4.0
"""A step that took more than so many times the expected time teaches no more than this. The second bound is for the
first step of a place, whose expectation is a guess; such a step does not count as one, so that the next is trusted."""

_KEYS = 1024.0

MEAN_RATE, DEVIATION_RATE = 0.25, 0.25  # rates of the two moving averages, per step
DEVIATIONS = 2.0  # added to the mean for the bound
UNTRIED = math.log(1.25)  # initial deviation: the first chunk is some two thirds of what should fit
MOST_ERROR = math.log(4.0)  # of one step, either way: larger ones are interruptions of the machine
PREFIX_NEAR, PER_DOUBLING = 256, 0.35
"""Ids added to both lengths, and the extra log cost per doubling of the prefix beyond the longest measured one: its
keys may not fit a cache. Only a prompt whose prefix is cached can start so far out."""


class StepShape(NamedTuple):
    """What one step computes, over all sequences."""

    num_sequences: int  # that reach their root: a token is sampled for each
    num_chain_rows: int  # roots and drafts
    num_mask_rows: int = 0
    num_drafting: int = 0  # sequences with masks, which draft
    num_prefill_rows: int = 0
    num_prefill_pairs: int = 0  # (prefill row, previously computed id) pairs
    num_context: int = 0  # computed ids, summed over the sequences that reach their root
    num_noisy_rows: int = 0  # chain rows of sequences that are not greedy
    num_head_steps: int = 0  # drafts of the recurrent head, made one after the other for all sequences

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.num_chain_rows + self.num_mask_rows + self.num_prefill_rows

    @property
    def num_pairs(self) -> int:
        """Approximate (row, previously computed id) pairs: assumes that rows are spread evenly over the sequences."""
        rows = self.num_chain_rows + self.num_mask_rows
        return self.num_prefill_pairs + rows * self.num_context // max(self.num_sequences, 1)

    @property
    def num_before(self) -> float:
        """Mean number of computed ids before a prompt row."""
        return self.num_prefill_pairs / self.num_prefill_rows if self.num_prefill_rows else 0.0

    @classmethod
    def plain(cls, num_sequences: int, num_context: int = 0, num_noisy: int = 0) -> StepShape:
        """One root per sequence; `num_noisy` of the sequences are not greedy."""
        return cls(num_sequences, num_sequences, num_context=num_context, num_noisy_rows=num_noisy)


class CostOrigin(NamedTuple):
    """The source of the step costs at start."""

    source: Literal["file", "measured", "learned"]
    reason: str = ""  # why they are learned


UNMEASURED = CostOrigin("learned", "no step was measured when the worker started")

Point = tuple[StepShape, float]
Place = tuple[int, int, bool, int, int]


class PrefillPace:
    """Tracks by how much prefill steps miss their expected duration, on average and at worst.

    A prompt's chunks have shapes never seen before, each with more keys than the last, so errors repeat from one chunk
    to the next, and an estimate that is right on average does not help the sequences that wait. So both the mean error
    and its mean deviation are tracked in logarithms of measured over expected seconds, as TCP does for round-trip times
    (Jacobson, Congestion Avoidance and Control, SIGCOMM 1988); the bound is the mean plus `DEVIATIONS` deviations. On a
    quiet machine the deviation shrinks and chunks grow up to the budget; on a noisy one it stays large, and chunks
    small.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self._deviation = UNTRIED
        self._farthest = 0.0  # longest prefix measured, averaged over a step's prompt rows

    def fear(self, num_before: float) -> float:
        """Return the log margin, beyond the mean, of a step whose rows have `num_before` computed ids before them."""
        untried = math.log2((num_before + PREFIX_NEAR) / (self._farthest + PREFIX_NEAR))
        return DEVIATIONS * self._deviation + PER_DOUBLING * max(0.0, untried)

    def learn(self, error: float, num_before: float) -> None:
        """Record a step that missed its expectation by `error`, not counting the mean."""
        beyond = max(-MOST_ERROR, min(MOST_ERROR, error)) - self.mean
        self.mean += MEAN_RATE * beyond
        self._deviation += DEVIATION_RATE * (abs(beyond) - self._deviation)
        self._farthest = max(self._farthest, num_before)


class StepCost:
    """Predicts the seconds of a step."""

    origin: CostOrigin = UNMEASURED

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: seconds per unit of each part."""
        self._weights = [float(weight) for weight in weights]
        self._crowd = _BentLine(CROWDS, self._weights[1 : 1 + len(CROWDS)])
        self._rows = _BentLine(BENDS, self._weights[-len(BENDS) :])
        self._drift = 0.0  # log of measured / expected
        self._places: dict[Place, float] = {}  # the same beyond the drift, by place
        self._num_steps: dict[Place, int] = {}  # steps measured, by place
        self._unsaid: dict[Place, float] = {}  # change of a place since its last surprise
        self._fears: dict[Place, float] = {}  # cache of `_fear`, cleared when a place becomes known
        self._prompts = PrefillPace()  # of steps with prompt rows, which have no place
        self.num_surprises = 0  # times that a place became much dearer or cheaper
        self.num_turns = 0  # changes of the machine's speed, certain or suspected
        self._off = 0.0  # recent mean error of known places
        self._blamed: dict[Place, float] = {}  # corrections of known places since they are off together
        self._num_to_follow = 0  # steps left that correct the drift alone
        self._drift_before = 0.0  # the turn

    @classmethod
    def from_points(cls, points: Sequence[Point], *, are_sure: bool = True) -> StepCost:
        """Fit the parts to the measured `points` (at least one), by relative error.

        If they are not sure, the first steps while serving correct the drift, as after a change of speed, and the first
        steps of each place outweigh its measurements.
        """
        parts = np.array([_parts(shape) for shape, _ in points])
        seconds = np.array([seconds for _, seconds in points])
        rows = np.array([shape.num_rows for shape, _ in points])
        smooth = _bends(len(parts[0])) * (SMOOTHNESS * np.median(rows / seconds))
        beside = np.zeros((len(PARTS_BESIDE_ROWS), len(parts[0])))
        for number, part in enumerate(PARTS_BESIDE_ROWS):
            beside[number, part] = BESIDE_ROWS * float(np.max(parts[:, part] / seconds))
        wanted = np.concatenate((np.ones(len(points)), np.zeros(len(smooth) + len(beside))))
        cost = cls(_least_squares(np.vstack((parts / seconds[:, None], smooth, beside)), wanted))
        beyond: dict[Place, list[float]] = {}
        for shape, taken in points:
            error = math.log(taken / cost._base(shape))
            if shape.num_prefill_rows:
                cost._prompts.learn(error, shape.num_before)
            else:
                beyond.setdefault(_place(shape), []).append(error)
        cost._places = {place: sum(found) / len(found) for place, found in beyond.items()}
        cost._num_steps = dict.fromkeys(beyond, KNOWN if are_sure else 0)
        if not are_sure:
            cost._num_to_follow, cost.num_turns = TURN_STEPS, 1
        return cost

    @classmethod
    def typical(cls, device_type: str) -> StepCost:
        """Return defaults for an unmeasured machine: a small model on two cores, or a device with rows to spare."""
        per_row = 1.2e-4 if device_type == "cpu" else 2e-6
        row_parts = [per_row / 4 if bend < 16 else per_row for bend in BENDS]
        crowd_parts = [1e-5] * len(CROWDS)
        head_parts = [1e-4, 1e-6]
        deep_parts = [0.0] * len(DEPTHS)
        return cls([1.5e-3, *crowd_parts, 1e-5, 1e-4, 1e-5, 1e-5, 1e-5, *head_parts, *deep_parts, *row_parts])

    def seconds(self, shape: StepShape) -> float:
        """Return the expected seconds."""
        if shape.num_prefill_rows:
            beyond = self._prompts.mean
        else:
            place = _place(shape)
            known = self._places.get(place)
            beyond = self._fear(place) if known is None else known
        return self._base(shape) * math.exp(self._drift + beyond)

    def feared(self, shape: StepShape) -> float:
        """Return seconds that a step rarely exceeds, to bound how long decoding sequences wait."""
        seconds = self.seconds(shape)
        return seconds * math.exp(self._prompts.fear(shape.num_before)) if shape.num_prefill_rows else seconds

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Record one measured step."""
        seconds = max(seconds, 1e-9)
        if shape.num_prefill_rows:
            self._prompts.learn(math.log(seconds / self._base(shape)) - self._drift, shape.num_before)
            return
        place = _place(shape)
        is_new, num_steps = place not in self._num_steps, self._num_steps.get(place, 0)
        if place not in self._places:
            self._places[place] = 0.0
            self._fears.clear()
        elif self._num_to_follow:
            self._follow(
                max(-math.log(NEW_OUTLIER), min(math.log(NEW_OUTLIER), math.log(seconds / self.seconds(shape))))
            )
            return
        surprise = math.log(seconds / self.seconds(shape))
        doubted = is_new and surprise > math.log(NEW_OUTLIER)
        if doubted:
            surprise = math.log(NEW_OUTLIER)
        if num_steps >= KNOWN:
            surprise = max(-math.log(OUTLIER), min(math.log(OUTLIER), surprise))
            self._drift += DRIFT_RATE * surprise
            self._off += TURN_RATE * (surprise - self._off)
            if abs(self._off) > TURN:
                self._begin_turn()
                return
            if abs(self._off) < TURN / 4:
                self._blamed.clear()
        change = max(PLACE_RATE, 1.0 / (num_steps + 1.1)) * surprise - LEAK * self._places[place]
        self._places[place] += change
        if num_steps >= KNOWN:
            self._blamed[place] = self._blamed.get(place, 0.0) + change
        self._unsaid[place] = unsaid = self._unsaid.get(place, 0.0) + change
        if abs(unsaid) > math.log(SURPRISE):
            self._unsaid[place] = 0.0
            self.num_surprises += 1
        self._num_steps[place] = num_steps + (not doubted)

    def _begin_turn(self) -> None:
        """Start to correct the drift alone, and undo what places learnt since their steps are off together."""
        self._num_to_follow, self._drift_before = TURN_STEPS, self._drift
        for place, change in self._blamed.items():
            self._places[place] -= change
        self._blamed.clear()

    def _follow(self, surprise: float) -> None:
        """Correct the drift by one step after a change of speed."""
        self._drift += FOLLOW_RATE * max(-math.log(NEW_OUTLIER), min(math.log(NEW_OUTLIER), surprise))
        self._num_to_follow -= 1
        if self._num_to_follow:
            return
        self._off = 0.0
        if abs(self._drift - self._drift_before) > TURN:
            self._num_steps = {place: min(count, STILL_KNOWN) for place, count in self._num_steps.items()}
            self.num_turns += 1
            self.num_surprises += 1

    def _fear(self, place: Place) -> float:
        """Return the extra log cost of an unseen place, by its distance beyond known places; 0 if none is known."""
        if place not in self._fears:
            sequences, rows, *_ = place
            distances = (max(sequences - other, rows - far) for other, far, *_ in self._places)
            self._fears[place] = CAUTION * max(0, min(distances, default=0) - NEAR)
        return self._fears[place]

    def as_json(self) -> list[float]:
        """Return the weights, for a file."""
        return list(self._weights)

    def _base(self, shape: StepShape) -> float:
        # The weights times `_parts`, without listing them: a controller asks some hundred times a second.
        weights, first = self._weights, 1 + len(CROWDS)
        total = (
            weights[0]
            + self._crowd.at(shape.num_sequences)
            + weights[first] * (shape.num_chain_rows - shape.num_sequences)
            + weights[first + 1] * shape.num_drafting
            + (weights[first + 2] * shape.num_context + weights[first + 3] * shape.num_pairs) / _KEYS
            + weights[first + 4] * shape.num_noisy_rows
            + (weights[first + 5] + weights[first + 6] * shape.num_sequences) * shape.num_head_steps
            + self._rows.at(shape.num_rows)
        )
        if shape.num_prefill_pairs > DEPTHS[0] * shape.num_prefill_rows:
            total += sum(w * part for w, part in zip(weights[first + 7 :], _deep_pairs(shape), strict=False))
        return max(total, 1e-6)


class _BentLine:
    """A piecewise linear function through 0."""

    def __init__(self, bends: Sequence[int], slopes: Sequence[float]) -> None:
        self._bends, self._slopes = bends, slopes
        self._heights = [0.0]  # at the bends
        for (begin, end), slope in zip(pairwise(bends), slopes, strict=False):
            self._heights.append(self._heights[-1] + slope * (end - begin))

    def at(self, number: int) -> float:
        piece = bisect_right(self._bends, number) - 1
        return self._heights[piece] + self._slopes[piece] * (number - self._bends[piece])


def read_points(values: Iterable[Sequence[Any]]) -> list[Point]:
    """Parse points: for each the shape's fields, then the seconds."""
    return [(StepShape(*map(int, numbers)), float(seconds)) for *numbers, seconds in values]


def _parts(shape: StepShape) -> list[float]:
    return [
        1.0,
        *_between(shape.num_sequences, CROWDS),
        shape.num_chain_rows - shape.num_sequences,
        shape.num_drafting,
        shape.num_context / _KEYS,
        shape.num_pairs / _KEYS,
        shape.num_noisy_rows,
        shape.num_head_steps,
        shape.num_head_steps * shape.num_sequences,
        *_deep_pairs(shape),
        *_between(shape.num_rows, BENDS),
    ]


def _deep_pairs(shape: StepShape) -> list[float]:
    """Pairs of a prompt row and a computed id beyond each depth, in thousands."""
    rows, pairs = shape.num_prefill_rows, shape.num_prefill_pairs
    return [max(0, pairs - depth * rows) / _KEYS for depth in DEPTHS]


def _bends(num_parts: int) -> np.ndarray[Any, Any]:
    """Rows of the fit that penalize differences between neighbouring slopes."""
    first_row = num_parts - len(BENDS)
    pairs = [(at, at + 1) for at in (*range(1, len(CROWDS)), *range(first_row, num_parts - 1))]
    found = np.zeros((len(pairs), num_parts))
    for row, (one, other) in enumerate(pairs):
        found[row, one], found[row, other] = -1.0, 1.0
    return found


def _between(number: int, bends: Sequence[int]) -> list[float]:
    """Split `number` at the bends: the length in each interval, the last unbounded."""
    return [max(0.0, min(number, end) - begin) for begin, end in zip(bends, (*bends[1:], math.inf), strict=True)]


def _place(shape: StepShape) -> Place:
    """Group shapes of about the same size, to an eighth of a doubling; greedy and sampling steps apart.

    For one sequence the chain also counts: 2 rows with 2 masks and 1 row with 3 differ in time, and a layout consists
    of such steps. In larger batches they mix.
    """
    sequences = shape.num_sequences
    chain = shape.num_chain_rows if sequences == 1 else 0
    return _eighths(sequences), _eighths(shape.num_rows), shape.num_noisy_rows > 0, chain, shape.num_head_steps


@lru_cache(maxsize=4096)
def _eighths(number: int) -> int:
    return round(8 * math.log2(max(number, 1)))


def _least_squares(parts: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> list[float]:
    """Return non-negative weights that minimize |parts·weights - wanted|, by coordinate descent, which cannot
    diverge."""
    scale = np.maximum(np.linalg.norm(parts, axis=0), 1e-12)
    scaled = parts / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    gram += 1e-9 * np.eye(len(gram))
    weights = np.zeros(len(gram))
    for _ in range(2000):
        for at in range(len(weights)):
            weights[at] = max(0.0, weights[at] + (target[at] - gram[at] @ weights) / gram[at, at])
    return [float(weight) for weight in weights / scale]
