"""What a config says that cannot be, or is not served, is refused with the reason and the cure, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sweep import EQUAL, sweep
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.loading.load import load_model
from space_model.model_error import ModelError, UnsupportedModel
from space_model.testing import tiny_checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

THETA = {"rope_theta": 10000.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": THETA | {"rope_type": "su"}}, "by 'su': the angles would depend on the longest sequence"),
        ({"rope_parameters": THETA | {"rope_type": "longrope"} | LONG}, "by 'longrope'"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_parameters": None}, "by 'ntk'"),
        ({"rope_parameters": THETA | {"rope_type": "spiral"}}, "by 'spiral' .*none of default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta .* is 0.*; it must be above 0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}},
            "rope_theta .* is -5.0; it must be above 0",
        ),
        ({"num_key_value_heads": 3}, r"4 heads \(num_attention_heads\) for 3 key-value heads .* do not divide"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None},
            "hidden size .*attention heads .6.* Fetch the config.json",
        ),
        ({"num_attention_heads": [4, 2]}, "num_attention_heads|cannot read the config"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": -16}, "head_dim .* is -16"),
        ({"is_causal": False}, "attends to later tokens, too .* writes no text"),
        ({"use_bidirectional_attention": True}, "attends to later tokens, too"),
        ({"kv_lora_rank": 16}, "multi-head latent attention"),
        ({"layer_types": ["full_attention", "conv"]}, "conv layers; only full and sliding|cannot read the config"),
        ({"vocab_size": "many"}, "cannot read the config of .*vocab_size.* Fetch the config.json of the original"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_field(
    fields: dict[str, Any], message: str, copy_of: Callable[..., Path]
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(copy_of(**fields))


@pytest.mark.parametrize(
    ("auto_map", "served"),
    [
        (
            {
                "AutoConfig": "configuration_llama.LlamaConfig",
                "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
            },
            1,
        ),
        ({"AutoModelForCausalLM": "owner/name--modeling_llama.LLaMAForCausalLM"}, 1),
        ({"AutoConfig": "configuration_llama.LlamaConfig"}, 1),
        ({"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}, 0),
    ],
)
def test_a_model_that_became_native_is_served_without_the_code_it_brings(
    auto_map: dict[str, str], served: int, copy_of: Callable[..., Path]
) -> None:
    path = copy_of(auto_map=auto_map)
    for name in ("configuration_llama.py", "modeling_llama.py", "modeling_other.py"):
        (path / name).write_text("raise SystemExit('this code ran')")
    if served:
        load_model(path)
    else:
        with pytest.raises(UnsupportedModel, match=r"OtherForCausalLM.*which is never run.* are LlamaForCausalLM"):
            load_model(path)


def test_attention_that_is_not_causal_is_noticed_where_no_field_says_so(tmp_path: Path) -> None:
    """bert-generation: a decoder only with is_decoder."""
    path = tiny_checkpoint(tmp_path, "llama")
    config = path / "config.json"
    config.write_text(
        '{"model_type": "bert-generation", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}'
    )
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    with pytest.raises(ModelError, match="attends to later tokens, too"):
        load_model(path)


def test_the_text_part_of_a_model_that_sees_images_is_served_as_the_whole_one_says_it(tmp_path: Path) -> None:
    """gemma3, with names as transformers 4 and 5 have them."""
    assert sweep("gemma3", tmp_path).difference < EQUAL
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.language_model.", "language_model.model.").replace(
            "model.", "", name.startswith("model.v")
        ): t
        for name, t in load_file(file).items()
    }
    before = load_model(tmp_path, dtype="float32")
    save_file(tensors, file, metadata={"format": "pt"})
    after = load_model(tmp_path, dtype="float32")
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(after.logits(rows), before.logits(rows))
    assert torch.equal(after.embed(torch.arange(9)), before.embed(torch.arange(9)))


def test_other_models_that_see_images_are_refused_by_name(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["got_ocr2"]().to_dict()
    with pytest.raises(UnsupportedModel, match=r"of type 'got_ocr2' see or hear, too.*Use a checkpoint"):
        read_config(Checkpoint("x", tmp_path, config, (), tmp_path))


def test_a_file_of_the_config_may_say_infinity_as_transformers_writes_it(copy_of: Callable[..., Path]) -> None:
    load_model(copy_of(unheard_of={"__float__": "Infinity"}))
