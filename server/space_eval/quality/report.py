"""The quality report: facts, one row per score, and details of the generated texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from space_eval.plots import Bar, PlotError, bar_plot
from space_eval.quality.answers import Answer
from space_eval.quality.bootstrap import Comparison, ConfidenceInterval, Finding, Score, compare, interval
from space_eval.report.tables import markdown_facts, markdown_table


@dataclass(frozen=True)
class ScoreRow:
    """One score of one task."""

    task: str
    score: str
    num_records: int
    model: ConfidenceInterval
    base: ConfidenceInterval | None
    difference: ConfidenceInterval | None
    finding: str  # "" for a model without base that scores above 0


def rows_of(task: str, model: Sequence[Score], base: Sequence[Score] | None) -> list[ScoreRow]:
    """Return rows of the scores both models have, or of the model's without a base."""
    others = {score.name: score for score in base or ()}
    rows = []
    for score in model:
        other = others.get(score.name)
        if base is not None and other is None:
            continue
        if other is None:
            finding = "" if score.has_signal else str(Finding.NO_SIGNAL)
            rows.append(ScoreRow(task, score.name, len(score.parts), interval(score), None, None, finding))
            continue
        found: Comparison = compare(score, other)
        rows.append(
            ScoreRow(
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


def generation_facts(answers: Sequence[Answer]) -> dict[str, object]:
    """Return facts besides the score: finish reasons, looping texts, tokens per step."""
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
    return facts


def to_markdown(
    facts: Mapping[str, object], rows: Sequence[ScoreRow], details: Mapping[str, Mapping[str, Mapping[str, object]]]
) -> str:
    """Return the facts of the run, the table, and details of each task as Markdown."""
    two = any(row.base is not None for row in rows)
    head = ["task", "score", "records", "model"] + (["base", "model − base"] if two else []) + ["finding"]
    cells = []
    for row in rows:
        compared = [_interval(row.base), _interval(row.difference, sign="+")] if two else []
        cells.append([row.task, row.score, str(row.num_records), _interval(row.model), *compared, row.finding])
    lines = [markdown_facts(facts), markdown_table(head, cells)]
    lines += ["In brackets: the 95 % interval of a bootstrap over records, paired for the difference.", ""]
    for task, of_models in details.items():
        for model, found in of_models.items():
            if found:
                lines.append(
                    f"{task}, {model}: " + "; ".join(f"{name} {_words(value)}" for name, value in found.items())
                )
                lines.append("")
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[ScoreRow]) -> None:
    """Draw the main scores with their intervals. Raises PlotError without scores or without matplotlib."""
    shown = [row for row in rows if row.score in {"pass@1", "pass@10", "pass@100", "ROUGE-L", "bits per byte"}]
    if not shown:
        raise PlotError("there is no figure to draw")
    bars = {"model": {f"{row.task}\n{row.score}": _bar(row.model) for row in shown}}
    if any(row.base for row in shown):
        bars["base"] = {f"{row.task}\n{row.score}": _bar(row.base) for row in shown if row.base}
    bar_plot(path, bars, title="Quality", y="score", digits=3, note="95 % intervals over records")


def _bar(found: ConfidenceInterval) -> Bar:
    known = not math.isnan(found.low)
    return Bar(found.value, found.low if known else None, found.high if known else None)


def _interval(found: ConfidenceInterval | None, sign: str = "") -> str:
    if found is None:
        return "–"
    if math.isnan(found.low):
        return f"{found.value:{sign}.4g}"
    return f"{found.value:{sign}.4g} [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"


def _words(value: object) -> str:
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, Mapping) else str(value)
