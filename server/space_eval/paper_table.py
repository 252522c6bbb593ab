"""The paper's Table 1 from what was measured: one row per task, the published figures beside ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_eval.bench_report import Spread
from space_eval.paper_published import PublishedFigure, PublishedModel
from space_eval.paper_quality import Quality
from space_eval.paper_run import Measured, Turn
from space_eval.paper_tasks import Task
from space_eval.plots import Bar, bar_plot
from space_eval.speed_decoding import Answer

HEAD = (
    "| task | questions | tokens/step | not looping | published | speed-up | not looping | published | looping "
    "| quality | base | same text |"
)


@dataclass(frozen=True)
class PaperRow:
    """One task. Means are over steps, not over prompts; ranges are over the rounds."""

    task: str
    title: str
    num_questions: int  # measured so far
    num_asked: int  # of so many
    num_answers: int  # a question with two turns has two
    tokens_per_step: float
    tokens_per_step_not_looping: float  # nan where all outputs loop
    tokens_per_forward: float  # the prompt's own pass counted, as the published script counts
    rows_per_step: float
    accepted_share: float  # of the drafts that were verified
    looping: float  # share of answers
    speedup: Spread  # tokens per second over plain decoding's, prompt and answer, as published
    decode_speedup: Spread  # without the prompt
    speedup_not_looping: Spread | None
    plain_tokens_per_second: Spread  # prompt and answer
    space_tokens_per_second: Spread
    speedup_over_base: Spread | None  # over plain decoding of the base
    num_identical: int  # answers equal to plain decoding's
    num_truncated: int  # prompts whose beginning was cut off
    quality: Quality | None
    published: PublishedFigure | None
    categories: Mapping[str, float]  # tokens per step of each, where the task has categories

    @property
    def is_whole(self) -> bool:
        return self.num_questions == self.num_asked


def summarise(
    task: Task, measured: Sequence[Measured], num_asked: int, quality: Quality | None, published: PublishedModel
) -> PaperRow:
    """A task's row; `measured` holds at least one question."""
    turns = [turn for one in measured for turn in one.turns]
    steady = [turn for turn in turns if not turn.space.is_looping]
    space = [turn.space for turn in turns]
    plain = [turn.plain for turn in turns]
    base = [turn.base for turn in turns if turn.base is not None]
    names = sorted({one.question.category for one in measured} - {""})
    return PaperRow(
        task=task.name,
        title=task.title,
        num_questions=len(measured),
        num_asked=num_asked,
        num_answers=len(turns),
        tokens_per_step=_tokens_per_step(space),
        tokens_per_step_not_looping=_tokens_per_step([turn.space for turn in steady]),
        tokens_per_forward=_ratio(sum(len(a.ids) for a in space), sum(a.num_steps + 1 for a in space)),
        rows_per_step=_ratio(sum(a.num_rows for a in space), sum(a.num_steps for a in space)),
        accepted_share=_ratio(sum(a.num_accepted for a in space), sum(a.num_drafted for a in space)),
        looping=1 - _ratio(len(steady), len(turns)),
        speedup=_over(_rates(space), _rates(plain)),
        decode_speedup=_over(_decode_rates(space), _decode_rates(plain)),
        speedup_not_looping=_speedup(steady) if steady else None,
        plain_tokens_per_second=Spread.of(_rates(plain)),
        space_tokens_per_second=Spread.of(_rates(space)),
        speedup_over_base=_over(_rates(space), _rates(base)) if base else None,
        num_identical=sum(turn.space.ids == turn.plain.ids for turn in turns),
        num_truncated=sum(turn.truncated for turn in turns),
        quality=quality,
        published=published.figures.get(task.name),
        categories={
            name: _tokens_per_step([t.space for one in measured if one.question.category == name for t in one.turns])
            for name in names
        },
    )


def _speedup(turns: Sequence[Turn]) -> Spread:
    return _over(_rates([turn.space for turn in turns]), _rates([turn.plain for turn in turns]))


def _rates(answers: Sequence[Answer]) -> list[float]:
    """Tokens per second of each round, over all answers."""
    rounds = zip(*(answer.seconds for answer in answers), strict=True)
    return [_ratio(sum(len(answer.ids) for answer in answers), sum(seconds)) for seconds in rounds]


def _decode_rates(answers: Sequence[Answer]) -> list[float]:
    rounds = zip(*(answer.decode_seconds for answer in answers), strict=True)
    return [_ratio(sum(answer.num_decoded for answer in answers), sum(seconds)) for seconds in rounds]


def _over(rates: Sequence[float], others: Sequence[float]) -> Spread:
    """Of each round's pair."""
    return Spread.of([_ratio(rate, other) for rate, other in zip(rates, others, strict=True)])


def _tokens_per_step(answers: Sequence[Answer]) -> float:
    return _ratio(sum(answer.num_decoded for answer in answers), sum(answer.num_steps for answer in answers))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def to_markdown(rows: Sequence[PaperRow], facts: Mapping[str, object], published: PublishedModel) -> str:
    """The facts of the run, the table, and what its columns mean."""
    lines = ["# The paper's Table 1, measured here", ""]
    lines += [f"{name}: {value}  " for name, value in facts.items()]
    lines += ["", HEAD, "|" + "---|" * HEAD.count(" |")]
    lines += [_line(row) for row in rows]
    for row in rows:
        if row.categories:
            parts = ", ".join(f"{name} {value:.2f}" for name, value in row.categories.items())
            lines += ["", f"{row.title}, tokens per step by category: {parts}."]
        if row.num_truncated:
            lines += ["", f"{row.title}: {row.num_truncated} prompts were too long for the window; their end was kept."]
    lines += [
        "",
        f"published: {published.name}, arXiv 2402.11809, Table 1: another model on another machine, k=5, batch 1.  ",
        "tokens/step: ids emitted in decode steps per step; the prompt's own forward pass does not count.  ",
        "not looping: without outputs of which at least half of the 4-grams occurred earlier in them.  ",
        "speed-up: tokens per second over plain decoding of the same weights in the same round, prompt included; "
        "median (lowest–highest) over the rounds.  ",
        "quality, base: of the model's answers and of the base's; 'no signal' where both are 0.  ",
        "same text: answers of SPACE equal to plain decoding's, id by id.",
    ]
    return "\n".join(lines) + "\n"


def _line(row: PaperRow) -> str:
    quality, base = "–", "–"
    if row.quality is not None and not row.quality.has_signal:
        quality = f"{row.quality.name}: no signal"
    elif row.quality is not None:
        quality = f"{row.quality.name} {row.quality.model:.3f}"
        base = "–" if row.quality.base is None else f"{row.quality.base:.3f}"
    questions = str(row.num_questions) if row.is_whole else f"{row.num_questions} of {row.num_asked}"
    theirs = row.published
    cells = [
        row.title,
        questions,
        _shown(row.tokens_per_step),
        _shown(row.tokens_per_step_not_looping),
        "–" if theirs is None else f"{theirs.tokens_per_step:.2f}",
        row.speedup.shown(2),
        "–" if row.speedup_not_looping is None else f"{row.speedup_not_looping.median:.2f}",
        "–" if theirs is None else f"{theirs.speedup:.2f}",
        f"{row.looping:.0%}",
        quality,
        base,
        f"{row.num_identical}/{row.num_answers}",
    ]
    return "| " + " | ".join(cells) + " |"


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def write_paper(
    folder: Path, rows: Sequence[PaperRow], facts: Mapping[str, object], published: PublishedModel
) -> list[Path]:
    """paper.json and paper.md, then the figures paper.png and paper-speed.png; PlotError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"facts": dict(facts), "published": asdict(published), "rows": [_as_json(row) for row in rows]}
    (folder / "paper.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "paper.md").write_text(to_markdown(rows, facts, published), encoding="utf-8")
    theirs = f"published ({published.name})"
    steps: dict[str, dict[str, float | Bar]] = {"ours": {}, "ours, not looping": {}, theirs: {}}
    times: dict[str, dict[str, float | Bar]] = {"ours": {}, theirs: {}}
    for row in rows:
        steps["ours"][row.title] = row.tokens_per_step
        steps["ours, not looping"][row.title] = row.tokens_per_step_not_looping
        times["ours"][row.title] = Bar(row.speedup.median, row.speedup.low, row.speedup.high)
        if row.published is not None:
            steps[theirs][row.title] = row.published.tokens_per_step
            times[theirs][row.title] = row.published.speedup
    note = f"{facts.get('model', '')}: {facts.get('machine', '')}"
    return [
        folder / "paper.json",
        folder / "paper.md",
        bar_plot(folder / "paper.png", steps, title="Tokens per step", y="tokens per step", level=1.0, note=note),
        bar_plot(
            folder / "paper-speed.png", times, title="Over plain decoding", y="times as fast", level=1.0, note=note
        ),
    ]


def _as_json(row: PaperRow) -> dict[str, Any]:
    return {name: _number(value) for name, value in asdict(row).items()}


def _number(value: Any) -> Any:
    """JSON has no nan: null."""
    if isinstance(value, dict):
        return {name: _number(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
