"""Drafts of EAGLE heads: what the published model files compute, and which heads are taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.worker import drafted_reports
from eagle_heads import DenseHead, HeadShape, dense_base
from safetensors.torch import load_file, save_file
from space_common.worker.client import WorkerClient
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.draft_model import check_tokenizer
from space_model.draft_networks.eagle import load_eagle
from space_model.draft_networks.eagle_files import EagleFiles
from space_model.draft_networks.place import check_place
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, ModelError
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from transformers import PreTrainedModel

PROMPT = [20, 30, 40, 50, 31, 90]
SIZES: dict[str, Any] = {"num_masks": 0, "num_layers": 4, "hidden_size": 32, "num_heads": 2, "kv_heads": 1, "seed": 1}
SOME = tuple(id_ for id_ in range(10, 128) if id_ % 9)  # of a draft vocabulary

HEADS = {
    "eagle3": (HeadShape(draft_ids=SOME), (2, 2, 1), "eagle", {}),
    "eagle3 in a pickle": (HeadShape(hidden=32, owns_embedding=False), (2, 2, 1), "pickled", {}),
    "sglang": (
        HeadShape(),
        (1, 3, 2),
        "eagle",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1], "use_aux_hidden_state": True}},
    ),
    "speculators": (
        HeadShape(norm_before_residual=True, fuse_bias=True, draft_ids=SOME),
        (3, 0, 1),
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": [3, 0, 1]},
    ),
    "eagle1": (HeadShape(1, hidden=32, owns_embedding=False, fuse_bias=True), (), "eagle", {}),
}
TRAINED = ("eagle3", "eagle1")
Made = tuple[Path, PreTrainedModel, DenseHead]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), **SIZES)


@pytest.fixture(scope="module")
def made_of(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The folder of a head, the model in transformers, and the head computed densely. Two are trained."""
    base, made = dense_base(base_folder), dict[str, Made]()

    def find(name: str) -> Made:
        if name not in made:
            shape, layers, form, more = HEADS[name]
            head = DenseHead(base, shape, layers)
            if name in TRAINED:
                head.train_on(base, steps=200)
            made[name] = head.save(tmp_path_factory.mktemp("head"), form, **more), base, head
        return made[name]

    return find


def no_hub(name: str) -> Path:
    raise AssertionError(name)


def with_head(base: Path, head: Path, dtype: str = "float32") -> SpaceModel:
    model = load_model(base, dtype=dtype, num_threads=1)
    return model.drafted_by(load_eagle(EagleFiles.open(str(head), no_hub), model))


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_published_model_file(
    name: str, base_folder: Path, made_of: Callable[[str], Made]
) -> None:
    folder, base, head = made_of(name)
    worker = Worker(with_head(base_folder, folder), num_blocks=100, block_size=4, controller=FixedLayout.by_head(4))
    client = WorkerClient(worker)
    seen: set[int] = set()
    for prompt in (PROMPT, [33, 71, 64], [100, 45, 45, 77, 52]):
        client.admit(prompt, max_tokens=80)
        for _ in range(6):
            client.step()
            for sequence in worker.batch:
                assert sequence.drafts == head.drafts(base, sequence.ids, 4)
                seen |= set(sequence.drafts)
    assert len(seen) > 5


@pytest.mark.parametrize("num_drafts", [1, 5])
@pytest.mark.parametrize("name", TRAINED)
def test_the_text_is_plain_decoding_s_and_some_drafts_are_accepted(
    name: str, num_drafts: int, base_folder: Path, made_of: Callable[[str], Made]
) -> None:
    reports = drafted_reports(with_head(base_folder, made_of(name)[0]), PROMPT, num_drafts, 40)
    assert {report.draft_source for report in reports} == {pb.DRAFT_SOURCE_EAGLE}
    assert max(report.num_drafted for report in reports) == num_drafts
    assert {min(report.num_accepted, 1) for report in reports} == {0, 1}


def test_the_worker_says_that_an_eagle_head_drafts(base_folder: Path, made_of: Callable[[str], Made]) -> None:
    plain, model = load_model(base_folder, dtype="float32"), with_head(base_folder, made_of("eagle3")[0])
    hello = Worker(model, num_blocks=10, block_size=4).hello("life")
    assert (hello.num_head_drafts, hello.head_kind) == (5, "eagle")
    more = 4 * (2 * 2 * 16 + 48)  # keys and values of two heads, and a state
    assert model.facts.kv_bytes_per_token == plain.facts.kv_bytes_per_token + more


def test_heads_of_other_models_are_refused_by_what_differs(
    base_folder: Path, made_of: Callable[[str], Made], tmp_path: Path
) -> None:
    head = made_of("speculators")[0]

    def refuses(match: str, base: Path = base_folder, at: Path = head) -> None:
        with pytest.raises(InvalidSetting, match=match):
            with_head(base, at)

    wide = tiny_checkpoint(tmp_path / "wide", **SIZES | {"hidden_size": 64})
    refuses("reads hidden states of 32 numbers, and those of .*wide have 64. It was made for base", wide)
    more = tiny_checkpoint(tmp_path / "more", **SIZES | {"vocab_size": 200})
    refuses("is for a vocabulary of 128 ids, and .*more has 200. It was made for base", more)
    short = tiny_checkpoint(tmp_path / "short", **SIZES | {"num_layers": 2})
    refuses("reads the inputs of the layers 3, 0, 1; the model has 2 layers", short)
    refuses("reads the inputs of the layers 2, 1, -1; the model has 2 layers", short, made_of("eagle3")[0])
    with pytest.raises(InvalidSetting, match="--draft-head runs on a CPU only, and the model is on cuda"):
        check_place(torch.device("cuda"), 1, "--draft-head")


def test_heads_that_are_not_served_are_named(base_folder: Path, made_of: Callable[[str], Made], tmp_path: Path) -> None:
    source = made_of("eagle3")[0]
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    count = 0

    def refuses(match: str, fields: dict[str, Any] | None = None, **changed: torch.Tensor | None) -> None:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | (fields or {})))
        named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
        kept = {name: tensor for name, tensor in (tensors | named).items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(ModelError, match=match):
            with_head(base_folder, folder)

    refuses("speculators' dflash is not served", {"speculators_model_type": "dflash"})
    refuses("config.json has no transformer_layer_config", {"speculators_model_type": "eagle3"})
    refuses("has no tensor fc.weight, so it is no EAGLE head. A whole model drafts by --draft-model", fc__weight=None)
    refuses("has 2 decoder layers; heads of one are served", {"num_hidden_layers": 2})
    refuses("its activation is gelu; silu is served", {"hidden_act": "gelu"})
    refuses("has no tensor norm.weight", norm__weight=None)
    refuses("has a tensor layers.1.x.weight, which an EAGLE-3 head", layers__1__x__weight=torch.zeros(2))
    refuses(f"drafts {len(SOME)} of the ids, and has no tensor d2t that says which", d2t=None)
    refuses("does not name 105 different ids of a vocabulary of 128", d2t=tensors["d2t"] + 9)
    refuses(r"lm_head.weight of .* has the shape \(7, 48\)", lm_head__weight=torch.zeros(7, 48))
    refuses("has states of 48 numbers, and no embedding and head of its own", embed_tokens__weight=None)


def test_as_a_draft_model_a_head_is_named_with_its_flag(made_of: Callable[[str], Made], base_folder: Path) -> None:
    head = Checkpoint.open(made_of("speculators")[0])
    with pytest.raises(InvalidSetting, match=r"is an EAGLE head .*, and no model: --draft-head .*head"):
        check_tokenizer(head, Checkpoint.open(base_folder))
