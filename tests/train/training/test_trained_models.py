"""Whatever is trained, and however, is served as it is, and drafts change no text."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import random_ids, run, tiny_plan
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_train.train_plan import Anchors, Budget, HeadForm, Method
from tiny_checkpoints import tiny_checkpoint

SWITCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "hard labels": {"distill": False},
    "low-rank head": {"head": HeadForm.LOW_RANK},
    "shared mask id": {"shared_mask_id": True},
    "activation checkpointing": {"activation_checkpointing": True},
    "bf16": {"precision": "bf16"},
    "muon": {"optimiser": "muon"},
    "one cut": {"anchors": Anchors.ONE, "pack": False},
    "no head": {"head": HeadForm.NONE},
}
OTHERS = ["gemma2", "qwen3", "phi3", "granite", "cohere2", "mixtral", "gemma4", "gemma3n"]
ONLY_FULL = {"shared mask id", "activation checkpointing"}
RUNS = [
    (method, name)
    for method, name in itertools.product((Method.FULL, Method.GATED_LORA, Method.HEAD), SWITCHES)
    if not (name in ONLY_FULL and method is not Method.FULL) and not (name == "no head" and method is Method.HEAD)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Method, Path]:
    """What each method begins with."""
    base = tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=0)
    space = tiny_checkpoint(tmp_path_factory.mktemp("space"), num_masks=3, draft_head=False)
    return {Method.FULL: base, Method.GATED_LORA: base, Method.SFT: base, Method.HEAD: space}


def texts_of(model: SpaceModel, *, drafts: int) -> list[list[int]]:
    """Greedy and sampled texts of two prompts that run together."""
    worker = Worker(
        model,
        num_blocks=16,
        block_size=16,
        max_sequences=4,
        max_draft_length=drafts,
        controller=FixedLayout.full(drafts) if drafts else None,
    )
    router = WorkerClient(worker)
    sampled = pb.Sampling(temperature=1.0, seed=7)
    names = [
        router.admit(random_ids(5 + 3 * seed, seed), max_tokens=12, sampling=sampling)
        for seed in (1, 2)
        for sampling in (pb.Sampling(), sampled)
    ]
    router.run()
    drafted = sum(report.num_drafted for name in names for report in router.sequences[name].reports)
    assert (drafted > 0) == (drafts > 0)
    return [router.sequences[name].tokens for name in names]


@pytest.mark.parametrize(("method", "name"), RUNS)
def test_what_is_trained_is_served_and_drafts_change_no_text(
    method: Method, name: str, folders: dict[Method, Path], tmp_path: Path
) -> None:
    source = folders[method]
    plan = tiny_plan(method, **{"budget": Budget(steps=2), **SWITCHES[name]})
    result = run(source, plan, tmp_path, held_out=None, dtype=torch.float32)
    assert all(torch.isfinite(torch.tensor(result.counters.losses)))
    model = load_model(result.folder)
    assert texts_of(model, drafts=3) == texts_of(model, drafts=0)


def test_adapters_change_no_text_of_the_base(folders: dict[Method, Path], tmp_path: Path) -> None:
    source, plan = folders[Method.GATED_LORA], tiny_plan()
    result = run(source, plan, tmp_path, held_out=None, dtype=torch.bfloat16)
    assert texts_of(load_model(result.folder), drafts=3) == texts_of(load_model(source), drafts=0)


@pytest.mark.parametrize(
    "family", ["gemma3", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
@pytest.mark.parametrize("method", [Method.FULL, Method.GATED_LORA])
def test_every_family_is_trained_and_served(family: str, method: Method, tmp_path: Path) -> None:
    source, plan = tiny_checkpoint(tmp_path / "base", family, num_masks=0), tiny_plan(method)
    model = load_model(run(source, plan, tmp_path / "out", held_out=None, tokenizer_size=127).folder)
    assert texts_of(model, drafts=3) == texts_of(model, drafts=0)
