"""A comparison for people: recipes.md with its tables, recipes.json with every run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space_eval.measured import markdown_table
from space_eval.recipes_figures import (
    Result,
    Spread,
    agreement,
    cells,
    last,
    looping,
    named,
    names,
    positions,
    ratios,
    total,
)
from space_eval.recipes_named import PAPER, REFERENCE, RESCORING

MEGA = 1e6


@dataclass
class Found:
    """All results so far, by part."""

    facts: dict[str, object]
    start: list[Result] = field(default_factory=list)
    sweep: dict[str, list[tuple[float, Result]]] = field(default_factory=dict)  # of each kind, by learning rate
    main: list[Result] = field(default_factory=list)
    levers: list[Result] = field(default_factory=list)
    balance: list[Result] = field(default_factory=list)
    cost: list[Result] = field(default_factory=list)

    @classmethod
    def kept(cls, out: Path, facts: dict[str, object]) -> Found:
        """With the parts that the report in `out` has, if it is of the same comparison."""
        file = out / "recipes.json"
        if not file.is_file():
            return cls(facts)
        record = json.loads(file.read_text(encoding="utf-8"))
        if any(record["facts"].get(name) != facts.get(name) for name in SAME):
            return cls(facts)
        parts = {part: record[part] for part in ("start", *LISTED)}
        sweep = {kind: [(one.pop("rate"), one) for one in some] for kind, some in record["sweep"].items()}
        return cls(facts, sweep=sweep, **parts)


SAME = ("base", "training text", "compute of a run")
"""Facts that make two reports one comparison."""

LISTED = ("main", "levers", "balance", "cost")


def write_report(out: Path, found: Found) -> Path:
    """Write both files; the path of recipes.md."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "facts": found.facts,
        "start": found.start,
        "sweep": {kind: [{"rate": rate, **r} for rate, r in some] for kind, some in found.sweep.items()},
        **{part: getattr(found, part) for part in LISTED},
    }
    (out / "recipes.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path = out / "recipes.md"
    path.write_text(as_markdown(found), encoding="utf-8")
    return path


def as_markdown(found: Found) -> str:
    """Every part that has results."""
    parts = ["# Training recipes at equal compute", "", *(f"{name}: {value}  " for name, value in found.facts.items())]
    parts += ["", RULES]
    if found.start:
        parts += ["## Start: untrained masks on the base", "", _drafting(found.start, None)]
    if found.main:
        parts += [
            "## Recipes",
            "",
            _drafting(found.main, PAPER),
            "Accepted drafts by position",
            "",
            _by_position(found),
        ]
        parts += [
            "Held-out agreement with the model's own token, by draft",
            "",
            _agreement([*found.start, *found.main]),
        ]
    if found.levers:
        parts += ["## Levers", "", f"Each switched alone in `{REFERENCE}`.", "", _levers(found.levers)]
        rescored = _rescored(found.levers)
        if rescored:
            parts += ["Ids that the draft head rescores (the same weights)", "", rescored]
    if found.balance:
        parts += ["## Balance of the two losses", "", _balance(found.balance)]
    if found.sweep:
        parts += ["## Learning rates", "", _sweep(found.sweep)]
    if found.cost:
        parts += ["## Cost at equal real tokens", "", _cost(found.cost)]
    return "\n".join(parts)


RULES = """\
Compute is operations of the model over all rows: real tokens, masks, the teacher's passes and text of the model's own.
E−1 is accepted drafts per step of the worker's own decoding, over outputs that do not loop (an output loops if at least
half of its 4-grams occurred earlier in it). "Text" leaves whitespace-only tokens out of the count. Ranges are least and
most over the seeds; ratios are taken seed by seed.
"""


def _drafting(results: Sequence[Result], against: str | None) -> str:
    """A row for each recipe."""
    where = cells(results[0])
    head = ["recipe", "seeds", "updates", "10^12 operations", "seconds", "held-out loss"]
    head += [f"E−1 {name} T={temperature:g}" for name, temperature in where] + ["E−1", "E−1 text", "looping"]
    head += ["times the paper's", "times, text"] if against else []
    rows = []
    for name in names(results):
        runs = named(results, name)
        row = [
            name,
            str(len(runs)),
            _over(runs, lambda r: r["updates"], 0),
            _over(runs, lambda r: r["flops"] / 1e12, 2),
            _over(runs, lambda r: r["seconds"], 0),
            _over(runs, lambda r: last(r, "loss"), 3),
        ]
        row += [_over(runs, lambda r, cell=cell: total(r, cell=cell).accepted, 2) for cell in where]
        row += [
            _over(runs, lambda r: total(r).accepted, 2),
            _over(runs, lambda r: total(r).accepted_text, 2),
            _over(runs, looping, 2),
        ]
        if against:
            row += [Spread.of(ratios(results, name, against, blanks=flag)).text() for flag in (True, False)]
        rows.append(row)
    return markdown_table(head, rows)


def _by_position(found: Found) -> str:
    temperatures = sorted({temperature for _, temperature in cells(found.main[0])})
    most = max(len(positions(r, temperatures[0])) for r in found.main)
    rows = []
    for name in names(found.main):
        for temperature in temperatures:
            shares = list(zip(*(positions(r, temperature) for r in named(found.main, name)), strict=True))
            rows.append([name, f"{temperature:g}", *(Spread.of(values).text() for values in shares)])
    return markdown_table(["recipe", "T", *map(str, range(1, most + 1))], rows)


def _agreement(results: Sequence[Result]) -> str:
    most = max(len(agreement(r)) for r in results)
    rows = []
    for name in names(results):
        runs = named(results, name)
        shares = zip(*(agreement(r) for r in runs), strict=True)
        tokens = _over(runs, lambda r: last(r, "tokens_per_step"), 2)
        rows.append([name, tokens, *(Spread.of(values).text() for values in shares)])
    return markdown_table(["recipe", "tokens per step", *map(str, range(1, most + 1))], rows)


def _levers(results: Sequence[Result]) -> str:
    head = ["lever", "seeds", "updates", "held-out loss", "held-out tokens per step", "E−1", "E−1 text", "looping"]
    rows = []
    for name in names(results):
        if name == RESCORING:
            continue
        runs = named(results, name)
        change = Spread.of(ratios(results, name, REFERENCE)).text()
        row = [name, str(len(runs)), _over(runs, lambda r: r["updates"], 0), _over(runs, lambda r: last(r, "loss"), 3)]
        row += [
            _over(runs, lambda r: last(r, "tokens_per_step"), 2),
            _over(runs, lambda r: total(r).accepted, 2),
            _over(runs, lambda r: total(r).accepted_text, 2),
            _over(runs, looping, 2),
            change,
        ]
        rows.append(row)
    return markdown_table([*head, "times the reference"], rows)


def _rescored(results: Sequence[Result]) -> str:
    runs = named(results, RESCORING)
    if not runs:
        return ""
    rows = []
    for count in runs[0]["rescored"]:
        label = "all" if count == "0" else count
        row = [
            _over(runs, lambda r, cell=cell, c=count: total(r, cell=cell, rescored=c).accepted, 3)
            for cell in cells(runs[0])
        ]
        rows.append([label, *row, _over(runs, lambda r, c=count: total(r, rescored=c).accepted, 3)])
    head = ["ids", *(f"E−1 {name} T={temperature:g}" for name, temperature in cells(runs[0])), "E−1"]
    return markdown_table(head, rows)


def _balance(results: Sequence[Result]) -> str:
    head = ["setting", "updates", "next-token loss", "accepted at 1", "held-out tokens per step", "E−1", "looping"]
    rows = []
    for name in names(results):
        runs = named(results, name)
        rows.append(
            [
                name,
                _over(runs, lambda r: r["updates"], 0),
                _over(runs, lambda r: last(r, "loss"), 3),
                _over(runs, lambda r: agreement(r)[0], 3),
                _over(runs, lambda r: last(r, "tokens_per_step"), 2),
                _over(runs, lambda r: total(r).accepted, 2),
                _over(runs, looping, 2),
            ]
        )
    return markdown_table(head, rows)


def _sweep(sweep: Mapping[str, Sequence[tuple[float, Result]]]) -> str:
    rows = []
    for kind, some in sweep.items():
        best = max(last(r, "tokens_per_step") for _, r in some)
        at_edge = last(some[0][1], "tokens_per_step") == best or last(some[-1][1], "tokens_per_step") == best
        for rate, r in some:
            chosen = last(r, "tokens_per_step") == best
            mark = ("best, at the edge" if at_edge else "best") if chosen else ""
            rows.append(
                [
                    kind,
                    f"{r['plan']['optimiser']} {rate:g}",
                    f"{last(r, 'loss'):.3f}",
                    f"{last(r, 'tokens_per_step'):.3f}",
                    f"{total(r).accepted:.2f}",
                    mark,
                ]
            )
    return markdown_table(["recipe", "optimiser, rate", "held-out loss", "held-out tokens per step", "E−1", ""], rows)


def _cost(results: Sequence[Result]) -> str:
    head = [
        "recipe",
        "real tokens",
        "mask rows learnt",
        "10^12 operations",
        "seconds",
        "peak MB above the loaded model",
    ]
    rows = []
    for name in names(results):
        runs = named(results, name)
        rows.append(
            [
                name,
                _over(runs, lambda r: r["tokens"], 0),
                _over(runs, lambda r: r["masks"], 0),
                _over(runs, lambda r: r["flops"] / 1e12, 2),
                _over(runs, lambda r: r["seconds"], 1),
                _over(runs, lambda r: r["peak_bytes"] / MEGA, 0),
                _over(runs, lambda r: r["curve"][0]["loss"], 3),
                _over(runs, lambda r: last(r, "loss"), 3),
                _over(runs, lambda r: last(r, "tokens_per_step"), 2),
            ]
        )
    return markdown_table([*head, "loss before", "loss after", "held-out tokens per step"], rows)


def _over(runs: Sequence[Result], figure: Any, digits: int) -> str:
    return Spread.of(float(figure(run)) for run in runs).text(digits)
