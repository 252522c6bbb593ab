"""The paper's protocol for one task: plain and SPACE in turn on each prompt; a journal keeps finished prompts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint import Checkpoint
from space_proto import worker_pb2 as pb
from tokenizers import Tokenizer

from space_eval.acceptance.paired_decoding import PLAIN, PairedDecoder, TimedAnswer, space_files
from space_eval.acceptance.text_statistics import text_behind
from space_eval.paper.tasks import PaperTask, PromptFamily, Question
from space_eval.prompts import PromptError
from space_eval.quality.answers import complete_lines

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_P = 0.95
"""Top-p of the samples for pass@10, as in HumanEval."""


class StoppedEarly(Exception):
    """The run reached its limit of new questions; the journal has their results."""


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
        answers = {
            name: TimedAnswer.parse(record[name]) for name in ("plain", "space", "base") if record[name] is not None
        }
        return cls(**{**record, **answers})


@dataclass(frozen=True)
class MeasuredQuestion:
    """One question with all its turns, and sampled answers if requested."""

    question: Question
    turns: tuple[Turn, ...]
    samples: tuple[str, ...] = ()
    base_samples: tuple[str, ...] = ()


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
        ids = self.tokenizer.encode(self.family.prompt(turns, answers)).ids
        kept = ids[-max(window - max_tokens, window // 2) :]
        return FittedPrompt(kept, len(kept) < len(ids), min(max_tokens, window - len(kept)))

    def answers(self, prompt: FittedPrompt, sampling: pb.Sampling, rounds: int) -> dict[int, TimedAnswer]:
        """Return the answers by k, including plain decoding."""
        return self.decoder.run(prompt.ids, sampling=sampling, max_tokens=prompt.room, rounds=rounds)

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
        turns: list[Turn] = []
        while len(turns) < len(question.turns):
            prompt = self.model.prompt(question, [turn.text for turn in turns], max_tokens)
            answers = self.model.answers(prompt, sampling, self.rounds)
            base, base_text = None, ""
            if self.base is not None:
                base_prompt = self.base.prompt(question, [turn.base_text for turn in turns], max_tokens)
                base = self.base.answers(base_prompt, sampling, self.rounds)[PLAIN]
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
        made = self._samples(self.model, self.k, measured.question, number, max_tokens)
        base = self._samples(self.base, PLAIN, measured.question, number, max_tokens) if self.base is not None else ()
        return replace(measured, samples=made, base_samples=base)

    def _samples(
        self, model: PromptedModel, k: int, question: Question, number: int, max_tokens: int
    ) -> tuple[str, ...]:
        prompt = model.prompt(question, [], max_tokens)
        texts = []
        for choice in range(self.num_samples):
            sampling = pb.Sampling(
                seed=self.seed + number, choice=choice, temperature=SAMPLE_TEMPERATURE, top_p=SAMPLE_TOP_P
            )
            answer = model.decoder.once(k, prompt.ids, sampling=sampling, max_tokens=prompt.room)
            texts.append(model.text(prompt, answer.tokens))
        return tuple(texts)


def run_task(
    protocol: PaperProtocol,
    task: PaperTask,
    questions: Sequence[Question],
    journal: Journal,
    *,
    max_tokens: int,
    most_new: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Measure every question not in the journal. Raises StoppedEarly before new question `most_new` + 1.

    `progress` is called once for each finished question.
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
    protocol: PaperProtocol, task: PaperTask, questions: Sequence[Question], journal: Journal, *, max_tokens: int
) -> list[MeasuredQuestion]:
    """Return the journal's results for these questions."""
    keys = [(q, _key(protocol, task, q, number, max_tokens)) for number, q in enumerate(questions)]
    return [_of_line(question, journal[key]) for question, key in keys if key in journal]


def _key(protocol: PaperProtocol, task: PaperTask, question: Question, number: int, max_tokens: int) -> str:
    """Return a key of everything an answer depends on that may change between two calls on one journal."""
    samples = protocol.num_samples if task.quality == "pass" else 0
    return f"{task.name} {number} {_digest(question)} {max_tokens}" + (f" {samples} samples" if samples else "")


def _digest(question: Question) -> str:
    """Return a digest of the question, so that a journal is not reused for other questions."""
    return hashlib.sha256("\0".join((*question.turns, *question.plain_turns)).encode()).hexdigest()[:12]


def _as_line(measured: MeasuredQuestion) -> dict[str, object]:
    return {
        "name": measured.question.name,
        "turns": [asdict(turn) for turn in measured.turns],
        "samples": measured.samples,
        "base_samples": measured.base_samples,
    }


def _of_line(question: Question, line: Mapping[str, Any]) -> MeasuredQuestion:
    turns = tuple(Turn.parse(turn) for turn in line["turns"])
    return MeasuredQuestion(question, turns, tuple(line["samples"]), tuple(line["base_samples"]))


_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash of config, weights, adapter and draft head, from 64 samples of each file to be fast."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for file in [*checkpoint.weights, *space_files(checkpoint)]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


class JournalError(PromptError):
    """The journal belongs to another run; the message names what differs and the cure."""


class Journal:
    """An append-only JSONL file: the settings first, then one line per key. An incomplete last line is dropped."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Open or create `file`. Raises JournalError if its settings differ."""
        self.file = file
        self._lines: dict[str, dict[str, Any]] = {}
        found = self._read()
        wanted = json.loads(json.dumps(dict(settings)))
        if found is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._append({"settings": wanted})
        elif found != wanted:
            name = next(name for name in [*wanted, *found] if found.get(name) != wanted.get(name))
            raise JournalError(
                f"{file} was begun with {name} {found.get(name)!r}; this run has {wanted.get(name)!r}. "
                "Give another --out, or the same flags as before."
            )

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._lines[key]

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, key: str, line: Mapping[str, Any]) -> None:
        """Append a line and flush it to disk."""
        self._append({"key": key, **line})
        self._lines[key] = json.loads(json.dumps(dict(line)))

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self) -> dict[str, Any] | None:
        """Read the journal. Return its settings, or None if it does not exist."""
        settings: dict[str, Any] | None = None
        for number, text in enumerate(complete_lines(self.file), start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise JournalError(f"{self.file}:{number} is not JSON: {error}. Give another --out.") from error
            if "settings" in line:
                settings = line["settings"]
            else:
                self._lines[line.pop("key")] = line
        return settings
