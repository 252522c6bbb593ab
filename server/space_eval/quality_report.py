"""The quality report: facts, one row per figure, what is behind them; Markdown, JSON and a PNG."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from space_eval.answers import Answer
from space_eval.paired import Comparison, Finding, Interval, Score, compare, interval
from space_eval.plots import Bar, PlotError, bar_plot


@dataclass(frozen=True)
class Row:
    """One figure of one task."""

    task: str
    score: str
    num_records: int
    model: Interval
    base: Interval | None
    difference: Interval | None
    finding: str  # "" for a lone model that scores above 0

    def as_json(self) -> dict[str, object]:
        """nan, which JSON lacks, as null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def rows_of(task: str, model: Sequence[Score], base: Sequence[Score] | None) -> list[Row]:
    """The figures both have, or the lone model's."""
    others = {score.name: score for score in base or ()}
    rows = []
    for score in model:
        other = others.get(score.name)
        if base is not None and other is None:
            continue
        if other is None:
            finding = "" if score.has_signal else str(Finding.NO_SIGNAL)
            rows.append(Row(task, score.name, len(score.parts), interval(score), None, None, finding))
            continue
        found: Comparison = compare(score, other)
        rows.append(
            Row(
                task,
                score.name,
                found.num_records,
                interval(score),
                interval(other),
                found.difference,
                str(found.finding),
            )
        )
    return rows


def behind(answers: Sequence[Answer]) -> dict[str, object]:
    """What a figure does not say: how texts ended, how many loop, tokens per step."""
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
        facts["sandbox"] = sorted({guard for answer in written for guard in answer["guards"]})
    return facts


def to_markdown(
    facts: Mapping[str, object], rows: Sequence[Row], details: Mapping[str, Mapping[str, Mapping[str, object]]]
) -> str:
    """Facts of the run, the table, and under it what is behind each task's figures."""
    lines = [f"{name}: {value}  " for name, value in facts.items()]
    two = any(row.base is not None for row in rows)
    head = ["task", "score", "records", "model"] + (["base", "model − base"] if two else []) + ["finding"]
    lines += ["", _line(head), "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.task, row.score, str(row.num_records), _interval(row.model)]
        if two:
            cells += [_interval(row.base), _interval(row.difference, sign="+")]
        lines.append(_line([*cells, row.finding]))
    lines += ["", "In brackets: the 95 % interval of a bootstrap over records, paired for the difference.", ""]
    for task, sides in details.items():
        for side, found in sides.items():
            if found:
                lines.append(f"{task}, {side}: " + "; ".join(f"{name} {_said(value)}" for name, value in found.items()))
                lines.append("")
    return "\n".join(lines)


def write_report(
    folder: Path,
    facts: Mapping[str, object],
    rows: Sequence[Row],
    details: Mapping[str, Mapping[str, Mapping[str, object]]],
) -> str | None:
    """quality.md, quality.json and quality.png; why there is no PNG, if there is none."""
    (folder / "quality.md").write_text(to_markdown(facts, rows, details), encoding="utf-8")
    record = {"facts": facts, "rows": [row.as_json() for row in rows], "details": details}
    (folder / "quality.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    shown = [row for row in rows if row.score in {"pass@1", "pass@10", "pass@100", "ROUGE-L", "bits per byte"}]
    if not shown:
        return "there is no figure to draw"
    bars = {"model": {f"{row.task}\n{row.score}": _bar(row.model) for row in shown}}
    if any(row.base for row in shown):
        bars["base"] = {f"{row.task}\n{row.score}": _bar(row.base) for row in shown if row.base}
    try:
        bar_plot(folder / "quality.png", bars, title="Quality", y="score", digits=3, note="95 % intervals over records")
    except PlotError as error:
        return str(error)
    return None


def _bar(found: Interval) -> Bar:
    known = not math.isnan(found.low)
    return Bar(found.value, found.low if known else None, found.high if known else None)


def _interval(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return "–"
    if math.isnan(found.low):
        return f"{found.value:{sign}.4g}"
    return f"{found.value:{sign}.4g} [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
