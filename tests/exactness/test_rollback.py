"""Rollback is a shorter length: whole workers on a real model, their keys and values watched byte by byte."""

from collections.abc import Callable, Sequence

import pytest
import torch
from exactness_matrix import Subject, WatchedModel, make_worker
from space_common.worker.client import ClientSequence, WorkerClient
from space_eval.acceptance.equivalence import Future, ScriptedDrafts
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from space_server.speculation.controller import FixedLayout
from torch import Tensor

Subjects = Callable[[str, str], Subject]


class WrittenSlots(WatchedModel):
    """Notes which slots a forward pass changes, and what it leaves behind."""

    changed: set[tuple[int, int]]  # (block, offset)
    left: list[Tensor]  # keys and values of every layer behind the pass

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        before = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
        hidden = super().forward(batch, kv)
        self.left = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
        differs = [(old != new).any(dim=3).any(dim=1) for old, new in zip(before, self.left, strict=True)]
        slots = torch.stack(differs).any(dim=0).nonzero().tolist()
        self.changed = {(block, offset) for block, offset in slots}
        return hidden


def chain_slots(batch: ForwardBatch) -> set[tuple[int, int]]:
    """The (block, offset) that the chain rows of a pass may write."""
    size = batch.rows.block_size
    found = set()
    for rows, pages in zip(batch.chain_rows, batch.rows.pages, strict=True):
        for position in batch.positions[rows.start : rows.stop].tolist():
            found.add((pages[position // size], position % size))
    return found


class EachItsOwn:
    """A draft source that gives sequence s+1 exactly s right drafts in its first step, and as many in all others."""

    def __init__(self, k: int, live_ids: Sequence[int]) -> None:
        self.sources = [ScriptedDrafts(lambda n, k, right=right: right, live_ids) for right in range(k + 1)]

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        return self.sources[seq_id - 1].propose(seq_id, ids, max_drafts)


def crowd(subject: Subject, k: int) -> tuple[WrittenSlots, WorkerClient, list[ClientSequence], list[ClientSequence]]:
    """k+1 unequal sequences in one batch, number a with a right drafts in every chain; and their plain texts."""
    model = WrittenSlots(subject.model)
    source = EachItsOwn(k, subject.live_ids)
    client = WorkerClient(make_worker(model, FixedLayout.full(k), source), automatic=True)
    records, plain = [], []
    for number in range(k + 1):
        sampling_params = (number % 4, (0.0, 0.8, 1.0)[number % 3], "none")
        records.append(ClientSequence(subject.request(*sampling_params)))
        plain.append(subject.plain(*sampling_params))
        seq_id = client.submit(records[-1]).seq_id
        source.sources[number].futures[seq_id] = Future(plain[-1].ids, k)
    return model, client, records, plain


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_only_chain_rows_write_only_in_the_pass_and_a_rollback_copies_no_byte(k: int, subject_of: Subjects) -> None:
    model, client, records, _ = crowd(subject_of("llama", "float32"), k)
    assert model.kv is not None
    while client.running:
        passes = model.num_forwards
        report = client.step()
        assert model.num_forwards - passes == report.stepped
        if report.stepped:
            assert model.changed <= chain_slots(model.batches.pop())
            for left, now in zip(model.left, (*model.kv.keys, *model.kv.values), strict=True):
                assert torch.equal(left, now)  # verdict, rollback and drafting wrote nothing
    assert any(a < d for record in records for d, a in record.verifications)
    client.check_all_free()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
def test_one_step_of_one_batch_accepts_every_length_and_each_goes_on_right(k: int, subject_of: Subjects) -> None:
    _, client, records, plain = crowd(subject_of("qwen3", "float32"), k)
    client.step()  # every prompt at once
    client.step()
    assert [record.verifications for record in records] == [[(k, a)] for a in range(k + 1)]
    client.run()
    assert [record.tokens for record in records] == [record.tokens for record in plain]
    assert [record.logprobs for record in records] == [record.logprobs for record in plain]
