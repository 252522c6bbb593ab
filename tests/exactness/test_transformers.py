"""Plain decoding ≡ transformers' `generate`, greedy in float32: equal, or different at a tie that is counted."""

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from exactness_matrix import Subject, make_worker
from greedy_oracle import GreedyOracle, NotEqual, Tie
from space_common.worker.client import ClientSequence, WorkerClient
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from tiny_checkpoints import FAMILIES, MORE_FAMILIES

Subjects = Callable[[str, str], Subject]
Folders = Callable[[str], Path]

NUM_SEATS = 4


def ties_of(subject: Subject, oracle: GreedyOracle, k: int, max_tokens: int) -> list[Tie]:
    """The ties of four unequal prompts in one batch, decoded with up to k drafts per step."""
    client = WorkerClient(make_worker(subject.model, FixedLayout.full(k), None, num_blocks=300), automatic=True)
    records = []
    for connection in range(NUM_SEATS):
        request = replace(subject.request(connection, 0.0, "none"), limits=pb.Limits(max_tokens=max_tokens))
        records.append(ClientSequence(request))
        client.submit(records[-1])
    client.run()
    return [tie for record in records for tie in oracle.check(record.request.prompt, record.tokens)]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "qwen2_vl"])
def test_greedy_text_is_what_generate_gives(family: str, k: int, subject_of: Subjects, checkpoint_of: Folders) -> None:
    subject = subject_of(family, "float32")
    oracle = GreedyOracle(checkpoint_of(family), banned_ids=subject.model.facts.mask_ids)
    ties = ties_of(subject, oracle, k, max_tokens=40)
    assert not ties, ties  # one in 100,000 tokens would be too many: here that is none


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_long_greedy_text_of_every_family_is_what_generate_gives(
    family: str, subject_of: Subjects, checkpoint_of: Folders
) -> None:
    subject = subject_of(family, "float32")
    oracle = GreedyOracle(checkpoint_of(family), banned_ids=subject.model.facts.mask_ids)
    ties = ties_of(subject, oracle, 3, max_tokens=180)
    assert not ties, ties  # one in 100,000 tokens would be too many: here that is none


def test_greedy_text_of_the_embedded_model_is_what_generate_gives(subject_of: Subjects) -> None:
    subject = subject_of("embedded", "float32")
    with resources.as_file(resources.files("space_demo")) as folder:
        oracle = GreedyOracle(folder, banned_ids=subject.model.facts.mask_ids)
    ties = ties_of(subject, oracle, 3, max_tokens=100)
    assert not ties, ties  # one in 100,000 tokens would be too many: here that is none


def test_a_wrong_id_is_no_tie(subject_of: Subjects, checkpoint_of: Folders) -> None:
    subject = subject_of("llama", "float32")
    oracle = GreedyOracle(checkpoint_of("llama"), banned_ids=subject.model.facts.mask_ids)
    prompt = subject.prompt(0, long=False)
    text = oracle.generate(prompt, 6)
    text[3] = (text[3] + 1) % 100 + 10
    with pytest.raises(NotEqual, match=f"At position {len(prompt) + 3} "):
        oracle.check(prompt, text)
