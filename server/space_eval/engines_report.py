"""The cells of a comparison as tables: rates, ratios to the best other engine, and the bounds of drafting."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_eval.bench.estimates import Ratio
from space_eval.engines_point import Point
from space_eval.engines_process import OURS
from space_eval.engines_rounds import Cell

TIE = 0.15
"""Differences below this share are called level: machines with neighbours vary by as much from run to run."""


@dataclass(frozen=True)
class PointResult:
    """All arms at one point."""

    point: Point
    cells: Sequence[Cell]

    @property
    def best_other(self) -> Cell | None:
        """The fastest of the engines that are not ours, by its median."""
        others = [cell for cell in self.cells if cell.engine != OURS and cell.rates]
        return max(others, key=lambda cell: statistics.median(cell.rates), default=None)

    def against_best(self, cell: Cell) -> Ratio | None:
        """To the best other engine, each of one round."""
        best = self.best_other
        if best is None or not cell.rates:
            return None
        return Ratio.of([one / other for one, other in zip(cell.rates, best.rates, strict=False)])

    def bound_against_best(self, cell: Cell) -> float | None:
        """The most that its drafts could bring: plain decoding's median times the bound, over the best other's."""
        best = self.best_other
        plain = next((one for one in self.cells if one.engine == cell.engine and one.rates), None)
        if best is None or plain is None or cell.bound is None:
            return None
        return statistics.median(plain.rates) * cell.bound["speed_up"] / statistics.median(best.rates)


@dataclass(frozen=True)
class ModelResult:
    """All points of one model."""

    name: str
    engines: Mapping[str, Mapping[str, Any]]  # by name: what it says of itself, or its `failure`
    points: Sequence[PointResult]


def verification(ratio: float) -> str:
    """`ahead`, `level` or `behind`."""
    return "level" if 1 / (1 + TIE) < ratio < 1 + TIE else "ahead" if ratio > 1 else "behind"


HOW = """\
Tokens per second, medians over the rounds. In a round every arm of every engine had its turn on the same prompts, each
other round in reverse order. A batch is timed from the moment at which all of its sequences have their first token to
the one at which the first has all of them; a prefill until its only new token. Greedy; ends of text are ignored, and
every answer had the asked length. Engines take and give ids in their own process: no HTTP, no text. Between turns they
are idle.

Ratios are to the best of the other engines at that point, each of one round: median, 95 % bootstrap bounds. Below 15 %
a difference is called level. Bound: plain decoding's rate times E / cost of the layout whose expected tokens per
measured second are best, by the cost of whole steps as measured at the start of this run and by its own steps.

Same ids: the share of an arm's ids up to the first that differs from our plain decoding's, over all sequences. Engines
round differently, and texts of random weights part for good at the first tie: near 1 proves the same model, small
values prove nothing."""


def to_markdown(facts: Mapping[str, Any], results: Sequence[ModelResult]) -> str:
    """The whole report."""
    lines = ["# Engines side by side", "", HOW, ""]
    lines += [f"{name}: {value}  " for name, value in facts.items()]
    for result in results:
        lines += ["", f"## {result.name}", "", *_rates(result), "", *_ratios(result), "", *_engines(result)]
        failures = [f"- {r.point.name}: {cell.failure}" for r in result.points for cell in r.cells if cell.failure]
        lines += ["", "Failed:", "", *failures] if failures else []
    return "\n".join(lines) + "\n"


def _rates(result: ModelResult) -> list[str]:
    lines = _head(["tokens/s", *(_point(r) for r in result.points), "same ids"])
    for number, cell in enumerate(result.points[0].cells if result.points else []):
        row = [r.cells[number] for r in result.points]
        best = [r.best_other for r in result.points]
        shown = [_rate(one, bold=one is other) for one, other in zip(row, best, strict=True)]
        same = [one.same_ids for one in row if one.same_ids is not None]
        lines.append(_line([cell.name, *shown, f"{statistics.fmean(same):.2f}" if same else "–"]))
    return lines


def _point(result: PointResult) -> str:
    rounds = max((len(cell.rates) for cell in result.cells), default=0)
    return f"{result.point.name} ({rounds} round{'s' if rounds != 1 else ''})"


def _rate(cell: Cell, *, bold: bool) -> str:
    if not cell.rates:
        return "failed"
    shown = f"{statistics.median(cell.rates):.4g}" if statistics.median(cell.rates) < 1000 else _whole(cell)
    return f"**{shown}**" if bold else shown


def _whole(cell: Cell) -> str:
    return f"{statistics.median(cell.rates):.0f}"


def _ratios(result: ModelResult) -> list[str]:
    lines = _head(["ours", "point", "best other", "ratio to it", "", "bound", "E", "rows", "cost"])
    for r in result.points:
        for cell in r.cells:
            ratio, best = r.against_best(cell), r.best_other
            if cell.engine != OURS or ratio is None or best is None:
                continue
            bound = r.bound_against_best(cell)
            parts = ["–"] * 4
            if bound is not None and cell.bound is not None:
                b = cell.bound
                parts = [f"{bound:.2f}", f"{b['tokens_per_step']:.2f}", f"{b['num_rows']:.1f}", f"{b['cost']:.2f}"]
            lines.append(_line([cell.arm, r.point.name, best.name, ratio.shown(), verification(ratio.median), *parts]))
    return lines


def _engines(result: ModelResult) -> list[str]:
    lines = _head(["engine", "version", "most memory", "settings", "what its figures leave out"])
    for name, said in result.engines.items():
        if "failure" in said:
            lines.append(_line([name, "–", "–", f"not measured: {said['failure']}", "–"]))
            continue
        memory = "–" if said.get("resident_mib") is None else f"{said['resident_mib']:.0f} MiB"
        lines.append(_line([name, said["version"], memory, said["settings"], said["lacks"]]))
    return lines


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def record(facts: Mapping[str, Any], results: Sequence[ModelResult]) -> dict[str, Any]:
    """Everything, for the JSON file."""
    return {
        "facts": dict(facts),
        "models": [
            {
                "name": result.name,
                "engines": {name: dict(said) for name, said in result.engines.items()},
                "points": [_point_record(r) for r in result.points],
            }
            for result in results
        ],
    }


def _point_record(result: PointResult) -> dict[str, Any]:
    best = result.best_other
    cells = []
    for cell in result.cells:
        ratio = result.against_best(cell)
        cells.append(
            asdict(cell)
            | {
                "median": statistics.median(cell.rates) if cell.rates else None,
                "against_best": None if ratio is None else asdict(ratio),
                "bound_against_best": result.bound_against_best(cell),
            }
        )
    name = result.point.name
    return {"name": name, **asdict(result.point), "best_other": best.name if best else None, "cells": cells}


def write(folder: Path, facts: Mapping[str, Any], results: Sequence[ModelResult]) -> list[Path]:
    """engines.json and engines.md in `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "engines.json", folder / "engines.md"]
    files[0].write_text(json.dumps(record(facts, results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    files[1].write_text(to_markdown(facts, results), encoding="utf-8")
    return files
