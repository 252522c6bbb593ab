"""The same prompt plain and with drafts, in turn: one machine, one set of weights, one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_model.checkpoint import Checkpoint
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.controller import Controller, FixedLayout
from space_server.worker import Worker

from space_eval.generation import Generation, generate
from space_eval.text_statistics import is_looping

PLAIN = 0
"""The k of plain decoding."""

_FINISH = {pb.FINISH_EOS: "eos", pb.FINISH_STOP_ID: "stop", pb.FINISH_LENGTH: "length"}


class TextsDiffer(AssertionError):
    """Speculation changed a text: never right, ties of floating point on a GPU aside."""


@dataclass(frozen=True)
class Answer:
    """What one setting gave for one prompt, computed `len(seconds)` times; only the seconds differ in between."""

    ids: tuple[int, ...]  # emitted, the prefill's own token included
    finish: str  # eos, stop or length
    num_steps: int  # decode steps: the prompt's own forward passes do not count
    num_decoded: int  # ids of the decode steps
    num_drafted: int
    num_accepted: int
    num_rows: int  # chain and mask rows of the decode steps
    seconds: tuple[float, ...]  # prompt and answer, each time
    decode_seconds: tuple[float, ...]  # the decode steps alone, each time

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Answer:
        """The inverse of `dataclasses.asdict`, after JSON."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in record.items()}
        return cls(**fields)

    @property
    def is_looping(self) -> bool:
        """By the rule of `text_statistics.is_looping`."""
        return is_looping(self.ids)


class _TimedWorker(Worker):
    """A worker that adds up what its steps took and laid out."""

    clock: Callable[[], float] = time.perf_counter
    seconds = 0.0
    num_rows = 0

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        started = self.clock()
        report = super().step(report)
        if report is not None and report.stepped:
            self.seconds += self.clock() - started
            if any(sequence.decoded for sequence in report.sequences):
                self.num_rows += report.stats.chain_rows + report.stats.mask_rows
        return report


class PairedDecoder:
    """One model behind one worker per k, plain decoding being k = 0, all of them for one sequence at a time."""

    def __init__(self, model: SpaceModel, ks: Sequence[int], *, layout: str = "full") -> None:
        """`layout`: full, the paper's (k+1)² rows; auto, what the server would lay out."""
        self.model = model
        self.ks = (PLAIN, *ks)
        self._workers = {k: _worker(model, k, layout) for k in self.ks}

    def warm_up(self, prompt: Sequence[int]) -> None:
        """A few untimed tokens at every k: the first products of a process are slower than all others."""
        for k in self.ks:
            self.once(k, prompt, sampling=pb.Sampling(), max_tokens=4)

    def run(self, prompt: Sequence[int], *, sampling: pb.Sampling, max_tokens: int, rounds: int) -> dict[int, Answer]:
        """Every k in turn, `rounds` times, every other round from the last k to the first.

        Raises TextsDiffer where a k does not repeat itself; whether the ks agree is `check_same_text`.
        """
        times: dict[int, list[Answer]] = {k: [] for k in self.ks}
        for number in range(rounds):
            for k in self.ks if number % 2 == 0 else reversed(self.ks):
                times[k].append(self.once(k, prompt, sampling=sampling, max_tokens=max_tokens))
        return {k: _merged(k, answers) for k, answers in times.items()}

    def once(self, k: int, prompt: Sequence[int], *, sampling: pb.Sampling, max_tokens: int) -> Answer:
        """One answer, timed once."""
        worker = self._workers[k]
        worker.seconds, worker.num_rows = 0.0, 0
        (made,) = generate(
            worker,
            [list(prompt)],
            sampling=sampling,
            max_tokens=max_tokens,
            max_draft_length=k,
            eos_ids=self.model.facts.eos_ids,
        )
        return _answer(made, worker)


def space_files(checkpoint: Checkpoint) -> list[Path]:
    """What makes a checkpoint more than its base, mask rows of the embedding aside: adapter and draft head."""
    section = checkpoint.config.get("space") or {}
    head = section.get("draft_head")
    named = [section.get("adapter"), head.get("file") if isinstance(head, dict) else None]
    places = [checkpoint.home / name for name in named if name]
    return [file for place in places for file in (sorted(place.glob("*.safetensors")) if place.is_dir() else [place])]


def check_same_text(answers: Mapping[int, Answer], name: str) -> None:
    """Raise TextsDiffer unless all ks gave the same ids; `name` is the prompt's."""
    plain = answers[PLAIN].ids
    for k, answer in answers.items():
        if answer.ids != plain:
            place = next((n for n, pair in enumerate(zip(answer.ids, plain, strict=False)) if pair[0] != pair[1]), None)
            where = "in its length" if place is None else f"from token {place + 1} on"
            raise TextsDiffer(f"{name}: the text with k={k} differs from plain decoding's {where}.")


def _merged(k: int, answers: Sequence[Answer]) -> Answer:
    first = answers[0]
    if any(answer.ids != first.ids for answer in answers):
        raise TextsDiffer(f"The same prompt gave two texts with k={k} in two rounds: this run cannot be trusted.")
    return Answer(
        ids=first.ids,
        finish=first.finish,
        num_steps=first.num_steps,
        num_decoded=first.num_decoded,
        num_drafted=first.num_drafted,
        num_accepted=first.num_accepted,
        num_rows=first.num_rows,
        seconds=tuple(answer.seconds[0] for answer in answers),
        decode_seconds=tuple(answer.decode_seconds[0] for answer in answers),
    )


def _answer(made: Generation, worker: _TimedWorker) -> Answer:
    return Answer(
        ids=tuple(made.tokens),
        finish=_FINISH[made.finish],
        num_steps=len(made.steps),
        num_decoded=made.num_decoded,
        num_drafted=sum(step.num_drafted for step in made.steps),
        num_accepted=sum(step.num_accepted for step in made.steps),
        num_rows=worker.num_rows,
        seconds=(worker.seconds,),
        decode_seconds=(made.decode_seconds,),
    )


def _worker(model: SpaceModel, k: int, layout: str) -> _TimedWorker:
    controller: Controller | None = None if layout == "auto" else FixedLayout.full(k)  # None: by measured cost
    num_blocks = -(-(model.facts.window + model.facts.num_masks + 1) // 16)
    return _TimedWorker(model, num_blocks=num_blocks, max_sequences=1, max_draft_length=k, controller=controller)
