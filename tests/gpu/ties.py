"""Texts that drafts may not change: decoded in one batch, compared, and where rounding may decide."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from exactness_matrix import Subject, describe_difference, make_worker
from greedy_oracle import TIE_FACTOR, GreedyOracle
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import RIGHT, Future, ScriptedDrafts, first_difference
from space_kernels.sampling.noise import gumbel, request_key
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from tiny_checkpoints import tiny_checkpoint

from gpu.report import Notes

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")  # compared with transformers on a GPU

NUM_SEQUENCES, NUM_BLOCKS = 4, 600


def checkpoint_of(path: Path, family: str, dtype: str, *, head_drafts: int = 0) -> str | Path:
    """A random one, written to `path`, that is stored in `dtype`; the embedded model as it is. `head_drafts`: with a
    recurrent head for so many drafts, and no masks."""
    if family == "demo":
        return "demo"
    num_masks = 0 if head_drafts else 5
    return tiny_checkpoint(
        path, family, seed=1, dtype=dtype, tie_word_embeddings=False, head_drafts=head_drafts, num_masks=num_masks
    )


def outcome_name(num_drafted: int, num_accepted: int) -> str:
    """How many drafts of a chain were accepted."""
    return "a = 0" if not num_accepted else "a = k" if num_accepted == num_drafted else "0 < a < k"


def changed_texts(model: SpaceModel, num_texts: int, num_tokens: int) -> list[str]:
    """Where k = 5 changed plain decoding's ids or log-probabilities, in words: half-right drafts, all in one batch."""
    subject = Subject(model.facts.name, model, seed=11)
    limits = pb.Limits(max_tokens=num_tokens)
    asked = [
        replace(subject.request(n % NUM_SEQUENCES, 0.8 * (n % 2), "none"), limits=limits) for n in range(num_texts)
    ]
    asked = [replace(request, want_logprobs=True, num_logprobs=4) for request in asked]
    plain = []
    for request in asked:
        plain.append(ClientSequence(request))
        client = WorkerClient(make_worker(model, FixedLayout.full(0), None, num_blocks=NUM_BLOCKS), automatic=True)
        client.submit(plain[-1])
        client.run()
    source = ScriptedDrafts(RIGHT["half"], subject.live_ids)
    client = WorkerClient(make_worker(model, FixedLayout.full(5), source, num_blocks=NUM_BLOCKS), automatic=True)
    ours = [ClientSequence(request) for request in asked]
    for record, known in zip(ours, plain, strict=True):
        source.futures[client.submit(record).seq_id] = Future(known.ids, 5)
    client.run()
    changed = []
    for number, (record, known) in enumerate(zip(ours, plain, strict=True)):
        at = first_difference(record.tokens, known.tokens)
        at = first_difference(record.logprobs, known.logprobs) if at is None else at
        if at is not None:
            changed.append(f"text {number}: {describe_difference(at, record, known)}")
    return changed


def demo_rule(subject: Subject) -> TieRule:
    with importlib.resources.as_file(importlib.resources.files("space_demo")) as folder:
        return TieRule(GreedyOracle(folder, banned_ids=subject.model.facts.mask_ids), torch.float32)


def request_of(subject: Subject, connection: int, num_tokens: int, *, drafts: int) -> SequenceRequest:
    """Seats 1 and 3 sample."""
    sampling = pb.Sampling(seed=connection, temperature=0.8 if connection % 2 else 0.0)
    prompt = subject.prompt(connection, long=False)
    limits = pb.Limits(max_tokens=num_tokens)
    return SequenceRequest(prompt, sampling, limits, max_draft_length=drafts, slots_ahead=num_tokens)


def decode(client: WorkerClient, requests: Sequence[SequenceRequest]) -> tuple[list[ClientSequence], float]:
    """Decode all in one batch; the answers, and tokens per second from the first to the last."""
    records = [ClientSequence(request) for request in requests]
    for record in records:
        client.submit(record)
    client.run(lambda: all(record.tokens for record in records))
    begun, before = time.perf_counter(), sum(len(record.tokens) for record in records)
    client.run()
    made = sum(len(record.tokens) for record in records) - before
    return records, made / (time.perf_counter() - begun)


def compare(
    found: Comparison, where: str, ours: ClientSequence, theirs: ClientSequence, client: WorkerClient, rule: TieRule
) -> None:
    """Add how `ours` differs from `theirs`; `client` decodes what theirs says behind a tie."""

    def behind(known: Sequence[int]) -> list[int]:
        if not known:
            return theirs.tokens
        again = ClientSequence(replace(theirs.request, max_draft_length=0), tokens=list(known))
        client.submit(again)
        client.run()
        return again.tokens[len(known) :]

    found.add(
        differences(where, ours.request.prompt, ours.tokens, behind, rule, ours.request.sampling), len(ours.tokens)
    )


def settle(notes: Notes, found: Comparison, name: str) -> None:
    notes.figure("texts compared", found.num_texts)
    notes.figure("ties", len(found.ties))
    for tie in found.ties[:8]:
        notes.note(f"tie: {tie}")
    notes.figure(name, len({fault.where for fault in found.faults}))
    assert not found.faults, f"texts differ where it is no tie; the first: {found.faults[0]}"


@dataclass(frozen=True)
class Difference:
    """A position at which two texts have different ids."""

    where: str
    position: int  # absolute
    ours: int | None  # None: our text had ended
    theirs: int | None
    gap: float = float("inf")  # between the two values that are compared, noise included, in the oracle
    bound: float = 0.0

    @property
    def is_tie(self) -> bool:
        return abs(self.gap) < self.bound

    def __str__(self) -> str:
        return (
            f"{self.where}, position {self.position}: {self.ours} and {self.theirs}; they are {self.gap:.3g} apart, "
            f"a tie is below {self.bound:.3g}"
        )


@dataclass
class Comparison:
    """The differences of some texts."""

    num_texts: int = 0
    num_tokens: int = 0
    ties: list[Difference] = field(default_factory=list)
    faults: list[Difference] = field(default_factory=list)

    def add(self, found: Sequence[Difference], num_tokens: int) -> None:
        self.num_texts += 1
        self.num_tokens += num_tokens
        self.ties += [one for one in found if one.is_tie]
        self.faults += [one for one in found if not one.is_tie]


class TieRule:
    """Measures how near two choices were: in transformers' float32 logits of the same weights."""

    def __init__(self, oracle: GreedyOracle, dtype: torch.dtype) -> None:
        """`dtype` is the one that the texts were computed in."""
        self._oracle, self._unit = oracle, TIE_FACTOR * torch.finfo(dtype).eps

    def difference(self, where: str, known: Sequence[int], ours: int, theirs: int, sampling: pb.Sampling) -> Difference:
        """Behind the ids `known` one text has `ours`, the other `theirs`. Of `sampling` seed and temperature count."""
        logits = self._oracle.logits(known).double()
        bound = self._unit * float(logits[logits.isfinite()].abs().max())
        value = logits
        if sampling.temperature > 0.0:
            key = torch.tensor([request_key(sampling.seed, 0)])
            noise = gumbel(key, torch.tensor([len(known)]), torch.arange(len(logits))[None])[0]
            value = logits / sampling.temperature + noise
            bound /= sampling.temperature
        return Difference(where, len(known), ours, theirs, float(value[theirs] - value[ours]), bound)


def differences(
    where: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs_behind: Callable[[Sequence[int]], Sequence[int]],
    rule: TieRule,
    sampling: pb.Sampling,
) -> list[Difference]:
    """Every position at which `ours` differs from the other text, which goes on from our id behind each.

    `theirs_behind(ids)`: the other text behind these ids of ours, as long as ours is.
    """
    found: list[Difference] = []
    done = 0
    while done < len(ours):
        rest, theirs = ours[done:], theirs_behind(ours[:done])
        same = next((i for i, (a, b) in enumerate(zip(rest, theirs, strict=False)) if a != b), None)
        if same is None:
            if len(rest) != len(theirs):
                shorter = min(len(rest), len(theirs))
                ends = [text[shorter] if shorter < len(text) else None for text in (rest, theirs)]
                found.append(Difference(where, len(prompt) + done + shorter, ends[0], ends[1]))
            break
        known = [*prompt, *ours[: done + same]]
        found.append(rule.difference(where, known, rest[same], theirs[same], sampling))
        done += same + 1
    return found
