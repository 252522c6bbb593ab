"""The served model's own embeddings: hidden states behind the final norm, the same in every batch and chunking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doubles.worker import ScriptedDrafts
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoModelForCausalLM

PROMPTS = ([40, 20, 30], [29] * 40 + [27], [50, 40, 30, 20, 60, 70, 80, 90, 100, 110, 35, 36, 37, 38, 39, 40, 41])
MODES = (pb.POOLING_LAST, pb.POOLING_MEAN)


def client(model: SpaceModel, *, max_prefill_rows: int = 4096, drafts: ScriptedDrafts | None = None) -> WorkerClient:
    worker = Worker(model, num_blocks=64, block_size=16, draft_source=drafts, controller=FixedLayout.full(4))
    return WorkerClient(worker, automatic=True, max_prefill_rows=max_prefill_rows)


def vector_of(sequence: ClientSequence) -> bytes:
    last = sequence.reports[-1]
    assert (sequence.tokens, last.finish, sequence.error) == ([], pb.FINISH_LENGTH, "")
    assert not any(report.HasField("embedding") for report in sequence.reports[:-1])
    return last.embedding.values


def pooled(router: WorkerClient, ids: list[int], mode: pb.Pooling.ValueType) -> bytes:
    return vector_of(router.generate(ids, max_tokens=1, max_draft_length=0, pooling=mode))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_vector_is_what_transformers_computes(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / family, family, window=256)
    router = client(load_model(folder, dtype="float32", num_threads=1))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids in PROMPTS:
        with torch.no_grad():
            hidden = oracle.model(torch.tensor([ids])).last_hidden_state[0]
        for mode, wanted in zip(MODES, (hidden[-1], hidden.mean(0)), strict=True):
            found = torch.frombuffer(bytearray(pooled(router, ids, mode)), dtype=torch.float32)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_is_the_same_bits_alone_in_a_crowd_and_in_any_chunks(tiny: SpaceModel, mode: int) -> None:
    alone = [pooled(client(tiny), ids, mode) for ids in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    text = client(tiny).generate([31, 32, 33], max_tokens=30, max_draft_length=0).tokens
    for rows in (4096, 7, 4):
        drafts = ScriptedDrafts({1: [31, 32, 33, *text]}, wrong=lambda position: position % 4 == 0)
        router = client(tiny, max_prefill_rows=rows, drafts=drafts)
        beside = router.admit([31, 32, 33], max_tokens=30)
        numbers = [router.admit(ids, max_tokens=1, max_draft_length=0, pooling=mode) for ids in PROMPTS]
        router.run()
        assert [vector_of(router.sequences[number]) for number in numbers] == alone
        decoded = router.sequences[beside]
        assert decoded.tokens == text
        assert any(decoded.accepted)
        assert any(accepted < drafted for drafted, accepted in decoded.verifications)
        assert sorted(router.free) == list(range(64))


def test_the_last_state_behind_cached_blocks_is_the_same_bits(tiny: SpaceModel) -> None:
    worker = Worker(tiny, num_blocks=64, block_size=16)
    worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64)))
    found = []
    for seq_id, (num_cached, pages) in enumerate(((0, [0, 1, 2]), (32, [0, 1, 5])), 1):
        admit = pb.Admit(seq_id=seq_id, ids=PROMPTS[1], num_prompt=41, num_cached=num_cached, pages=pages)
        admit.limits.max_tokens, admit.pooling = 1, pb.POOLING_LAST
        worker.apply(pb.Command(admit=admit))
        report = worker.step()
        assert report is not None
        assert report.stats.prefill_rows == 40 - num_cached
        found.append(report.sequences[0].embedding.values)
    assert found[0] == found[1] != b""


def test_the_mean_behind_cached_blocks_is_refused(tiny: SpaceModel) -> None:
    worker = Worker(tiny, num_blocks=64, block_size=16)
    router = WorkerClient(worker)
    worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64)))
    admit = pb.Admit(seq_id=1, ids=PROMPTS[1], num_prompt=41, num_cached=16, pages=[0, 1, 2])
    admit.limits.max_tokens, admit.pooling = 1, pb.POOLING_MEAN
    worker.apply(pb.Command(admit=admit))
    report = router.worker.step()
    assert report is not None
    assert report.sequences[0].error == "The mean of a prompt needs num_cached = 0."
