"""PNG plots of measurements with matplotlib, which is imported only on use."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#1f5fa8", "#d1602b", "#3d8f5f", "#8a5aa3", "#7a7a7a", "#b8912b", "#3aa0a8", "#a33a52")
"""Distinguishable in print and for colour-blind readers; most figures use only the first two."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


class PlotError(RuntimeError):
    """A plot cannot be drawn; the message names the cure."""


@dataclass(frozen=True)
class Bar:
    """A bar's height, and its range if known. nan: a dash is drawn instead."""

    value: float
    low: float | None = None
    high: float | None = None


def line_plot(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    ranges: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    note: str = "",
) -> Path:
    """Draw each series of (x, y) points as a line; `x` and `y` are the axis labels.

    `ranges`: (low, high) at each point of a series, drawn as a band. Points whose y is nan leave a gap.
    `note`: small print.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, (name, points) in enumerate(series.items()):
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        across = [point[0] for point in points]
        shown = mark if len(points) <= 40 else None
        axes.plot(across, [p[1] for p in points], label=name, color=colour, marker=shown, markersize=4, linewidth=1.6)
        band = (ranges or {}).get(name)
        if band:
            low, high = [pair[0] for pair in band], [pair[1] for pair in band]
            axes.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(x)
    return _finish(plt, figure, axes, path, title=title, y=y, note=note, num_series=len(series))


def bar_plot(
    path: Path,
    series: Mapping[str, Mapping[str, float | Bar]],
    *,
    title: str,
    y: str,
    x: str = "",
    level: float | None = None,
    digits: int = 2,
    note: str = "",
) -> Path:
    """Draw groups of bars: `series` maps a legend entry to its bar in each group; groups are in order of first
    occurrence.

    The range of a Bar with `low` and `high` is drawn. `level`: a dashed line, such as 1 for plain decoding.
    """
    plt = _pyplot()
    groups = list(dict.fromkeys(group for bars in series.values() for group in bars))
    wide = max(4.8, 1.6 + 0.55 * len(groups) * (len(series) + 0.6))
    figure, axes = plt.subplots(figsize=(wide, 4.2), layout="constrained")
    names = {group: [name for name, bars in series.items() if group in bars] for group in groups}
    width = 0.8 / max((len(present) for present in names.values()), default=1)
    for number, (name, bars) in enumerate(series.items()):
        colour, label = COLOURS[number % len(COLOURS)], name
        for group, value in bars.items():
            bar = value if isinstance(value, Bar) else Bar(value)
            present = names[group]
            place = groups.index(group) + width * (present.index(name) - (len(present) - 1) / 2)
            is_bar = not math.isnan(bar.value)
            height, errors = (bar.value, _errors(bar)) if is_bar else (0.0, None)
            axes.bar([place], [height], width * 0.92, label=label, color=colour, yerr=errors, **_WHISKERS)
            label = "_"  # one legend entry for the whole series
            top = max(bar.value, bar.high or bar.value) if is_bar else 0.0
            text = f"{bar.value:.{digits}f}" if is_bar else "–"
            axes.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    if level is not None:
        axes.axhline(level, color="#555555", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(groups)), groups)
    if x:
        axes.set_xlabel(x)
    axes.margins(y=0.12)
    return _finish(plt, figure, axes, path, title=title, y=y, note=note, num_series=len(series))


_WHISKERS: dict[str, Any] = {"error_kw": {"elinewidth": 1, "ecolor": "#333333"}, "capsize": 2.5}


def _errors(bar: Bar) -> list[list[float]] | None:
    """Return the range's extent below and above the bar; None without a range."""
    if bar.low is None and bar.high is None:
        return None
    low, high = bar.value if bar.low is None else bar.low, bar.value if bar.high is None else bar.high
    return [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]]


def _finish(plt: Any, figure: Any, axes: Any, path: Path, *, title: str, y: str, note: str, num_series: int) -> Path:
    """Add title, legend and note, and save the file."""
    wide = figure.get_size_inches()[0]
    axes.set_title(title, fontsize=11, loc="left")
    if num_series > 1:
        columns = max(1, min(num_series, int(wide / 2)))
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if note:
        figure.supxlabel(textwrap.fill(note, int(14 * wide)), fontsize=7.5, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": "spaceserve"})
    plt.close(figure)
    return path


def _pyplot() -> Any:
    """Import matplotlib with a backend that needs no display."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("A figure needs matplotlib, which is not installed: pip install 'spaceserve[train]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
