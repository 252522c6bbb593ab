"""Everything at once, at random: a crowd of unequal sequences, layouts that change every step, two threads."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from exactness_matrix import Subject, make_worker
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import Future, ScriptedDrafts
from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout

NUM_SEQUENCES = 14
SAMPLING_PARAMS = (
    pb.Sampling(temperature=0.0),
    pb.Sampling(temperature=0.0, repetition_penalty=1.3),
    pb.Sampling(temperature=1.0),
    pb.Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.4),
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def requests_of(subject: Subject, rng: np.random.Generator) -> list[SequenceRequest]:
    """Prompts of 1 to 330 ids."""
    found = []
    for number in range(NUM_SEQUENCES):
        sampling = pb.Sampling()
        sampling.CopyFrom(SAMPLING_PARAMS[number % len(SAMPLING_PARAMS)])
        sampling.seed = int(rng.integers(1 << 63))
        prompt = rng.choice(subject.live_ids, int(rng.integers(1, (8, 40, 330)[number % 3])))
        limits = pb.Limits(max_tokens=int(rng.integers(2, 20)))
        found.append(SequenceRequest(tuple(prompt.tolist()), sampling, limits, want_logprobs=True, num_logprobs=3))
    return found


def alone(subject: Subject, request: SequenceRequest) -> ClientSequence:
    record = ClientSequence(request)
    client = WorkerClient(make_worker(subject.model, FixedLayout.full(0), None, num_blocks=100), automatic=True)
    client.submit(record)
    client.run()
    return record


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("family", "dtype", "seed"),
    [
        ("llama", "float32", 1),
        ("llama", "bfloat16", 2),
        ("gemma3", "float32", 3),
        *(
            pytest.param(family, dtype, seed, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
            for family in ("llama", "qwen3", "gemma2", "gemma3", "embedded")
            for dtype in ("float32", "bfloat16")
            for seed in range(4, 12)
        ),
    ],
)
def test_in_a_random_crowd_everyone_speaks_as_when_alone(
    family: str, dtype: str, seed: int, subject_of: Callable[[str, str], Subject]
) -> None:
    subject, rng = subject_of(family, dtype), np.random.default_rng(seed)
    wanted = [alone(subject, request) for request in requests_of(subject, rng)]

    def any_layout(room: object) -> DraftLayout:
        drafts = int(rng.integers(0, 6))
        return DraftLayout(drafts, tuple(int(count) for count in rng.integers(0, 6, drafts + 1)))

    source = ScriptedDrafts(lambda n, k: int(rng.integers(0, 6)), subject.live_ids)
    worker = make_worker(subject.model, FixedLayout(any_layout), source, num_blocks=700)
    client = WorkerClient(worker, max_prefill_rows=int(rng.integers(30, 400)), automatic=True)
    waiting = [ClientSequence(plain.request) for plain in wanted]
    records = list(waiting)
    while waiting or client.running:
        if waiting and rng.random() < 0.7:
            at = len(records) - len(waiting)
            source.futures[client.submit(waiting.pop(0)).seq_id] = Future(wanted[at].ids, 5)
        client.step()
    client.check_all_free()
    verifications = [verification for record in records for verification in record.verifications]
    assert {0, 1, 2} <= {accepted for _, accepted in verifications}
    assert [record.tokens for record in records] == [plain.tokens for plain in wanted]
    assert [record.logprobs for record in records] == [plain.logprobs for plain in wanted]
