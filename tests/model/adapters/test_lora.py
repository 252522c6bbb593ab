"""Ordinary LoRAs: rows are those of the merged weights, in any company; other rows keep the base's bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from space_common.files import LORA_CONFIG, LORA_WEIGHTS, hash_lora
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, LoraRows, Segment
from space_model.loading.load import load_model
from space_model.lora import LoadedLoras, LoraBase, why_no_loras
from space_model.model_error import InvalidLora, InvalidSetting
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.transformers_network import TransformersNetwork
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_checkpoint, tiny_lora
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCK = 16
FEW = ("q_proj", "up_proj", "qkv_proj")


def ids_of(seed: int, length: int) -> list[int]:
    return torch.randint(16, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


Rows = tuple[Tensor, Tensor]
"""Of one sequence: its chain rows, and its mask rows."""


def step(model: SpaceModel, loras: tuple[int | None, ...], order: tuple[int, ...] = (0, 1, 2)) -> dict[int, Rows]:
    """One step of sequences with drafts and masks, sequence n with loras[n]; by sequence."""
    kv, layout = model.allocate_kv(16, BLOCK), DraftLayout.full(2, 3)
    adapter = 0 if model.facts.adapters else None
    segments = [
        Segment(ids_of(n, 9 + n), 0, [2 * n, 2 * n + 1], layout, adapter, lora=loras[n]) for n in order
    ]  # fmt: skip
    num_masks = [one.num_masks for one in model.facts.adapters]
    batch = ForwardBatch.build(segments, block_size=BLOCK, mask_ids=model.facts.mask_ids, adapter_masks=num_masks)
    hidden = model.forward(batch, kv)
    found = {}
    for at, n in enumerate(order):
        chain = batch.chain_rows[at]
        masks = [row for group in batch.mask_rows[at] for row in group]
        found[n] = hidden[chain.start : chain.stop], hidden[masks]
    return found


CASES: list[tuple[str, str, type, int | None]] = [
    ("llama", "float32", LlamaNetwork, None),
    ("qwen3", "float32", LlamaNetwork, 3),
    ("llama", "bfloat16", CompiledLlama, None),
    ("qwen2", "bfloat16", CompiledLlama, 3),
    ("gemma2", "float32", TransformersNetwork, 3),
    ("qwen3_moe", "float32", TransformersNetwork, None),
    ("phi3", "bfloat16", TransformersNetwork, 3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_a_row_s_bits_depend_on_its_own_lora_alone(case: tuple[str, str, type, int | None], tmp_path: Path) -> None:
    family, dtype, network, adapter_rank = case
    check_rows(family, {"dtype": dtype}, network, adapter_rank, tmp_path)


@pytest.mark.parametrize(
    ("family", "weights", "network"),
    [("llama", "int8", CompiledLlama), ("qwen2", "int4", CompiledLlama), ("phi3", "int4", TransformersNetwork)],
)
def test_loras_act_on_quantised_bases(family: str, weights: str, network: type, tmp_path: Path) -> None:
    check_rows(family, {"dtype": "bfloat16", "weights": weights}, network, 3, tmp_path)


def check_rows(family: str, settings: dict[str, Any], network: type, adapter_rank: int | None, tmp_path: Path) -> None:
    """Compare steps of mixed LoRAs with steps of each sequence alone, and of no LoRA with those of the bare model."""
    base = tiny_checkpoint(tmp_path / "base", family, seed=1, adapter_rank=adapter_rank)
    loras = {
        "wide": tiny_lora(tmp_path / "wide", base, rank=4, seed=5),
        "few": tiny_lora(tmp_path / "few", base, rank=7, seed=6, linears=FEW),
    }
    model, bare = load_model(base, loras=loras, **settings), load_model(base, **settings)
    assert type(model._network) is network
    plain = step(bare, (None,) * 3)
    alone = {lora: {n: step(model, (lora,) * 3, (n,))[n] for n in range(3)} for lora in (None, 0, 1)}
    for chosen in [(None, None, None), (0, 1, None), (None, 0, 0), (1, None, 0), (0, 0, 1)]:
        for order in ((0, 1, 2), (2, 0, 1)):
            together = step(model, chosen, order)
            for n, lora in enumerate(chosen):
                for ours, wanted in zip(together[n], alone[lora][n], strict=True):
                    assert torch.equal(ours, wanted), (chosen, order, n)
    for n in range(3):
        for ours, of_base in zip(alone[None][n], plain[n], strict=True):
            assert torch.equal(ours, of_base)
        for lora in (0, 1):
            assert all(not torch.allclose(alone[lora][n][part], plain[n][part], atol=0.05) for part in (0, 1))
        assert not torch.equal(alone[0][n][0], alone[1][n][0])


PEFT_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {"use_rslora": True}),
    ("llama", {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"up_proj": 3}}),
    ("gemma2", {"use_rslora": True, "alpha_pattern": {".*o_proj": 5}}),
]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks it
@pytest.mark.parametrize(("family", "fields"), PEFT_CASES, ids=str)
def test_logits_are_those_of_the_weights_that_peft_merges(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", family, seed=1, num_masks=0)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    linears = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=linears, init_lora_weights=False, **fields)
    peft.get_peft_model(whole, config).save_pretrained(tmp_path / "lora")
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(fresh, tmp_path / "lora").merge_and_unload()
    ids = ids_of(4, 21)
    with torch.no_grad():
        wanted = merged(torch.tensor([ids])).logits[0]
    model = load_model(base, dtype="float32", loras={"it": tmp_path / "lora"})
    batch = ForwardBatch.build([Segment(ids, 0, [0, 1], lora=0)], block_size=BLOCK, mask_ids=())
    logits = model.logits(model.forward(batch, model.allocate_kv(2, BLOCK)))[:21]
    assert torch.allclose(logits, wanted, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(logits, _base_logits(base, ids), atol=0.1)


def _base_logits(base: Path, ids: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return found


def test_rows_of_one_lora_are_runs_as_long_as_they_are_neighbours() -> None:
    layout = DraftLayout.full(0, 2)
    segments = [Segment([5, 6], 0, [n], layout, lora=lora) for n, lora in enumerate((1, 1, None, 0))]
    batch = ForwardBatch.build(segments, block_size=4, mask_ids=(7, 8))
    runs = [(1, 0, 4), (0, 6, 8), (0, 10, 12), (1, 12, 16)]
    assert list(batch.loras) == [LoraRows(lora, slice(first, last)) for lora, first, last in runs]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), seed=1)


@pytest.fixture(scope="module")
def model(base: Path) -> SpaceModel:
    return load_model(base, dtype="float32")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "biases"),
    ({"trainable_token_indices": [3]}, "embeddings"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"layer_replication": [[0, 2]]}, "repeats layers"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"peft_type": "LOHA"}, "'LOHA'"),
    ({"use_new_thing": True}, "use_new_thing"),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_is_more_than_a_low_rank_is_refused_by_name_with_a_cure(
    fields: dict[str, Any], word: str, base: Path, model: SpaceModel, tmp_path: Path
) -> None:
    folder = tiny_lora(tmp_path / "lora", base, **fields)
    assert model.loras is not None
    with pytest.raises(InvalidLora, match=word) as caught:
        model.loras.load(folder)
    assert "merge" in str(caught.value)


def embeddings(folder: Path) -> None:
    extra = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 3)}
    save_file(load_file(folder / LORA_WEIGHTS) | extra, folder / LORA_WEIGHTS)


def head(folder: Path) -> None:
    names = {f"base_model.model.lm_head.lora_{one}.weight": torch.ones(4, 4) for one in "AB"}
    save_file(load_file(folder / LORA_WEIGHTS) | names, folder / LORA_WEIGHTS)


def only_a(folder: Path) -> None:
    tensors = load_file(folder / LORA_WEIGHTS)
    del tensors[min(name for name in tensors if "lora_B" in name)]
    save_file(tensors, folder / LORA_WEIGHTS)


def other_rank(folder: Path) -> None:
    config = json.loads((folder / LORA_CONFIG).read_text())
    (folder / LORA_CONFIG).write_text(json.dumps(config | {"r": 8}))


def infinite(folder: Path) -> None:
    tensors = load_file(folder / LORA_WEIGHTS)
    tensors[min(tensors)][0, 0] = torch.inf
    save_file(tensors, folder / LORA_WEIGHTS)


def no_weights(folder: Path) -> None:
    (folder / LORA_WEIGHTS).unlink()


def twice(folder: Path) -> None:
    tensors = load_file(folder / LORA_WEIGHTS)
    again = {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | again, folder / LORA_WEIGHTS)


def nested(folder: Path) -> None:
    (folder / LORA_CONFIG).write_text("[" * 100_000 + "]" * 100_000)


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (embeddings, "embeddings"), (head, "lm_head, which is no linear of its own"), (only_a, "lacks"),
    (other_rank, "of rank 8"),    (infinite, "not finite"), (no_weights, "has no adapter_model.safetensors"),
    (twice, "two pairs for model.layers.0"), (nested, "nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "word"), BROKEN, ids=[spoil.__name__ for spoil, _ in BROKEN])
def test_files_that_do_not_fit_are_refused(
    spoil: Callable[[Path], None], word: str, base: Path, model: SpaceModel, tmp_path: Path
) -> None:
    folder = tiny_lora(tmp_path / "lora", base)
    spoil(folder)
    assert model.loras is not None
    with pytest.raises(InvalidLora, match=word):
        model.loras.load(folder)


ODD: list[tuple[dict[str, Any], str]] = [
    ({"r": float("inf")}, "r in the .* is inf"), ({"r": 4.5}, "r in the .* is 4.5"), ({"lora_alpha": "8"}, "alpha in"),
    ({"lora_alpha": float("nan")}, "lora_alpha in .* is nan"), ({"rank_pattern": ["q_proj"]}, "which is no object"),
    ({"rank_pattern": {"q_proj": None}}, "rank_pattern in .* is None"), ({"alpha_pattern": {"(": 4}}, "no regular exp"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern in .* is 'x'"), ({"target_modules": 5}, "no list of names"),
    ({"target_modules": "("}, "no regular expression"), ({"layers_to_transform": "0"}, "no list of layers"),
    ({"layers_to_transform": [0], "layers_pattern": [1]}, "no name of a list of layers"),
    ({"target_modules": "(.|\\w)+[0-9]"}, "takes more than 1 s"),
    ({"rank_pattern": {"(.|\\w)+[0-9]": 4}}, "takes more than 1 s"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "word"), ODD, ids=[str(fields) for fields, _ in ODD])
def test_a_field_that_is_none_of_its_kind_is_named(
    fields: dict[str, Any], word: str, base: Path, model: SpaceModel, tmp_path: Path
) -> None:
    assert model.loras is not None
    with pytest.raises(InvalidLora, match=word):
        model.loras.load(tiny_lora(tmp_path / "lora", base, **fields))


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["q_proj"]}, "layers.0.mlp.down_proj"),
    ({"target_modules": r".*layers\.0\..*"}, "layers.1.mlp.down_proj"),
    ({"target_modules": ["model.layers.0.mlp.down_proj", "mlp.up_proj"]}, "layers.0.mlp.gate_proj"),
    ({"exclude_modules": r".*\.v_proj"}, "layers.0.self_attn.v_proj"),
    ({"layers_to_transform": 0}, "layers.1.mlp.down_proj"),
    ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers.0.mlp.down_proj"),
]


@pytest.mark.parametrize(("fields", "linear"), LEFT_OUT, ids=[str(fields) for fields, _ in LEFT_OUT])
def test_a_pair_that_the_config_leaves_out_and_peft_would_ignore_is_refused(
    fields: dict[str, Any], linear: str, base: Path, model: SpaceModel, tmp_path: Path
) -> None:
    assert model.loras is not None
    with pytest.raises(InvalidLora, match=rf"pair for model.{linear}, which its adapter_config.json leaves out"):
        model.loras.load(tiny_lora(tmp_path / "lora", base, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\..*"}, {"target_modules": "all-linear"},
        {"target_modules": None}, {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, {"exclude_modules": ["lm_head"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_names_its_linears_in_another_way_is_served(
    fields: dict[str, Any], base: Path, model: SpaceModel, tmp_path: Path
) -> None:
    assert model.loras is not None
    model.loras.unload(model.loras.load(tiny_lora(tmp_path / "lora", base, **fields)))


def test_loras_come_and_go_by_their_content(base: Path, tmp_path: Path) -> None:
    loras = load_model(base, dtype="float32", loras={"first": tiny_lora(tmp_path / "a", base, seed=1)}).loras
    assert loras is not None
    second = tiny_lora(tmp_path / "b", base, seed=2)
    digest = loras.load(second)
    assert digest == hash_lora(second)
    assert loras.loaded[digest].number == 1
    assert loras.load(shutil.copytree(second, tmp_path / "copy")) == digest
    assert len(loras.loaded) == 2
    tiny_lora(second, base, seed=3)
    with pytest.raises(InvalidLora, match="has changed"):
        loras.load(second, digest="0" * 64)
    loras.unload(next(iter(loras.loaded)))
    assert loras.loaded[loras.load(second)].number == 0, "the free number is taken"
    loras.unload_unnamed()
    assert not loras.loaded


def test_where_loras_are_not_served_the_cure_is_said(base: Path, tmp_path: Path) -> None:
    assert "--device cpu" in why_no_loras(torch.device("cuda"), 1)
    assert "--tensor-parallel" in why_no_loras(torch.device("cpu"), 2)
    network = load_model(base, dtype="float32")._network
    loras = LoadedLoras(network, LoraBase(torch.float32, {}), why_none=why_no_loras(torch.device("cuda"), 1))
    with pytest.raises(InvalidLora, match="merge_and_unload"):
        loras.load(tmp_path)
    with pytest.raises(InvalidSetting, match="adapter needs a name"):
        load_model(base, dtype="float32", adapters={"": tmp_path})
