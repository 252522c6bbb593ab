"""How the answers to the paper's questions are measured, and the journal of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from space_train.run_folder import fingerprint, parts_digest
from tokenizers import Tokenizer

from space_eval.acceptance.generation import load_chat_template, text_behind
from space_eval.acceptance.paired_decoding import PLAIN, PairedDecoder, TimedAnswer
from space_eval.paper.tasks import TEMPLATE, PaperTask, PromptFamily, Question
from space_eval.report import Journal, from_json


def template_of(model: str) -> PromptFamily | None:
    """Return the family of a model's own chat template, or None if it has none."""
    render = load_chat_template(model)
    return None if render is None else PromptFamily(TEMPLATE, "", "", render=render)


SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_P = 0.95  # top-p of the samples for pass@10, as in HumanEval


@dataclass(frozen=True)
class Turn:
    """One turn's answers: of the model, plain and with SPACE, and of the base."""

    num_prompt_ids: int
    truncated: bool  # the prompt was truncated on the left to fit the answer
    plain: TimedAnswer
    space: TimedAnswer
    text: str  # answer with SPACE
    base: TimedAnswer | None = None
    base_text: str = ""

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Turn:
        """The inverse of `dataclasses.asdict`, after JSON."""
        names = [name for name in ("plain", "space", "base") if record[name] is not None]
        answers = {name: from_json(TimedAnswer, record[name]) for name in names}
        return cls(**{**record, **answers})


@dataclass(frozen=True)
class MeasuredQuestion:
    """One question with all its turns, and sampled answers if requested."""

    question: Question
    turns: tuple[Turn, ...]
    samples: tuple[str, ...] = ()
    base_samples: tuple[str, ...] = ()

    def as_line(self) -> dict[str, Any]:
        """Return the line of the journal, without its key."""
        samples = {"samples": self.samples, "base_samples": self.base_samples}
        return {"name": self.question.name, "turns": list(map(asdict, self.turns)), **samples}

    @classmethod
    def parse(cls, question: Question, line: Mapping[str, Any]) -> MeasuredQuestion:
        """The inverse of `as_line`, after JSON."""
        turns = tuple(map(Turn.parse, line["turns"]))
        return cls(question, turns, tuple(line["samples"]), tuple(line["base_samples"]))


@dataclass(frozen=True)
class FittedPrompt:
    """Prompt ids, truncated to fit the window."""

    ids: list[int]
    truncated: bool  # truncated on the left
    room: int  # new ids that fit after it, at most the requested number


@dataclass(frozen=True)
class PromptedModel:
    """A model, its tokenizer and its prompt format."""

    decoder: PairedDecoder
    tokenizer: Tokenizer
    family: PromptFamily

    def prompt(self, question: Question, answers: Sequence[str], max_tokens: int) -> FittedPrompt:
        """Return the prompt of turn `len(answers)`.

        It is truncated on the left only if less than `max_tokens` and less than half of the window would remain.
        """
        window = self.decoder.model.facts.window
        turns = question.turns if self.family.is_chat else question.plain_turns
        text = self.family.prompt(turns, answers)
        ids = self.tokenizer.encode(text, add_special_tokens=self.family.render is None).ids
        kept = ids[-max(window - max_tokens, window // 2) :]
        return FittedPrompt(kept, len(kept) < len(ids), min(max_tokens, window - len(kept)))

    def answers(self, prompt: FittedPrompt, **how: Any) -> dict[int, TimedAnswer]:
        """Return the answers by k, including plain decoding; `how`: sampling and rounds."""
        return self.decoder.run(prompt.ids, max_tokens=prompt.room, **how)

    def text(self, prompt: FittedPrompt, answer: Sequence[int]) -> str:
        """Decode `answer` as it follows the prompt, without special tokens."""
        return text_behind(lambda ids: str(self.tokenizer.decode(list(ids))), prompt.ids, answer)


@dataclass(frozen=True)
class PaperProtocol:
    """Settings and models shared by all questions."""

    model: PromptedModel
    k: int
    rounds: int
    temperature: float
    seed: int
    base: PromptedModel | None = None
    num_samples: int = 0  # for pass@10

    def measure(self, question: Question, number: int, max_tokens: int) -> MeasuredQuestion:
        """Measure all turns of a question; later prompts include each model's own earlier answers."""
        sampling = pb.Sampling(seed=self.seed + number, temperature=self.temperature)
        how = {"sampling": sampling, "rounds": self.rounds}
        turns: list[Turn] = []
        while len(turns) < len(question.turns):
            prompt = self.model.prompt(question, [turn.text for turn in turns], max_tokens)
            answers = self.model.answers(prompt, **how)
            base, base_text = None, ""
            if self.base is not None:
                base_prompt = self.base.prompt(question, [turn.base_text for turn in turns], max_tokens)
                base = self.base.answers(base_prompt, **how)[PLAIN]
                base_text = self.base.text(base_prompt, base.ids)
            turns.append(
                Turn(
                    num_prompt_ids=len(prompt.ids),
                    truncated=prompt.truncated,
                    plain=answers[PLAIN],
                    space=answers[self.k],
                    text=self.model.text(prompt, answers[self.k].ids),
                    base=base,
                    base_text=base_text,
                )
            )
        return MeasuredQuestion(question, tuple(turns))

    def with_samples(self, measured: MeasuredQuestion, number: int, max_tokens: int) -> MeasuredQuestion:
        """Return `measured` with `num_samples` sampled first answers of the model (with SPACE) and of the base."""

        def samples(model: PromptedModel, k: int) -> Iterator[str]:
            prompt = model.prompt(measured.question, [], max_tokens)
            for choice in range(self.num_samples):
                how = pb.Sampling(
                    temperature=SAMPLE_TEMPERATURE, top_p=SAMPLE_TOP_P, seed=self.seed + number, choice=choice
                )
                answer = model.decoder.once(k, prompt.ids, sampling=how, max_tokens=prompt.room)
                yield model.text(prompt, answer.tokens)

        base = () if self.base is None else tuple(samples(self.base, PLAIN))
        return replace(measured, samples=tuple(samples(self.model, self.k)), base_samples=base)


def open_journal(file: Path, settings: Mapping[str, Any]) -> Journal[str]:
    """Open or create the journal of finished questions; its first line has the settings. Raises JournalError."""
    journal: Journal[str] = Journal(file, lambda line: str(line["key"]))
    journal.keep_settings(settings)
    return journal


def run_task(
    protocol: PaperProtocol,
    task: PaperTask,
    questions: Sequence[Question],
    journal: Journal[str],
    *,
    max_tokens: int,
    most_new: int | None = None,
) -> Iterator[MeasuredQuestion]:
    """Yield every question's result, from the journal or measured now; stop before new question `most_new` + 1."""
    num_new = 0
    for number, question in enumerate(questions):
        key = _key(protocol, task, question, number, max_tokens)
        if key not in journal:
            if num_new == most_new:
                return
            measured = protocol.measure(question, number, max_tokens)
            if protocol.num_samples > 0 and task.quality == "pass":
                measured = protocol.with_samples(measured, number, max_tokens)
            journal.add({"key": key, **measured.as_line()})
            num_new += 1
        yield MeasuredQuestion.parse(question, journal[key])


def _key(protocol: PaperProtocol, task: PaperTask, question: Question, number: int, max_tokens: int) -> str:
    """Return a key of everything an answer depends on that may change between two calls on one journal."""
    samples = protocol.num_samples if task.quality == "pass" else 0
    digest = hashlib.sha256("\0".join((*question.turns, *question.plain_turns)).encode()).hexdigest()[:12]
    return f"{task.name} {number} {digest} {max_tokens}" + (f" {samples} samples" if samples else "")


def weights_digest(model: str) -> str:
    """Return 24 hexadecimal digits of config, samples of the weights, adapter and draft head."""
    checkpoint = Checkpoint.open(model)
    return fingerprint(checkpoint) + parts_digest(checkpoint)
