"""Every tensor of a checkpoint is used, or one of those that may be left out, or named in a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.loading.load import load_model
from space_model.loading.sharded_model import read_part
from space_model.model_error import UnsupportedModel
from space_model.networks.tensor_parallel import Share
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from torch import Tensor

LAYER = "model.layers.1"


def with_tensors(path: Path, more: dict[str, Tensor]) -> Path:
    """The same folder, whose file has these tensors besides (or instead)."""
    file = path / "model.safetensors"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return path


def logits(model: SpaceModel) -> Tensor:
    rows = torch.randn(4, model.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    return model.logits(rows)


REFUSED = [
    (f"{LAYER}.mlp.down_proj.weight_scale", "quantised weights, and neither config.json nor a file beside it says how"),
    (f"{LAYER}.mlp.down_proj.qweight", "quantised weights"),
    (f"{LAYER}.self_attn.q_proj.lora_A.weight", "an adapter that is not merged .* merge_and_unload"),
    (f"{LAYER}.self_attn.q_proj.lora_B.default.weight", "an adapter that is not merged"),
    (f"{LAYER}.self_attn.q_proj.bias", "no such bias: fetch the config.json .*attention_bias"),
    ("lm_head.bias", "no such bias"),
    ("model.layers.2.mlp.up_proj.weight", "layer 2, and num_hidden_layers is 2"),
    ("score.weight", "scores or classifies"),
    (f"{LAYER}.self_attn.q_norm.weight", "of another architecture than config.json says"),
    ("encoder.weight", "of another architecture"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_tensor_without_a_place_is_named_with_its_file_what_it_is_and_the_cure(
    name: str, message: str, copy_of: Callable[..., Path]
) -> None:
    path = with_tensors(copy_of(), {name: torch.zeros(3)})
    with pytest.raises(UnsupportedModel, match=rf"has {name} in model\.safetensors, for which .* no place.*{message}"):
        load_model(path)


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_rank_refuses_the_same(name: str, message: str, copy_of: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(with_tensors(copy_of(), {name: torch.zeros(3)}))
    with pytest.raises(UnsupportedModel, match=f"has {name} in .*{message}"):
        read_part(checkpoint, read_config(checkpoint), Share(1, 2), torch.float32, torch.device("cpu"))


LEFT_OUT = [
    f"{LAYER}.self_attn.rotary_emb.inv_freq",
    "rope_freqs",
    f"{LAYER}.attn.masked_bias",
    "model.position_ids",
    "model.vision_tower.layers.0.fc1.weight",
    "visual.blocks.0.attn.qkv.weight",
    "multi_modal_projector.linear.bias",
    "model.audio_tower.conv.weight",
    "mtp.layers.0.mlp.up_proj.weight",
]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_may_be_left_out_changes_nothing(
    name: str, copy_of: Callable[..., Path], checkpoint_of: Callable[[str], Path]
) -> None:
    path = with_tensors(copy_of(), {name: torch.randn(3)})
    assert torch.equal(logits(load_model(path)), logits(load_model(checkpoint_of("llama"))))
    checkpoint = Checkpoint.open(path)
    read_part(checkpoint, read_config(checkpoint), Share(0, 2), torch.float32, torch.device("cpu"))


def test_layers_that_predict_further_tokens_are_left_out_as_many_as_the_config_names(
    copy_of: Callable[..., Path],
) -> None:
    path = with_tensors(copy_of(num_nextn_predict_layers=1), {"model.layers.2.eh_proj.weight": torch.zeros(3)})
    load_model(path)
    with_tensors(path, {"model.layers.3.eh_proj.weight": torch.zeros(3)})
    with pytest.raises(UnsupportedModel, match="layer 3, and num_hidden_layers is 2"):
        load_model(path)


def test_a_head_beside_a_tied_embedding_is_that_of_transformers(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", num_masks=0)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    tied = logits(load_model(path))
    with_tensors(path, {"lm_head.weight": embedding.clone()})
    assert torch.equal(logits(load_model(path)), tied)
    with_tensors(path, {"lm_head.weight": embedding.flip(0)})
    assert torch.equal(logits(load_model(path)), tied.flip(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{LAYER}.mlp.down_proj.weight", "model.norm.weight"])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_tensor(
    name: str, value: float, copy_of: Callable[..., Path]
) -> None:
    path = copy_of()
    tensor = load_file(path / "model.safetensors")[name]
    tensor.view(-1)[7] = value
    with_tensors(path, {name: tensor})
    with pytest.raises(UnsupportedModel, match=rf"{name} of .* has 1 of {tensor.numel()} numbers that are not finite"):
        load_model(path)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UnsupportedModel, match=r"1 of \d+ numbers that are not finite"):
        read_part(checkpoint, read_config(checkpoint), Share(0, 1), torch.float32, torch.device("cpu"))


def test_numbers_too_large_for_the_asked_dtype_are_refused_with_the_cure(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    name = f"{LAYER}.mlp.down_proj.weight"
    tensor = load_file(path / "model.safetensors")[name]
    tensor[0, 0] = 1e5
    with_tensors(path, {name: tensor})
    with pytest.raises(UnsupportedModel, match=r"not finite .* in float16.*finite with --dtype bfloat16"):
        load_model(path, dtype="float16")


def test_weights_that_are_integers_without_a_word_about_them_are_refused(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    name = f"{LAYER}.mlp.down_proj.weight"
    tensor = load_file(path / "model.safetensors")[name]
    with_tensors(path, {name: (tensor * 100).to(torch.int8)})
    with pytest.raises(UnsupportedModel, match=rf"{name} of .* is kept as int8, and config.json says nothing"):
        load_model(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy_of: Callable[..., Path]) -> None:
    path = with_tensors(copy_of(), {f"{LAYER}.mlp.down_proj.weight": torch.zeros(64, 127)})
    with pytest.raises(
        UnsupportedModel, match=rf"{LAYER}\.mlp\.down_proj\.weight of .* shape \(64, 127\); .* \(64, 128\)"
    ):
        load_model(path)
    assert json.loads((path / "config.json").read_text())["intermediate_size"] == 128
