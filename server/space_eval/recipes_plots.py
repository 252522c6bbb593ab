"""A comparison in pictures: curves over the compute, bars, and the balance of the two losses."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from space_eval.plots import Bar, PlotError, bar_plot, line_plot
from space_eval.recipes_figures import Result, Spread, agreement, last, named, names, total
from space_eval.recipes_named import REFERENCE, RESCORING
from space_eval.recipes_report import Found

SHOWN = ("paper", "paper + head", "full", "full + head", "gated-lora", "gated-lora + head")
"""Recipes of the curves: eight colours can be told apart, six can be read."""


def write_plots(out: Path, found: Found) -> list[Path]:
    """Every picture there are results for; none, with a line on stderr, without matplotlib."""
    try:
        return _plots(out, found)
    except PlotError as error:
        print(f"recipes: {error}", file=sys.stderr)
        return []


def _plots(out: Path, found: Found) -> list[Path]:
    pictures = []
    if found.main:
        pictures += [
            _curves(out, "curves.png", found.main, "tokens_per_step"),
            _curves(out, "curves_by_seconds.png", found.main, "tokens_per_step", over="seconds"),
            _curves(out, "loss.png", found.main, "loss"),
            _bars(out, found.main),
        ]
    if found.levers:
        pictures.append(_lever_bars(out, found.levers))
    if found.balance:
        pictures.append(_balance(out, found.balance))
    return pictures


def _curves(out: Path, file: str, results: Sequence[Result], figure: str, *, over: str = "flops") -> Path:
    """The mean over seeds as a line, the range as a band; over the compute or the seconds."""
    series, ranges = {}, {}
    unit = 1e12 if over == "flops" else 1.0
    for name in (name for name in names(results) if name in SHOWN):
        runs = named(results, name)
        looks = list(zip(*(run["curve"] for run in runs), strict=False))
        across = [statistics.fmean(entry[over] for entry in look) / unit for look in looks]
        spreads = [Spread.of(entry[figure] for entry in look) for look in looks]
        series[name] = [(x, spread.mean) for x, spread in zip(across, spreads, strict=True)]
        ranges[name] = [(spread.low, spread.high) for spread in spreads]
    return line_plot(
        out / file,
        series,
        title="Held-out text, by compute" if over == "flops" else "Held-out text, by time",
        x="10¹² operations of the model" if over == "flops" else "seconds of training",
        y="tokens per step, from agreement" if figure == "tokens_per_step" else "next-token loss (nats)",
        ranges=ranges,
        note="Lines: mean over the seeds. Bands: their range.",
    )


def _bars(out: Path, results: Sequence[Result]) -> Path:
    series = {}
    for label, with_blanks in (("all tokens", True), ("without whitespace-only tokens", False)):
        series[label] = {
            name.replace(" + ", "\n+ ").replace(", ", ",\n"): _bar(named(results, name), with_blanks)
            for name in names(results)
        }
    note = "Outputs that do not loop. Whiskers: range over the seeds."
    return bar_plot(out / "recipes.png", series, title="Accepted drafts per step at equal compute", y="E−1", note=note)


def _bar(runs: Sequence[Result], with_blanks: bool) -> Bar:
    yields = [total(run) for run in runs]
    spread = Spread.of(y.accepted if with_blanks else y.accepted_text for y in yields)
    return Bar(spread.mean, spread.low, spread.high) if spread.count > 1 else Bar(spread.mean)


def _lever_bars(out: Path, results: Sequence[Result]) -> Path:
    series = {
        "E−1": {
            name.replace(" ", "\n"): _bar(named(results, name), True) for name in names(results) if name != RESCORING
        },
    }
    level = Spread.of(total(run).accepted for run in named(results, REFERENCE)).mean
    return bar_plot(
        out / "levers.png",
        series,
        title="Each lever alone, at equal compute",
        y="accepted drafts per step",
        level=level,
    )


def _balance(out: Path, results: Sequence[Result]) -> Path:
    """Loss, acceptance and tokens per step together: each against its own middle setting, so that one axis does."""
    series = {}
    figures: dict[str, Callable[[Result], float]] = {
        "next-token loss (nats)": lambda run: last(run, "loss"),
        "agreement at draft 1": lambda run: agreement(run)[0],
        "held-out tokens per step": lambda run: last(run, "tokens_per_step"),
        "E−1 in decoding": lambda run: total(run).accepted,
    }
    for label, figure in figures.items():
        series[label] = {
            name.replace(" ", "\n"): Bar(Spread.of(figure(run) for run in named(results, name)).mean)
            for name in names(results)
        }
    return bar_plot(out / "balance.png", series, title="Balance of the ordinary loss and the masks' loss", y="")
