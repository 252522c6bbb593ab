"""Accepted drafts by their position in a step and by kind of text, as a table and a picture.

Reads what `spaceserve eval acceptance --out` wrote for each kind; a folder's name is its row's. Everything is counted:
another program on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from space_eval.plots import COLOURS, PlotError

from perf.harness import PerfError, Report, table


@dataclass(frozen=True)
class Kind:
    """Drafts on one kind of text at one temperature."""

    name: str
    temperature: float
    tokens_per_step: float
    accepted: tuple[float, ...]  # share of the steps with a draft at position 1, 2, … that accepted it

    @property
    def cells(self) -> tuple[str, ...]:
        shares = [f"{share:.2f}" for share in self.accepted]
        return (self.name, f"{self.temperature:g}", f"{self.tokens_per_step:.2f}", *shares)


def read(folder: Path) -> list[Kind]:
    """Return the folder's rows with the most drafts a step, one a temperature. Raises PerfError."""
    file = folder / "acceptance.json"
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        most = max(row["max_drafts"] for row in rows)
        kept = [row for row in rows if row["max_drafts"] == most]
        return [
            Kind(folder.name, row["temperature"], row["tokens_per_step"], tuple(row["accepted_by_position"]))
            for row in kept
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PerfError(f"{file} is not what `spaceserve eval acceptance --out` writes: {error}") from error


def draw(path: Path, kinds: Sequence[Kind]) -> Path:
    """Draw a panel a temperature: a bar for each kind, most drafts first, stacked by position. Raises PlotError without
    matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("A figure needs matplotlib, which is not installed: pip install 'spaceserve[train]'") from error
    temperatures = sorted({kind.temperature for kind in kinds})
    names = len({kind.name for kind in kinds})
    figure = Figure(figsize=(4.2 * len(temperatures), 1.4 + 0.26 * names), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(temperatures), sharex=True, squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        shown = sorted((kind for kind in kinds if kind.temperature == temperature), key=lambda kind: sum(kind.accepted))
        ends = [0.0] * len(shown)
        for position in range(max(len(kind.accepted) for kind in shown)):
            shares = [kind.accepted[position] if position < len(kind.accepted) else 0.0 for kind in shown]
            colour, label = COLOURS[position % len(COLOURS)], f"draft {position + 1}"
            axes.barh([kind.name for kind in shown], shares, left=ends, color=colour, label=label, height=0.72)
            ends = [end + share for end, share in zip(ends, shares, strict=True)]
        axes.set_title(f"temperature {temperature:g}", fontsize=10, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[-1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.supxlabel("accepted drafts of a step, by position", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": "spaceserve"})
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, help="what eval acceptance wrote, one for each kind of text")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw it there")


def run(options: argparse.Namespace) -> Report:
    kinds = [kind for folder in options.folders for kind in read(folder)]
    if not kinds:
        raise PerfError("There is nothing to read. Give the folders of some runs of eval acceptance.")
    if options.picture is not None:
        try:
            draw(options.picture, kinds)
        except (PlotError, OSError) as error:
            raise PerfError(str(error)) from error
    most = max(len(kind.accepted) for kind in kinds)
    ordered = sorted(kinds, key=lambda kind: (kind.temperature, -kind.tokens_per_step))
    cells = [(*kind.cells, *("nan",) * (most - len(kind.accepted))) for kind in ordered]
    head = ["texts", "temperature", "tokens per step", *map(str, range(1, most + 1))]
    return Report(
        "Accepted drafts by position",
        "The share of steps that accept their first draft, their first two, and so on.",
        [table(head, cells)],
        {"kinds": [vars(kind) for kind in ordered]},
    )
