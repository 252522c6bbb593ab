"""Figures of a comparison, over seeds: mean and range, and ratios at equal compute."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from space_eval.recipes_decoding import Yield

Result = dict[str, Any]
"""One run's result.json."""


@dataclass(frozen=True)
class Spread:
    """Mean, least and most of one figure over the seeds; nan where no seed has it."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.fmean(known), min(known), max(known), len(known))

    def text(self, digits: int = 2) -> str:
        """`1.23 (1.20–1.27)`; the mean alone where there is one value."""
        if math.isnan(self.mean):
            return "–"
        mean = f"{self.mean:.{digits}f}"
        return mean if self.count == 1 else f"{mean} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def named(results: Sequence[Result], name: str) -> list[Result]:
    """The runs of one recipe, by seed."""
    return sorted((r for r in results if r["name"] == name), key=lambda r: int(r["seed"]))


def names(results: Sequence[Result]) -> list[str]:
    """The recipes, in the order in which they come."""
    return list(dict.fromkeys(str(r["name"]) for r in results))


def cells(result: Result) -> list[tuple[str, float]]:
    """Prompt set and temperature of each decoding."""
    return [(row["prompts"], row["temperature"]) for row in result["decoding"]]


def total(result: Result, *, cell: tuple[str, float] | None = None, rescored: str | None = None) -> Yield:
    """The yield of one cell, or of all together; `rescored`: of the decodings with so many ids rescored."""
    rows = result["decoding"] if rescored is None else result["rescored"][rescored]
    chosen = [row for row in rows if cell in (None, (row["prompts"], row["temperature"]))]
    return reduce(Yield.__add__, (Yield(**row["yield"]) for row in chosen), Yield())


def looping(result: Result) -> float:
    """Share of the outputs that loop."""
    outputs = sum(row["num_outputs"] for row in result["decoding"])
    return sum(row["looping"] * row["num_outputs"] for row in result["decoding"]) / outputs if outputs else math.nan


def positions(result: Result, temperature: float) -> list[float]:
    """Share of the drafts laid out at 1, 2, … that were accepted: mean over the prompt sets."""
    rows = [row["accepted_by_position"] for row in result["decoding"] if row["temperature"] == temperature]
    return [statistics.fmean(shares) for shares in zip(*rows, strict=True)]


def agreement(result: Result) -> list[float]:
    """Held-out agreement at draft 1, 2, …, the head's where there is one, at the end of the run."""
    last = result["curve"][-1]
    name = "head" if "head_1" in last else "mask"
    return [value for key, value in last.items() if key.startswith(f"{name}_")]


def last(result: Result, name: str) -> float:
    """A held-out figure at the end of the run; nan where it has none."""
    return float(result["curve"][-1].get(name, math.nan))


def ratios(results: Sequence[Result], name: str, against: str, *, blanks: bool = True) -> list[float]:
    """E-1 of recipe `name` over that of `against`, at equal compute, seed by seed."""

    def accepted(result: Result) -> float:
        found = total(result)
        return found.accepted if blanks else found.accepted_text

    others = {r["seed"]: accepted(r) for r in named(results, against)}
    pairs = [(accepted(r), others[r["seed"]]) for r in named(results, name) if r["seed"] in others]
    return [mine / other if other else math.nan for mine, other in pairs]


def best_rate(results: Sequence[tuple[float, Result]]) -> float:
    """The learning rate whose run ends with most held-out tokens per step."""
    return max(results, key=lambda pair: _ordered(last(pair[1], "tokens_per_step")))[0]


def _ordered(value: float) -> float:
    return -math.inf if math.isnan(value) else value
