"""Models of the exactness stages, and texts that drafts may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from exactness_matrix import Subject, describe_difference, make_worker
from space_common.worker_client import ClientSequence, WorkerClient
from space_eval.acceptance.equivalence import first_difference
from space_eval.acceptance.scripted_drafts import RIGHT, Future, ScriptedDrafts
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")
"""Compared with transformers on a GPU."""

NUM_SEQUENCES, NUM_BLOCKS = 4, 600


def checkpoint_of(path: Path, family: str, dtype: str) -> str | Path:
    """A random one, written to `path`, that is stored in `dtype`; the embedded model as it is."""
    if family == "demo":
        return "demo"
    return tiny_checkpoint(path, family, seed=1, dtype=dtype, tie_word_embeddings=False)


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
