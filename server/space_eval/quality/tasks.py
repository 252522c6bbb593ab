"""The quality tasks: their prompts, and the scoring of answers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_eval.data import load_records
from space_eval.quality import humaneval
from space_eval.quality.humaneval import pass_at_k
from space_eval.quality.perplexity import PerplexityMeter, TextScore, load_texts
from space_eval.quality.scores import Score, rouge_l, rouge_l_sum
from space_eval.report import Journal

Answer = dict[str, Any]  # has `record`, `sample` and the task's own fields

Answers = Journal[tuple[str, int]]


def open_answers(file: Path | None) -> Answers:
    """Return the finished answers of one model to one task, by record and sample. Raises JournalError."""
    return Journal(file, lambda answer: (str(answer["record"]), int(answer["sample"])))


PASS_AT = (1, 10, 100)
SUMMARY_FIELDS = (("document", "summary"), ("article", "highlights"), ("text", "summary"), ("dialogue", "summary"))


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt: `{prompt}` in the template stands for the text, which is cut if the window is too short."""

    template: str
    text: str
    keep_end: bool  # a text that is too long keeps its end (True) or its beginning


def _by_record(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer["record"], []).append(answer)
    return found


@dataclass(frozen=True)
class HumanEval:
    """Functions to write, checked by running their tests."""

    problems: dict[str, humaneval.CodingProblem]
    chat: bool
    seconds: float
    memory: int
    name: str = "humaneval"

    @classmethod
    def load(cls, source: str, limit: int | None, *, chat: bool, seconds: float, memory: int) -> HumanEval:
        problems = {problem.task_id: problem for problem in humaneval.load_problems(source, limit)}
        return cls(problems, chat, seconds, memory)

    @property
    def keys(self) -> list[str]:
        """The records' names."""
        return list(self.problems)

    def asked(self, key: str) -> TaskPrompt:
        """Return the prompt of a record."""
        return TaskPrompt(humaneval.CHAT_REQUEST if self.chat else "{prompt}", self.problems[key].prompt, keep_end=True)

    def is_whole(self, text: str) -> bool:
        """Return whether the answer is complete, so that generation can stop."""
        return not self.chat and humaneval.is_whole(text)

    def score_answer(self, key: str, text: str) -> dict[str, Any]:
        """Return the score's fields of an answer."""
        outcome = humaneval.check(self.problems[key], text, seconds=self.seconds, memory=self.memory, chat=self.chat)
        return {"passed": outcome.passed, "end": outcome.end, "detail": outcome.detail}

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """Return pass@1, and pass@10 and pass@100 if every problem has enough samples."""
        counts = {key: (len(own), sum(a["passed"] for a in own)) for key, own in _by_record(answers).items()}
        fewest = min((n for n, _ in counts.values()), default=0)
        return [
            Score(f"pass@{k}", {key: (pass_at_k(n, c, k), 1.0) for key, (n, c) in counts.items()})
            for k in PASS_AT
            if k <= fewest
        ]


@dataclass(frozen=True)
class Summarise:
    """Texts to summarise, compared with reference summaries."""

    texts: dict[str, tuple[str, str]]  # document, reference
    chat: bool
    name: str = "summarise"

    @classmethod
    def load(cls, source: str, limit: int | None, *, chat: bool) -> Summarise:
        texts = {}
        for number, record in enumerate(load_records(source, needs=SUMMARY_FIELDS)[:limit]):
            document, summary = next(
                pair for pair in SUMMARY_FIELDS if all(isinstance(record.get(field), str) for field in pair)
            )
            texts[str(number)] = (record[document], record[summary])
        return cls(texts, chat)

    @property
    def keys(self) -> list[str]:
        return list(self.texts)

    def asked(self, key: str) -> TaskPrompt:
        template = "Summarise the following text.\n\n{prompt}" if self.chat else "{prompt}\n\nSummary:"
        return TaskPrompt(template, self.texts[key][0], keep_end=False)

    def is_whole(self, text: str) -> bool:
        """A base model's summary is its first paragraph."""
        return not self.chat and "\n\n" in text.lstrip()

    def score_answer(self, key: str, text: str) -> dict[str, Any]:
        summary = text.strip() if self.chat else text.lstrip().partition("\n\n")[0].strip()
        reference = self.texts[key][1]
        return {"rouge_l": rouge_l(reference, summary), "rouge_l_sum": rouge_l_sum(reference, summary)}

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """Return mean F-measures; also of only the answers that do not loop, if some loop."""
        scores = [_mean_score("ROUGE-L", answers, "rouge_l"), _mean_score("ROUGE-L-sum", answers, "rouge_l_sum")]
        steady = [answer for answer in answers if not answer["looping"]]
        if 0 < len(steady) < len(answers):
            scores.append(_mean_score("ROUGE-L, not looping", steady, "rouge_l"))
        return scores


WritingTask = HumanEval | Summarise  # the tasks with generated answers


def _mean_score(name: str, answers: Sequence[Answer], field: str) -> Score:
    means = {key: statistics.fmean(a[field] for a in own) for key, own in _by_record(answers).items()}
    return Score(name, {key: (mean, 1.0) for key, mean in means.items()})


@dataclass(frozen=True)
class Perplexity:
    """Texts scored by perplexity."""

    texts: dict[str, str]
    name: str = "perplexity"

    @classmethod
    def load(cls, source: str, limit: int | None) -> Perplexity:
        return cls(dict(list(load_texts(source).items())[:limit]))

    def score_answer(self, key: str, meter: PerplexityMeter) -> dict[str, Any]:
        return asdict(meter.score(self.texts[key]))

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """Return bits per byte (comparable between any models) and perplexity per token (within one tokenizer)."""
        read = {a["record"]: TextScore(a["nats"], a["num_tokens"], a["num_bytes"]) for a in answers}
        counted = {key: score for key, score in read.items() if score.num_tokens}
        bits = {key: (score.bits_per_byte * score.num_bytes, float(score.num_bytes)) for key, score in counted.items()}
        nats = {key: (score.nats, float(score.num_tokens)) for key, score in counted.items()}
        return [
            Score("bits per byte", bits, lower_is_better=True),
            Score("perplexity", nats, exponential=True, lower_is_better=True),
        ]
