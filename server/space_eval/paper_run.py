"""The paper's protocol over one task: plain and SPACE in turn, prompt by prompt, each written down when it is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from space_proto import worker_pb2 as pb
from tokenizers import Tokenizer

from space_eval.paper_journal import Journal
from space_eval.paper_prompts import Family
from space_eval.paper_tasks import Question, Task
from space_eval.speed_decoding import PLAIN, Answer, PairedDecoder
from space_eval.text_behind import text_behind

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_P = 0.95
"""Of the samples for pass@10, as usual since HumanEval."""


class StoppedEarly(Exception):
    """The run has measured as many new questions as it was allowed to; the journal has them."""


@dataclass(frozen=True)
class Turn:
    """One answer of the model, plain and with SPACE, and of the base."""

    num_prompt_ids: int
    truncated: bool  # the prompt's beginning was cut off to leave room for the answer
    plain: Answer
    space: Answer
    text: str  # of SPACE
    base: Answer | None = None
    base_text: str = ""

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Turn:
        """The inverse of `dataclasses.asdict`, after JSON."""
        answers = {name: Answer.parse(record[name]) for name in ("plain", "space", "base") if record[name] is not None}
        return cls(**{**record, **answers})


@dataclass(frozen=True)
class Measured:
    """One question with all its turns, and samples of its answer if they were asked for."""

    question: Question
    turns: tuple[Turn, ...]
    samples: tuple[str, ...] = ()
    base_samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompted:
    """A prompt in ids, as long as it may be."""

    ids: list[int]
    truncated: bool  # its beginning was cut off
    room: int  # new ids that fit behind it, at most as many as asked for


@dataclass(frozen=True)
class Speaker:
    """A model, its tokenizer, and how it is spoken to."""

    decoder: PairedDecoder
    tokenizer: Tokenizer
    family: Family

    def prompt(self, question: Question, answers: Sequence[str], max_tokens: int) -> Prompted:
        """The prompt of turn `len(answers)`.

        Its beginning is cut off only where less than `max_tokens` and less than half of the window would remain.
        """
        window = self.decoder.model.facts.window
        turns = question.turns if self.family.is_chat else question.plain_turns
        ids = self.tokenizer.encode(self.family.prompt(turns, answers)).ids
        kept = ids[-max(window - max_tokens, window // 2) :]
        return Prompted(kept, len(kept) < len(ids), min(max_tokens, window - len(kept)))

    def answers(self, prompt: Prompted, sampling: pb.Sampling, rounds: int) -> dict[int, Answer]:
        """By k, plain decoding included."""
        return self.decoder.run(prompt.ids, sampling=sampling, max_tokens=prompt.room, rounds=rounds)

    def text(self, prompt: Prompted, answer: Answer) -> str:
        """What the answer says behind the prompt, without special tokens."""
        return text_behind(self._text, prompt.ids, answer.ids)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class Protocol:
    """What is the same for every question."""

    speaker: Speaker
    k: int
    rounds: int
    temperature: float
    seed: int
    base: Speaker | None = None
    num_samples: int = 0  # for pass@10

    def measure(self, question: Question, number: int, max_tokens: int) -> Measured:
        """All turns of a question; the second turn's prompt holds the first answer, the base's its own."""
        sampling = pb.Sampling(seed=self.seed + number, temperature=self.temperature)
        turns: list[Turn] = []
        while len(turns) < len(question.turns):
            prompt = self.speaker.prompt(question, [turn.text for turn in turns], max_tokens)
            answers = self.speaker.answers(prompt, sampling, self.rounds)
            base, base_text = None, ""
            if self.base is not None:
                base_prompt = self.base.prompt(question, [turn.base_text for turn in turns], max_tokens)
                base = self.base.answers(base_prompt, sampling, self.rounds)[PLAIN]
                base_text = self.base.text(base_prompt, base)
            turns.append(
                Turn(
                    num_prompt_ids=len(prompt.ids),
                    truncated=prompt.truncated,
                    plain=answers[PLAIN],
                    space=answers[self.k],
                    text=self.speaker.text(prompt, answers[self.k]),
                    base=base,
                    base_text=base_text,
                )
            )
        return Measured(question, tuple(turns))

    def with_samples(self, measured: Measured, number: int, max_tokens: int) -> Measured:
        """The same, and `num_samples` sampled first answers of the model (with SPACE) and of the base."""
        made = self._samples(self.speaker, self.k, measured.question, number, max_tokens)
        base = self._samples(self.base, PLAIN, measured.question, number, max_tokens) if self.base is not None else ()
        return replace(measured, samples=made, base_samples=base)

    def _samples(self, speaker: Speaker, k: int, question: Question, number: int, max_tokens: int) -> tuple[str, ...]:
        prompt = speaker.prompt(question, [], max_tokens)
        texts = []
        for choice in range(self.num_samples):
            sampling = pb.Sampling(
                seed=self.seed + number, choice=choice, temperature=SAMPLE_TEMPERATURE, top_p=SAMPLE_TOP_P
            )
            answer = speaker.decoder.once(k, prompt.ids, sampling=sampling, max_tokens=prompt.room)
            texts.append(speaker.text(prompt, answer))
        return tuple(texts)


def run_task(
    protocol: Protocol,
    task: Task,
    questions: Sequence[Question],
    journal: Journal,
    *,
    max_tokens: int,
    most_new: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Measure every question that the journal does not have; raises StoppedEarly before new question `most_new` + 1.

    `progress` is called once for each question that is there.
    """
    num_new = 0
    for number, question in enumerate(questions):
        key = _key(protocol, task, question, number, max_tokens)
        if key not in journal:
            if most_new is not None and num_new >= most_new:
                raise StoppedEarly
            measured = protocol.measure(question, number, max_tokens)
            if protocol.num_samples > 0 and task.quality == "pass":
                measured = protocol.with_samples(measured, number, max_tokens)
            journal.add(key, _as_line(measured))
            num_new += 1
        progress()


def measured_so_far(
    protocol: Protocol, task: Task, questions: Sequence[Question], journal: Journal, *, max_tokens: int
) -> list[Measured]:
    """What the journal has of these questions."""
    keys = [(q, _key(protocol, task, q, number, max_tokens)) for number, q in enumerate(questions)]
    return [_of_line(question, journal[key]) for question, key in keys if key in journal]


def _key(protocol: Protocol, task: Task, question: Question, number: int, max_tokens: int) -> str:
    """Everything an answer depends on that may change between two calls on one journal."""
    samples = protocol.num_samples if task.quality == "pass" else 0
    return f"{task.name} {number} {_digest(question)} {max_tokens}" + (f" {samples} samples" if samples else "")


def _digest(question: Question) -> str:
    """Of what is asked: a journal is not reused for other questions."""
    return hashlib.sha256("\0".join((*question.turns, *question.plain_turns)).encode()).hexdigest()[:12]


def _as_line(measured: Measured) -> dict[str, object]:
    return {
        "name": measured.question.name,
        "turns": [asdict(turn) for turn in measured.turns],
        "samples": measured.samples,
        "base_samples": measured.base_samples,
    }


def _of_line(question: Question, line: Mapping[str, Any]) -> Measured:
    turns = tuple(Turn.parse(turn) for turn in line["turns"])
    return Measured(question, turns, tuple(line["samples"]), tuple(line["base_samples"]))
