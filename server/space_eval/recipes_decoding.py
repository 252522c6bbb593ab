"""What a trained checkpoint drafts in earnest: prompts decoded by the worker's own step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server import drafting
from space_server.controller import FixedLayout
from space_server.worker import Worker

from space_eval.acceptance import summarise
from space_eval.completions import Request, complete
from space_eval.generation import Generation
from space_eval.text_statistics import is_blank, is_looping

BLOCK = 16


@dataclass(frozen=True)
class Decoding:
    """The texts that are written to measure."""

    k: int
    temperatures: tuple[float, ...]
    max_tokens: int
    batch: int  # texts at once: it changes the seconds, not the texts

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Yield:
    """Steps of the outputs that do not loop, and the drafts accepted in them. Yields add up."""

    num_steps: int = 0
    num_accepted: int = 0
    num_accepted_text: int = 0  # without tokens of whitespace alone

    @property
    def accepted(self) -> float:
        """E-1: accepted drafts per step."""
        return self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def accepted_text(self) -> float:
        """E-1, whitespace-only tokens left out of the count, their steps kept."""
        return self.num_accepted_text / self.num_steps if self.num_steps else float("nan")

    def __add__(self, other: Yield) -> Yield:
        return Yield(
            self.num_steps + other.num_steps,
            self.num_accepted + other.num_accepted,
            self.num_accepted_text + other.num_accepted_text,
        )

    @classmethod
    def of(cls, generations: Sequence[Generation], decode: Callable[[Sequence[int]], str]) -> Yield:
        steps = [step for g in generations if not is_looping(g.tokens) for step in g.steps]
        accepted = [token for step in steps for token in step.tokens[: step.num_accepted]]
        return cls(len(steps), len(accepted), sum(not is_blank(decode([token])) for token in accepted))


def decoding_figures(
    model: SpaceModel,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    decode: Callable[[Sequence[int]], str],
    wanted: Decoding,
    *,
    rescored: int | None = None,
) -> list[dict[str, Any]]:
    """A record for each set of prompts and temperature: its yield, and a row of `acceptance.summarise`.

    `rescored`: ids of each mask that the draft head chooses among (None: as served; 0: all).
    """
    k = min(wanted.k, model.facts.num_masks)
    records = []
    for name, some in prompts.items():
        for temperature in wanted.temperatures:
            with _rescoring(model.facts.vocab_size if rescored == 0 else rescored):
                outputs = _outputs(model, some, wanted, temperature, k)
            row = summarise(outputs, outputs, decode, temperature=temperature, max_drafts=k)
            figures = row.as_json()
            del figures["speedup"]  # nothing was timed: texts were written several at a time
            records.append({"prompts": name, "yield": asdict(Yield.of(outputs, decode)), **figures})
    return records


def _outputs(
    model: SpaceModel, prompts: Sequence[Sequence[int]], wanted: Decoding, temperature: float, k: int
) -> list[Generation]:
    """In the order of the prompts."""
    longest = max(len(prompt) for prompt in prompts)
    each = -(-(longest + wanted.max_tokens + k + 1) // BLOCK) + 1
    worker = Worker(
        model,
        num_blocks=wanted.batch * each,
        block_size=BLOCK,
        max_sequences=wanted.batch,
        max_draft_length=k,
        controller=FixedLayout.full(k),
    )
    requests = [
        Request(str(number), 0, prompt, pb.Sampling(seed=number, temperature=temperature))
        for number, prompt in enumerate(prompts)
    ]
    eos = model.facts.eos_ids
    ended = complete(worker, requests, max_tokens=wanted.max_tokens, max_draft_length=k, eos_ids=eos)
    return [generation for _, generation in sorted(ended, key=lambda pair: int(pair[0].key))]


@contextlib.contextmanager
def _rescoring(num_ids: int | None) -> Iterator[None]:
    """The server has one number of candidates; only this measurement asks what another would be worth."""
    if num_ids is None:
        yield
    else:
        with patch.object(drafting, "NUM_CANDIDATES", num_ids):
            yield
