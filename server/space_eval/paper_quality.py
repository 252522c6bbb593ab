"""How good the answers are, by each task's own measure: ROUGE-L, pass@k, exact match."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from space_eval.humaneval import Problem, check
from space_eval.paper_run import Measured
from space_eval.pass_at_k import pass_at_k
from space_eval.rouge import rouge_l


@dataclass(frozen=True)
class Quality:
    """A task's score of 1, of the model and, where it was run, of the base."""

    name: str
    model: float
    base: float | None
    num_answers: int

    @property
    def has_signal(self) -> bool:
        """A measure on which everybody scores 0 says nothing about what was kept."""
        return self.model > 0 or (self.base or 0) > 0


def rouge_quality(measured: Sequence[Measured]) -> Quality:
    """Mean ROUGE-L (F-measure) against the questions' references."""
    return _mean("ROUGE-L", measured, rouge_l)


def exact_match_quality(measured: Sequence[Measured]) -> Quality:
    """Share of answers whose last number is the reference's."""
    return _mean("exact match", measured, lambda reference, text: float(_last_number(text) == _last_number(reference)))


def pass_quality(
    measured: Sequence[Measured],
    problems: Mapping[str, Problem],
    *,
    chat: bool,
    k: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> Quality:
    """pass@1 of the greedy answers, or pass@k of the samples where k is more than 1.

    The tests run in the sandbox; of equal texts only one is run.
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
    return Quality(f"pass@{k}", statistics.fmean(ours), statistics.fmean(bases) if bases else None, len(ours))


def _mean(name: str, measured: Sequence[Measured], score: Callable[[str, str], float]) -> Quality:
    ours = [score(one.question.reference, one.turns[-1].text) for one in measured]
    bases = [score(one.question.reference, one.turns[-1].base_text) for one in measured if one.turns[-1].base]
    return Quality(name, statistics.fmean(ours), statistics.fmean(bases) if bases else None, len(ours))


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None
