"""A swinging load second by second: throughput of each arm, and whether any moment is below plain decoding."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from space_eval.bench_round import Round
from space_eval.bench_statistics import Ratio
from space_eval.bench_watch import Watch
from space_eval.load_shape import Swing

HALVES = ("low", "high")


def width(swing: Swing) -> float:
    """Of one point of the timeline, in seconds: a second, or less where a half is short."""
    return min(1.0, swing.period / 4)


@dataclass(frozen=True)
class Moments:
    """One arm's timeline: medians over the rounds."""

    arm: str
    seconds: tuple[float, ...]  # the middle of each moment
    tokens_per_second: tuple[float, ...]
    ratios: tuple[float, ...]  # to the first arm, the median of the rounds' ratios; empty for that arm itself
    draft_lengths: tuple[tuple[float, float, float, float], ...]  # (seconds, median, lowest, highest) of the rounds
    draft_change: float | None  # mean change of the draft length from look to look within a half; None without looks

    @property
    def share_below(self) -> float:
        """Moments in which more than half of the rounds were slower than the first arm."""
        return sum(ratio < 1 for ratio in self.ratios) / len(self.ratios) if self.ratios else 0.0


def moments(swing: Swing, rounds: Sequence[Sequence[Round]]) -> list[Moments]:
    """Of each arm; `rounds` as in `bench_report.rows`."""
    wide = width(swing)
    lines = [[one.timeline(wide) for one in arms] for arms in rounds]
    num = min(len(line) for arms in lines for line in arms)
    made = []
    for place, first in enumerate(rounds[0]):
        ratios = []
        for moment in range(num) if place else ():
            pairs = [(arms[place][moment], arms[0][moment]) for arms in lines]
            ratios.append(statistics.median([mine / other if other else 1.0 for mine, other in pairs]))
        made.append(
            Moments(
                arm=first.arm,
                seconds=tuple((moment + 0.5) * wide for moment in range(num)),
                tokens_per_second=tuple(statistics.median(arms[place][m] for arms in lines) for m in range(num)),
                ratios=tuple(ratios),
                draft_lengths=_draft_lengths(wide, [arms[place] for arms in rounds]),
                draft_change=_draft_change(swing, [arms[place] for arms in rounds]),
            )
        )
    return made


def _draft_lengths(wide: float, rounds: Sequence[Round]) -> tuple[tuple[float, float, float, float], ...]:
    looks: dict[int, list[float]] = {}
    for one in rounds:
        for look in one.watch:
            looks.setdefault(round(look.seconds / wide), []).append(look.draft_length)
    return tuple(
        ((number - 0.5) * wide, statistics.median(lengths), min(lengths), max(lengths))
        for number, lengths in sorted(looks.items())
    )


def _draft_change(swing: Swing, rounds: Sequence[Round]) -> float | None:
    pairs = [pair for one in rounds for pair in itertools.pairwise(one.watch)]
    middle = width(swing) / 2  # a look is of the time before it

    def half(look: Watch) -> int:
        return int((look.seconds - middle) / swing.period)

    changes = [abs(b.draft_length - a.draft_length) for a, b in pairs if half(a) == half(b)]
    return statistics.fmean(changes) if changes else None


def halves(swing: Swing, mine: Sequence[Round], others: Sequence[Round]) -> dict[str, Ratio]:
    """Tokens in all low halves, and in all high ones, over the other arm's in the same round."""
    found: dict[str, list[float]] = {name: [] for name in HALVES}
    for one, other in zip(mine, others, strict=True):
        for name, made, plain in zip(HALVES, _tokens(swing, one), _tokens(swing, other), strict=True):
            if plain:
                found[name].append(made / plain)
    return {name: Ratio.of(ratios) for name, ratios in found.items() if ratios}


def _tokens(swing: Swing, one: Round) -> tuple[int, int]:
    """In the low and in the high halves."""
    counts = [0, 0]
    for exchange in one.exchanges:
        for piece in exchange.pieces:
            at = exchange.started + piece.seconds
            if at <= one.seconds:
                counts[int(at / swing.period) % 2] += piece.num_tokens
    return counts[0], counts[1]
