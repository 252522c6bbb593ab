"""Texts of the embedded model: requests, decoding them in one batch, and comparing them."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from desk import Desk, Record, Request
from exactness_matrix import Subject
from greedy_oracle import GreedyOracle
from space_proto import worker_pb2 as pb

from gpu.record import Notes
from gpu.ties import Comparison, TieRule, differences


def demo_rule(subject: Subject) -> TieRule:
    """Ties of the embedded model in float32."""
    with importlib.resources.as_file(importlib.resources.files("space_demo")) as folder:
        return TieRule(GreedyOracle(folder, banned_ids=subject.model.facts.mask_ids), torch.float32)


def request_of(subject: Subject, connection: int, num_tokens: int, *, drafts: int) -> Request:
    """Seats 1 and 3 sample."""
    sampling = pb.Sampling(seed=connection, temperature=0.8 if connection % 2 else 0.0)
    prompt = subject.prompt(connection, long=False)
    limits = pb.Limits(max_tokens=num_tokens)
    return Request(prompt, sampling, limits, max_draft_length=drafts, slots_ahead=num_tokens)


def decode(desk: Desk, requests: Sequence[Request]) -> tuple[list[Record], float]:
    """Decode all in one batch; the answers, and tokens per second from the first to the last."""
    records = [Record(request) for request in requests]
    for record in records:
        desk.admit(record)
    desk.run(lambda: all(record.tokens for record in records))
    begun, before = time.perf_counter(), sum(len(record.tokens) for record in records)
    desk.run(lambda: not desk.records)
    made = sum(len(record.tokens) for record in records) - before
    return records, made / (time.perf_counter() - begun)


def compare(found: Comparison, where: str, ours: Record, theirs: Record, desk: Desk, rule: TieRule) -> None:
    """Add how `ours` differs from `theirs`; `desk` decodes what theirs says behind a tie."""

    def behind(known: Sequence[int]) -> list[int]:
        if not known:
            return theirs.tokens
        again = Record(replace(theirs.request, max_draft_length=0), tokens=list(known))
        desk.admit(again)
        desk.run(lambda: not desk.records)
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
