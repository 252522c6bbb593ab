"""Decodes each prompt plain and with drafts in turn, on one machine, with the same weights, in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_common.repetition import is_looping
from space_common.worker.completion import CompletionOutput, generate
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import Controller, FixedLayout
from space_server.worker import Worker

from space_eval.report import Spread, ratio

PLAIN = 0  # the k of plain decoding

_FINISH = {pb.FINISH_EOS: "eos", pb.FINISH_STOP_ID: "stop", pb.FINISH_LENGTH: "length"}


class TextsDiffer(AssertionError):
    """Speculation changed a text: always a defect, except for floating-point ties on a GPU."""


@dataclass(frozen=True)
class TimedAnswer:
    """One setting's answer to one prompt, computed `len(seconds)` times; only the seconds differ."""

    ids: tuple[int, ...]  # emitted, including the prefill's token
    finish: str  # eos, stop or length
    num_steps: int  # decode steps, without prefill
    num_decoded: int  # ids of the decode steps
    num_drafted: int
    num_accepted: int
    num_rows: int  # chain and mask rows of the decode steps
    seconds: tuple[float, ...]  # prefill and decode, of each run
    decode_seconds: tuple[float, ...]  # decode steps only, of each run

    @classmethod
    def of(cls, made: Sequence[CompletionOutput]) -> TimedAnswer:
        """Build from several generations of the same ids."""
        first = made[0]
        return cls(
            ids=tuple(first.tokens),
            finish=_FINISH[first.finish],
            num_steps=len(first.steps),
            num_decoded=first.num_decoded,
            num_drafted=sum(step.num_drafted for step in first.steps),
            num_accepted=sum(step.num_accepted for step in first.steps),
            num_rows=first.num_rows,
            seconds=tuple(one.seconds for one in made),
            decode_seconds=tuple(one.decode_seconds for one in made),
        )

    @property
    def is_looping(self) -> bool:
        """Whether the answer repeats itself, see `space_common.repetition`."""
        return is_looping(self.ids)


class PairedDecoder:
    """One model with one worker per k (plain decoding is k = 0), each for one sequence at a time."""

    def __init__(self, model: SpaceModel, ks: Sequence[int], *, layout: str = "full") -> None:
        """`layout`: full, the paper's (k+1)² rows; auto, the server's choice."""
        self.model = model
        self.ks = (PLAIN, *ks)
        self._workers = {k: make_worker(model, k, layout) for k in self.ks}

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Generate a few untimed tokens at every k, because the first matmuls of a process are slow."""
        for k in self.ks:
            self.once(k, prompt, sampling=pb.Sampling(), max_tokens=4)

    def run(
        self, prompt: Sequence[int], *, sampling: pb.Sampling, max_tokens: int, rounds: int
    ) -> dict[int, TimedAnswer]:
        """Decode with every k in turn, `rounds` times, in reverse order in every other round.

        Raises TextsDiffer if a k's rounds differ from each other; `check_same_text` compares the ks.
        """
        made: dict[int, list[CompletionOutput]] = {k: [] for k in self.ks}
        for number in range(rounds):
            for k in self.ks if number % 2 == 0 else reversed(self.ks):
                made[k].append(self.once(k, prompt, sampling=sampling, max_tokens=max_tokens))
                if made[k][-1].tokens != made[k][0].tokens:
                    raise TextsDiffer(
                        f"The same prompt gave two texts with k={k} in two rounds: do not trust this run."
                    )
        return {k: TimedAnswer.of(of_k) for k, of_k in made.items()}

    def once(self, k: int, prompt: Sequence[int], *, sampling: pb.Sampling, max_tokens: int) -> CompletionOutput:
        """Generate one answer, timed once."""
        limits = {"max_tokens": max_tokens, "max_draft_length": k, "eos_ids": self.model.facts.eos_ids}
        (made,) = generate(self._workers[k], [prompt], sampling=sampling, **limits)
        return made


def make_worker(model: SpaceModel, k: int, layout: str) -> Worker:
    """Make a worker for one sequence with at most k drafts; `layout` is full or auto (by measured cost)."""
    controller: Controller | None = None if layout == "auto" else FixedLayout.full(k)
    num_blocks = -(-(model.facts.window + model.facts.num_masks + 1) // 16)
    return Worker(model, num_blocks=num_blocks, max_sequences=1, max_draft_length=k, controller=controller)


def space_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of adapter and draft head, which a SPACE checkpoint has besides its base."""
    section = checkpoint.config.get("space") or {}
    head = section.get("draft_head")
    named = [section.get("adapter"), head.get("file") if isinstance(head, dict) else None]
    places = [checkpoint.home / name for name in named if name]
    return [file for place in places for file in (sorted(place.glob("*.safetensors")) if place.is_dir() else [place])]


def check_same_text(answers: Mapping[int, TimedAnswer], name: str) -> None:
    """Raise TextsDiffer unless all ks gave the same ids; `name`: of the prompt."""
    plain = answers[PLAIN].ids
    for k, answer in answers.items():
        if answer.ids != plain:
            place = next((n for n, (a, b) in enumerate(zip(answer.ids, plain, strict=False)) if a != b), None)
            where = "in its length" if place is None else f"from token {place + 1} on"
            raise TextsDiffer(f"{name}: the text with k={k} differs from plain decoding's {where}.")


def tokens_per_step(answers: Sequence[TimedAnswer]) -> float:
    """Return the mean tokens per decode step."""
    return ratio(sum(answer.num_decoded for answer in answers), sum(answer.num_steps for answer in answers))


def rates(answers: Sequence[TimedAnswer], *, decode_only: bool = False) -> list[float]:
    """Return the tokens per second of each round, over all answers."""
    num_tokens = sum(answer.num_decoded if decode_only else len(answer.ids) for answer in answers)
    times = [answer.decode_seconds if decode_only else answer.seconds for answer in answers]
    return [ratio(num_tokens, sum(seconds)) for seconds in zip(*times, strict=True)]


def speedup(answers: Sequence[TimedAnswer], others: Sequence[TimedAnswer], *, decode_only: bool = False) -> Spread:
    """Return the rate of `answers` over that of `others`, paired by round."""
    pairs = zip(rates(answers, decode_only=decode_only), rates(others, decode_only=decode_only), strict=True)
    return Spread.of([ratio(rate, other) for rate, other in pairs])


@dataclass(frozen=True, kw_only=True)
class PairedFigures:
    """SPACE against plain decoding over several answers. Means are over steps; ranges are over rounds."""

    tokens_per_step: float
    tokens_per_forward: float  # including prefill, as in the published script
    rows_per_step: float
    accepted_share: float  # of verified drafts
    looping: float  # share of answers
    speedup: Spread  # tokens per second over plain decoding's, with prefill
    decode_speedup: Spread  # without prefill
    speedup_not_looping: Spread | None  # None if all answers loop
    num_identical: int  # answers equal to plain decoding's

    @staticmethod
    def figures(space: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> dict[str, Any]:
        """Return the fields; the answers are paired."""
        steady = [pair for pair in zip(space, plain, strict=True) if not pair[0].is_looping]
        num_steps = sum(answer.num_steps for answer in space)
        return {
            "tokens_per_step": tokens_per_step(space),
            "tokens_per_forward": ratio(sum(len(answer.ids) for answer in space), num_steps + len(space)),
            "rows_per_step": ratio(sum(answer.num_rows for answer in space), num_steps),
            "accepted_share": ratio(sum(a.num_accepted for a in space), sum(a.num_drafted for a in space)),
            "looping": 1 - ratio(len(steady), len(space)),
            "speedup": speedup(space, plain),
            "decode_speedup": speedup(space, plain, decode_only=True),
            "speedup_not_looping": speedup(*zip(*steady, strict=True)) if steady else None,
            "num_identical": sum(one.ids == other.ids for one, other in zip(space, plain, strict=True)),
        }
