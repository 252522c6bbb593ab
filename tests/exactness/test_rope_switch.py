"""Texts that outgrow the original length of LongRoPE are computed anew there, and drafts change nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from exactness_matrix import make_worker
from space_common.worker.client import ClientSequence, GrpcWorker, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import RIGHT, Future, ScriptedDrafts
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_train.self_generation.self_generate import Ends, ScribeCounts, UnfinishedText, write_texts
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

ORIGINAL, MAX_TOKENS = 64, 24
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor": [1.0, 2.1, 3.3, 5.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LENGTHS = (55, ORIGINAL, ORIGINAL + 1, 20, 100, ORIGINAL - 1)
"""Of prompts: texts that cross the switch late or at once, that begin behind it, and that do not reach it."""
ID_RANGE = range(20, 110)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own: dict[str, Any] = {"rope_parameters": LONG, "original_max_position_embeddings": ORIGINAL}
    return tiny_checkpoint(tmp_path_factory.mktemp("long"), "phi3", window=256, seed=3, **own)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> SpaceModel:
    return load_model(checkpoint, dtype="float32", max_model_len=160)


def request(number: int, temperature: float) -> SequenceRequest:
    prompt = tuple(20 + (7 * i + 13 * number + i * i) % 90 for i in range(LENGTHS[number]))
    sampling = pb.Sampling(seed=number, temperature=temperature, allowed_ids=list(ID_RANGE))
    return SequenceRequest(prompt, sampling, pb.Limits(max_tokens=MAX_TOKENS), want_logprobs=True, num_logprobs=2)


def decoded(
    model: SpaceModel,
    requests: Iterable[SequenceRequest],
    k: int = 0,
    texts: Iterable[ClientSequence] = (),
    *,
    chunk: int = 4096,
    preempts: bool = False,
) -> list[ClientSequence]:
    """Decode the requests in one batch with `k` drafts, right and wrong ones of the known `texts`."""
    source = ScriptedDrafts(RIGHT["half"], list(ID_RANGE)) if k else None
    client = WorkerClient(
        make_worker(model, FixedLayout.full(k), source, num_blocks=160),
        automatic=True, max_prefill_rows=chunk, readmits=True,
    )  # fmt: skip
    known = {tuple(one.request.prompt): one.ids for one in texts}
    records = [client.submit(one) for one in requests]
    preempted: list[ClientSequence] = []
    while client.running:
        if source is not None:  # a sequence that is admitted again has another number
            for seq_id, one in client.running.items():
                source.futures[seq_id] = Future(known[tuple(one.request.prompt)], k)
        client.step()
        for record in records if preempts else ():
            if len(record.tokens) > 5 and record.finish == pb.FINISH_NONE and record not in preempted:
                preempted.append(record)
                if client.release_and_wait(record.seq_id).seq_id not in client.running:
                    client.submit(record)
    client.check_all_free()
    return records


Alone = Callable[[float], list[ClientSequence]]
"""temperature -> the texts, each decoded without drafts and alone."""


@pytest.fixture(scope="module")
def alone(model: SpaceModel) -> Alone:
    @cache
    def texts(temperature: float) -> list[ClientSequence]:
        return [record for n in range(len(LENGTHS)) for record in decoded(model, [request(n, temperature)])]

    return texts


@torch.inference_mode()
def dense_text(dense: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    """Decode greedily without any cache: each token by one pass over all before it."""
    ids = list(prompt)
    for _ in range(MAX_TOKENS):
        logits = dense(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(ID_RANGE.start + int(logits[ID_RANGE.start : ID_RANGE.stop].argmax()))
    return ids[len(prompt) :]


def test_texts_that_cross_are_those_of_transformers_without_a_cache(
    checkpoint: Path, model: SpaceModel, alone: Alone
) -> None:
    dense = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    assert model.facts.rope_switch == ORIGINAL
    for record in alone(0.0):
        assert record.tokens == dense_text(dense, record.request.prompt)


def test_a_sequence_is_admitted_again_at_the_switch_and_only_there(alone: Alone) -> None:
    for record in alone(0.0):
        finishes = [report.finish for report in record.reports if report.finish]
        crosses = len(record.request.prompt) <= ORIGINAL < len(record.ids) - 1
        assert finishes == [pb.FINISH_READMIT] * crosses + [pb.FINISH_LENGTH]
        assert len(record.tokens) == MAX_TOKENS


@pytest.mark.parametrize(("chunk", "preempts"), [(4096, False), (7, True)], ids=["whole", "chunked-preempted"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 5])
def test_drafts_change_nothing_in_a_batch_of_both(
    model: SpaceModel, alone: Alone, k: int, temperature: float, *, chunk: int, preempts: bool
) -> None:
    plain = alone(temperature)
    requests = [request(n, temperature) for n in range(len(LENGTHS))]
    together = decoded(model, requests, k, plain, chunk=chunk, preempts=preempts)
    for one, other in zip(together, plain, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
    crossing = [one for one in together if len(one.request.prompt) <= ORIGINAL < len(one.ids) - 1]
    assert len(crossing) == 3
    verified = [(report.num_drafted, report.num_accepted) for one in crossing for report in one.reports]
    assert any(accepted for _, accepted in verified)
    assert any(accepted < drafted for drafted, accepted in verified)


def test_a_router_that_does_not_admit_again_gets_the_long_factors_alone(model: SpaceModel) -> None:
    client = WorkerClient(make_worker(model, FixedLayout.full(0), None), automatic=True)
    record = client.submit(request(0, 0.0))
    client.run()
    assert [report.finish for report in record.reports if report.finish] == [pb.FINISH_LENGTH]
    assert record.logprobs != decoded(model, [request(0, 0.0)])[0].logprobs


class SteppedByHand:
    """A worker in this process as a stream to one is: it says hello."""

    def __init__(self, worker: Worker) -> None:
        self.block_size, self.num_blocks, self.hello = worker.block_size, worker.num_blocks, worker.hello("one")
        self.apply, self.step = worker.apply, worker.step


def test_texts_that_the_model_writes_itself_are_those_that_it_serves(model: SpaceModel, alone: Alone) -> None:
    plain = alone(0.8)
    texts = [UnfinishedText(one.request.prompt, 0.8, number) for number, one in enumerate(plain)]
    banned = tuple(sorted({*range(model.facts.vocab_size)} - {*ID_RANGE}))
    worker = SteppedByHand(make_worker(model, FixedLayout.full(0), None, num_blocks=160))
    ended = [
        text
        for step in write_texts(cast(GrpcWorker, worker), texts, Ends(MAX_TOKENS, (), banned), ScribeCounts())
        for text in step
    ]
    assert sorted(text.seed for text in ended) == list(range(len(LENGTHS)))
    assert [text.output for text in texts] == [one.tokens for one in plain]
