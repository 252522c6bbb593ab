"""The paper's Table 1: the published figures, and the same from our measurements, with scores, one row per task."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from space_eval.acceptance.paired_decoding import PairedFigures, rates, speedup, tokens_per_step
from space_eval.paper.protocol import MeasuredQuestion
from space_eval.paper.tasks import PaperTask, PublishedFigure, PublishedModel
from space_eval.plots import Bar, bar_plot
from space_eval.quality.humaneval import CodingProblem, check, pass_at_k
from space_eval.quality.scores import rouge_l
from space_eval.report import Spread, columns_table, markdown_facts


@dataclass(frozen=True)
class TaskQuality:
    """A task's score in 0..1, of the model and, if run, of the base."""

    name: str
    model: float
    base: float | None
    num_answers: int

    @property
    def has_signal(self) -> bool:
        """Whether any score is above 0; otherwise the task cannot show a loss of quality."""
        return self.model > 0 or (self.base or 0) > 0


def quality_by_reference(task: PaperTask, measured: Sequence[MeasuredQuestion]) -> TaskQuality | None:
    """Return the mean score of the answers against the questions' references, or None for a task without any: ROUGE-L
    (F-measure), or whether the last number is the reference's."""
    if task.quality not in SCORES:
        return None
    score = SCORES[task.quality]
    ours = [score(one.question.reference, one.turns[-1].text) for one in measured]
    bases = [score(one.question.reference, one.turns[-1].base_text) for one in measured if one.turns[-1].base]
    return TaskQuality(task.quality, statistics.fmean(ours), statistics.fmean(bases) if bases else None, len(ours))


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


SCORES: Mapping[str, Callable[[str, str], float]] = {
    "ROUGE-L": rouge_l,
    "exact match": lambda reference, text: float(_last_number(text) == _last_number(reference)),
}


def pass_quality(
    measured: Sequence[MeasuredQuestion],
    problems: Mapping[str, CodingProblem],
    *,
    chat: bool,
    k: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> TaskQuality:
    """Return pass@1 of the greedy answers, or pass@k of the samples if k > 1.

    Runs the programs (`quality.code_execution`), equal texts only once.
    """
    known: dict[tuple[str, str], bool] = {}

    def passes(name: str, text: str) -> bool:
        if (name, text) not in known:
            known[name, text] = check(problems[name], text, chat=chat).passed
        return known[name, text]

    def score(name: str, texts: Sequence[str]) -> float:
        return pass_at_k(len(texts), sum(passes(name, text) for text in texts), k)

    ours, bases = [], []
    for one in measured:
        first, name = one.turns[0], one.question.name
        ours.append(score(name, one.samples if k > 1 else [first.text]))
        if first.base is not None:
            bases.append(score(name, one.base_samples if k > 1 else [first.base_text]))
        progress()
    return TaskQuality(f"pass@{k}", statistics.fmean(ours), statistics.fmean(bases) if bases else None, len(ours))


@dataclass(frozen=True, kw_only=True)
class PaperRow(PairedFigures):
    """One task, SPACE against plain decoding of the same weights."""

    task: str
    title: str
    num_questions: int  # measured so far
    num_asked: int  # in total
    num_answers: int  # a question with two turns has two
    tokens_per_step_not_looping: float  # nan if all outputs loop
    plain_tokens_per_second: Spread  # with prefill
    space_tokens_per_second: Spread
    speedup_over_base: Spread | None  # over plain decoding of the base
    num_truncated: int  # prompts truncated on the left
    quality: TaskQuality | None
    published: PublishedFigure | None
    categories: Mapping[str, float]  # tokens per step by category, if the task has categories


def summarise(
    task: PaperTask,
    measured: Sequence[MeasuredQuestion],
    num_asked: int,
    quality: TaskQuality | None,
    published: PublishedModel,
) -> PaperRow:
    """Return a task's row; `measured` has at least one question."""
    turns = [turn for one in measured for turn in one.turns]
    space, plain = [turn.space for turn in turns], [turn.plain for turn in turns]
    base = [turn.base for turn in turns if turn.base is not None]
    categories = {
        name: tokens_per_step([t.space for one in measured if one.question.category == name for t in one.turns])
        for name in sorted({one.question.category for one in measured} - {""})
    }
    return PaperRow(
        task=task.name,
        title=task.title,
        num_questions=len(measured),
        num_asked=num_asked,
        num_answers=len(turns),
        tokens_per_step_not_looping=tokens_per_step([answer for answer in space if not answer.is_looping]),
        plain_tokens_per_second=Spread.of(rates(plain)),
        space_tokens_per_second=Spread.of(rates(space)),
        speedup_over_base=speedup(space, base) if base else None,
        num_truncated=sum(turn.truncated for turn in turns),
        quality=quality,
        published=published.figures.get(task.name),
        categories=categories,
        **PaperRow.figures(space, plain),
    )


COLUMNS: Sequence[tuple[str, Callable[[PaperRow], str]]] = (
    ("task", lambda row: row.title),
    ("questions", lambda row: f"{row.num_questions}" + f" of {row.num_asked}" * (row.num_questions < row.num_asked)),
    ("tokens/step", lambda row: f"{row.tokens_per_step:.2f}"),
    ("not looping", lambda row: f"{row.tokens_per_step_not_looping:.2f}"),
    ("published", lambda row: "–" if row.published is None else f"{row.published.tokens_per_step:.2f}"),
    ("speed-up", lambda row: row.speedup.shown(2)),
    ("not looping", lambda row: "–" if row.speedup_not_looping is None else f"{row.speedup_not_looping.median:.2f}"),
    ("published", lambda row: "–" if row.published is None else f"{row.published.speedup:.2f}"),
    ("looping", lambda row: f"{row.looping:.0%}"),
    ("quality", lambda row: _quality(row.quality)),
    ("base", lambda row: _base_quality(row.quality)),
    ("same text", lambda row: f"{row.num_identical}/{row.num_answers}"),
)


def _quality(quality: TaskQuality | None) -> str:
    if quality is None:
        return "–"
    return f"{quality.name} {quality.model:.3f}" if quality.has_signal else f"{quality.name}: no signal"


def _base_quality(quality: TaskQuality | None) -> str:
    shown = quality is not None and quality.has_signal and quality.base is not None
    return f"{quality.base:.3f}" if quality is not None and shown else "–"


def to_markdown(rows: Sequence[PaperRow], facts: Mapping[str, object], published: PublishedModel) -> str:
    """Return the facts of the run, the table and its column descriptions as Markdown."""
    text = f"# The paper's Table 1, measured here\n\n{markdown_facts(facts)}\n{columns_table(COLUMNS, rows)}"
    for row in rows:
        if row.categories:
            parts = ", ".join(f"{name} {value:.2f}" for name, value in row.categories.items())
            text += f"\n{row.title}, tokens per step by category: {parts}.\n"
        if row.num_truncated:
            text += f"\n{row.title}: {row.num_truncated} prompts were too long for the window; their end was kept.\n"
    return text + NOTES.format(published.name)


NOTES = """
- published: {}, arXiv 2402.11809, Table 1: another model on another machine, k=5, batch 1.
- tokens/step: ids emitted in decode steps per step; the prompt's own forward pass does not count.
- not looping: without outputs of which at least half of the 4-grams occurred earlier in them.
- speed-up: tokens per second over plain decoding of the same weights in the same round, prompt included; median
  (lowest–highest) over the rounds.
- quality, base: of the model's answers and of the base's; 'no signal' where both are 0.
- same text: answers of SPACE equal to plain decoding's, id by id.
"""


def record(rows: Sequence[PaperRow], facts: Mapping[str, object], published: PublishedModel) -> dict[str, object]:
    """Return the content of paper.json."""
    return {"facts": facts, "published": asdict(published), "rows": [asdict(row) for row in rows]}


def draw(folder: Path, rows: Sequence[PaperRow], facts: Mapping[str, object], published: PublishedModel) -> list[Path]:
    """Draw paper.png (tokens per step) and paper-speed.png. Raises PlotError without matplotlib."""
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
    speed = folder / "paper-speed.png"
    return [
        bar_plot(folder / "paper.png", steps, title="Tokens per step", y="tokens per step", level=1.0, note=note),
        bar_plot(speed, times, title="Over plain decoding", y="times as fast", level=1.0, note=note),
    ]
