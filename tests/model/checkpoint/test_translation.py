"""Checkpoints that came with their own code are served as the family that computes the same; that code never runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import CONFIGS, DENSE, write_published
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.translation import TRANSLATED
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import check_tensors, load_model
from space_model.model_error import UnsupportedModel
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

IDS = [(7 * i + 3) % 100 + 16 for i in range(40)]


@torch.inference_mode()
def logits(model: SpaceModel, chunks: tuple[int, ...]) -> Tensor:
    kv, parts, start = model.allocate_kv(3, 16), [], 0
    for length in chunks:
        batch = ForwardBatch.build([Segment(IDS[start : start + length], start, [0, 1, 2])], block_size=16, mask_ids=())
        parts.append(model.logits(model.forward(batch, kv)[:length]))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_its_logits_are_those_of_the_published_model(name: str, num_files: int, tmp_path: Path) -> None:
    config = CONFIGS[name]
    tensors = write_published(tmp_path, config, num_files=num_files)
    model = load_model(tmp_path, dtype="float32")
    whole = logits(model, (40,))
    wanted = DENSE[config["model_type"]](config, tensors, torch.tensor(IDS))
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert torch.equal(logits(model, (1, 1, 2, 3, 7, 26)), whole)


@pytest.mark.slow
@torch.inference_mode()
def test_a_layer_of_baichuan_13b_at_its_own_width_is_that_of_the_published_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 13696, "num_hidden_layers": 1}
    config = {**CONFIGS["Baichuan2-13B-Chat"], **sizes}
    tensors = write_published(tmp_path, config)
    whole = logits(load_model(tmp_path, dtype="float32"), (40,))
    wanted = DENSE["baichuan"](config, tensors, torch.tensor(IDS))
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 2e-5


def test_every_translated_family_has_a_published_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(TRANSLATED) == set(DENSE)


def as_published(folder: Path, model_type: str, class_name: str) -> Path:
    """Write the model_type and the class of own code of a published config.json."""
    file = folder / "config.json"
    own = {"AutoModelForCausalLM": f"modeling_own.{class_name}"}
    config = json.loads(file.read_text()) | {"model_type": model_type, "architectures": [class_name], "auto_map": own}
    file.write_text(json.dumps(config))
    return folder


def test_kimi_k2_is_the_model_whose_class_it_names(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "deepseek_v3", num_masks=0)
    wanted = logits(load_model(folder, dtype="float32"), (40,))
    as_published(folder, "kimi_k2", "DeepseekV3ForCausalLM")
    assert torch.equal(logits(load_model(folder, dtype="float32"), (40,)), wanted)
    as_published(folder, "kimi_k2", "OwnForCausalLM")
    with pytest.raises(UnsupportedModel, match="no models of type 'kimi_k2'"):
        load_model(folder)


def test_internlm3_is_llama_though_it_brings_a_class_of_its_own(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", num_masks=0)
    wanted = logits(load_model(folder, dtype="float32"), (40,))
    as_published(folder, "internlm3", "InternLM3ForCausalLM")
    assert float((logits(load_model(folder, dtype="float32"), (40,)) - wanted).abs().max()) < 1e-5
    as_published(folder, "internlm3", "OwnForCausalLM")
    with pytest.raises(UnsupportedModel, match="brings its own code"):
        load_model(folder)


def test_a_class_of_own_code_may_be_spelled_otherwise(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", num_masks=0, model_type="ernie4_5")
    wanted = logits(load_model(folder, dtype="float32"), (40,))
    as_published(folder, "ernie4_5", "Ernie4_5_ForCausalLM")
    assert torch.equal(logits(load_model(folder, dtype="float32"), (40,)), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_is_that_of_the_family_it_is_served_as(name: str, tmp_path: Path) -> None:
    write_published(tmp_path, CONFIGS[name])
    found = Checkpoint.open(tmp_path).config
    assert found["model_type"] in TRANSLATED[CONFIGS[name]["model_type"]]
    assert "auto_map" not in found
    check_tensors(tmp_path)


def test_qwen_s_window_ends_where_its_angles_would_depend_on_the_length(tmp_path: Path) -> None:
    write_published(tmp_path, CONFIGS["Qwen-7B"])
    assert load_model(tmp_path).facts.window == 256
    write_published(tmp_path, {**CONFIGS["Qwen-7B"], "use_dynamic_ntk": False, "use_logn_attn": False})
    assert load_model(tmp_path).facts.window == 1024


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "Qwen-7B",
            {"rotary_pct": 0.5},
            "rotary_pct in the config.json of .* is 0.5; .* only those with 1.0 are served",
        ),
        ("chatglm3-6b", {"rmsnorm": False}, "rmsnorm in the config.json of .* is False"),
        ("chatglm3-6b", {"num_layers": None, "multi_query_attention": None}, "the first ChatGLM.*Use ChatGLM2"),
        ("Baichuan-7B", {"max_position_embeddings": None}, "has no model_max_length, which its architecture"),
        ("internlm2-7b", {"max_position_embeddings": None}, "has no max_position_embeddings, which its architecture"),
    ],
)
def test_a_member_that_computes_something_else_is_refused(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {field: value for field, value in {**CONFIGS[name], **fields}.items() if value is not None}
    write_published(tmp_path, CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path)


def test_a_tensor_that_no_part_of_the_family_is_made_of_is_refused_by_its_own_name(tmp_path: Path) -> None:
    tensors = write_published(tmp_path, {**CONFIGS["internlm-7b"], "bias": False})
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_model(tmp_path)
