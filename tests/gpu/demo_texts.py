"""Texts of the embedded model: requests, decoding them in one batch, and comparing them."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from exactness_matrix import Subject
from greedy_oracle import GreedyOracle
from space_common.worker_client import ClientSequence, SequenceRequest, WorkerClient
from space_proto import worker_pb2 as pb

from gpu.record import Notes
from gpu.ties import Comparison, TieRule, differences


def demo_rule(subject: Subject) -> TieRule:
    """Ties of the embedded model in float32."""
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
    """Write down the differences. Fails where one is no tie."""
    notes.figure("texts compared", found.num_texts)
    notes.figure("ties", len(found.ties))
    for tie in found.ties[:8]:
        notes.note(f"tie: {tie}")
    notes.figure(name, len({fault.where for fault in found.faults}))
    assert not found.faults, f"texts differ where it is no tie; the first: {found.faults[0]}"
