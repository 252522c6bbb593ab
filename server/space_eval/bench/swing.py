"""A swinging load second by second: throughput of each arm, and the share of moments below plain decoding."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from space_eval.bench.estimates import Ratio
from space_eval.bench.load_shapes import Swing
from space_eval.bench.polling import DraftSample
from space_eval.bench.rounds import Round

HALVES = ("low", "high")


@dataclass(frozen=True)
class SwingTimeline:
    """One arm's timeline: medians over the rounds."""

    arm: str
    seconds: tuple[float, ...]  # middle of each moment
    tokens_per_second: tuple[float, ...]
    ratios: tuple[float, ...]  # median over rounds of the ratio to the first arm; empty for that arm
    draft_lengths: tuple[tuple[float, float, float, float], ...]  # (seconds, median, lowest, highest) of the rounds
    draft_change: float | None  # mean change of the draft length between samples within a half; None without samples

    @property
    def share_below(self) -> float:
        """Share of moments in which more than half of the rounds were slower than the first arm."""
        return sum(ratio < 1 for ratio in self.ratios) / len(self.ratios) if self.ratios else 0.0


def timelines(swing: Swing, rounds: Sequence[Sequence[Round]]) -> list[SwingTimeline]:
    """Return the timeline of each arm. `rounds`: [round][arm]."""
    wide = swing.moment_seconds
    lines = [[one.timeline(wide) for one in arms] for arms in rounds]
    moments = range(min(len(line) for arms in lines for line in arms))
    made = []
    for place, first in enumerate(rounds[0]):
        own = [arms[place] for arms in rounds]
        ratios = []
        for moment in moments if place else ():
            pairs = [(arms[place][moment], arms[0][moment]) for arms in lines]
            ratios.append(statistics.median([mine / other if other else 1.0 for mine, other in pairs]))
        made.append(
            SwingTimeline(
                arm=first.arm,
                seconds=tuple((moment + 0.5) * wide for moment in moments),
                tokens_per_second=tuple(statistics.median(arms[place][m] for arms in lines) for m in moments),
                ratios=tuple(ratios),
                draft_lengths=_draft_lengths(wide, own),
                draft_change=_draft_change(swing, own),
            )
        )
    return made


def _draft_lengths(wide: float, rounds: Sequence[Round]) -> tuple[tuple[float, float, float, float], ...]:
    samples: dict[int, list[float]] = {}
    for one in rounds:
        for sample in one.drafts:
            samples.setdefault(round(sample.seconds / wide), []).append(sample.draft_length)
    return tuple(
        ((number - 0.5) * wide, statistics.median(lengths), min(lengths), max(lengths))
        for number, lengths in sorted(samples.items())
    )


def _draft_change(swing: Swing, rounds: Sequence[Round]) -> float | None:
    pairs = [pair for one in rounds for pair in itertools.pairwise(one.drafts)]
    middle = swing.moment_seconds / 2  # a sample covers the time before it

    def half(sample: DraftSample) -> int:
        return int((sample.seconds - middle) / swing.period)

    changes = [abs(b.draft_length - a.draft_length) for a, b in pairs if half(a) == half(b)]
    return statistics.fmean(changes) if changes else None


def half_ratios(swing: Swing, mine: Sequence[Round], others: Sequence[Round]) -> dict[str, Ratio]:
    """Return the ratios of tokens in all low and in all high halves to the other arm's in the same round."""
    found: dict[str, list[float]] = {name: [] for name in HALVES}
    for one, other in zip(mine, others, strict=True):
        for name, made, plain in zip(HALVES, _tokens(swing, one), _tokens(swing, other), strict=True):
            if plain:
                found[name].append(made / plain)
    return {name: Ratio.of(ratios) for name, ratios in found.items() if ratios}


def _tokens(swing: Swing, one: Round) -> tuple[int, int]:
    """Return the tokens in the low and in the high halves."""
    counts = [0, 0]
    for exchange in one.exchanges:
        for event in exchange.events:
            at = exchange.started + event.seconds
            if at <= one.seconds:
                counts[int(at / swing.period) % 2] += event.num_tokens
    return counts[0], counts[1]
