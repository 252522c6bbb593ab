"""Families that compute their attention themselves are served over pages as transformers computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from space_kernels.dispatch import ops_for
from space_model.checkpoint import family
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.networks.own_attention import llama4
from space_model.networks.own_attention.attach import FAMILIES
from space_model.networks.transformers_network import TransformersNetwork
from space_model.space_model import SpaceModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = [(7 * i + 3) % 100 + 16 for i in range(40)]
CHUNKS = (1, 1, 2, 3, 7, 26)

_LLAMA4 = {
    "model_type": "llama4_text", "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "intermediate_size_mlp": 128, "num_local_experts": 4, "attention_chunk_size": 9, "max_position_embeddings": 64,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "falcon, one key head for all, as the 7B": {"model_type": "falcon", "num_kv_heads": 4},
    "falcon, groups and two norms, as the 40B": {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 8,
    },
    "falcon, groups and one norm, as the 11B": {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    },
    "falcon, linear biases and one thing after the other, as falcon-rw": {
        "model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    },
    "falcon, linear biases of six heads": {
        "model_type": "falcon", "alibi": True, "hidden_size": 96, "num_attention_heads": 6, "bias": True,
    },
    "bloom": {"model_type": "bloom"},
    "bloom, six heads and the residual after the norm": {
        "model_type": "bloom", "hidden_size": 96, "num_attention_heads": 6,
        "apply_residual_connection_post_layernorm": True,
    },
    "mpt": {"model_type": "mpt", "max_seq_len": 512},
    "mpt, six heads and clipped": {
        "model_type": "mpt", "hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 64,
        "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3},
    },
    "gptj": {"model_type": "gptj", "rotary_dim": 8, "n_positions": 64},
    "gptj, all of a head turned": {"model_type": "gptj", "rotary_dim": 16, "n_positions": 64},
    "codegen": {"model_type": "codegen", "rotary_dim": 8, "n_positions": 64},
    "gpt_neo": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], "window_size": 9},
    "gpt_neox_japanese": {"model_type": "gpt_neox_japanese", "rotary_pct": 0.5},
    "stablelm, as the 3B": {"model_type": "stablelm", "num_key_value_heads": 4},
    "stablelm, as the 1.6B and the 12B": {
        "model_type": "stablelm", "num_key_value_heads": 2, "use_qkv_bias": True, "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    "biogpt": {"model_type": "biogpt", "intermediate_size": 128, "max_position_embeddings": 64},
    "llama4, as Scout": {**_LLAMA4, "no_rope_layers": [1, 0], "floor_scale": 8},
    "llama4, as Maverick": {
        **_LLAMA4, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 2, "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
    "llama4, two experts of a row": {**_LLAMA4, "no_rope_layers": [0, 1], "num_experts_per_tok": 2},
    "xglm": {"model_type": "xglm", "ffn_dim": 128, "max_position_embeddings": 64},
    "xglm, six heads and plain embeddings": {
        "model_type": "xglm", "hidden_size": 96, "num_attention_heads": 6, "ffn_dim": 128, "scale_embedding": False,
        "max_position_embeddings": 64, "pad_token_id": None,
    },
}  # fmt: skip


def write(folder: Path, fields: dict[str, Any], *, seed: int = 0) -> PreTrainedConfig:
    """Write a random checkpoint: unit gain per layer, with biases and norms large enough to matter."""
    config: PreTrainedConfig = AutoConfig.for_model(**{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = noise * weight.shape[-1] ** -0.5 if weight.dim() > 1 else weight.data + 0.1 * noise
    model.tie_weights()
    model.save_pretrained(folder)
    return config


@torch.inference_mode()
def logits(model: SpaceModel, ids: list[int], chunks: tuple[int, ...]) -> Tensor:
    pages = list(range(-(-len(ids) // 16)))
    kv, parts, start = model.allocate_kv(len(pages), 16), [], 0
    for length in chunks:
        segment = Segment(ids[start : start + length], start, pages)
        batch = ForwardBatch.build([segment], block_size=16, mask_ids=())
        parts.append(model.logits(model.forward(batch, kv)[:length]))
        start += length
    return torch.cat(parts)


@torch.inference_mode()
def dense(folder: Path, ids: list[int]) -> Tensor:
    kind = AutoConfig.from_pretrained(folder).model_type
    usual = "sdpa" if kind == "falcon" else "eager"  # Falcon's eager attention adds linear biases twice
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=usual).eval()
    found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_its_logits_are_those_of_transformers_and_chunks_have_the_same_bits(name: str, tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name])
    model = load_model(tmp_path, dtype="float32", max_model_len=64)
    whole, wanted = logits(model, IDS, (len(IDS),)), dense(tmp_path, IDS)
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert torch.equal(logits(model, IDS, CHUNKS), whole)


@pytest.mark.parametrize("name", VARIANTS)
def test_in_bfloat16_chunks_have_the_same_bits(name: str, tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name])
    model = load_model(tmp_path, dtype="bfloat16", max_model_len=64)
    assert torch.equal(logits(model, IDS, CHUNKS), logits(model, IDS, (len(IDS),)))


def test_every_family_that_config_json_is_let_through_for_has_its_part() -> None:
    assert set(FAMILIES) == family.OWN_ATTENTION
    assert {fields["model_type"] for fields in VARIANTS.values()} == family.OWN_ATTENTION - {"nemotron"}


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, linear biases of six heads"])
def test_an_attention_without_linear_biases_is_refused_with_the_one_to_take(name: str, tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name])
    with pytest.raises(InvalidSetting, match=r"linear biases \(ALiBi\).*give --attention torch"):
        load_model(tmp_path, choose_ops=lambda facts: replace(ops_for("cpu"), attention="triton"))


def test_an_xglm_whose_positions_begin_elsewhere_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their table begins with two rows that no position has."""
    write(tmp_path, VARIANTS["xglm"])
    plain = TransformersNetwork.enter

    def enter(network: TransformersNetwork, batch: ForwardBatch) -> Tensor:
        network.base.embed_positions.offset = 0
        try:
            return plain(network, batch)
        finally:
            network.base.embed_positions.offset = 2

    monkeypatch.setattr(TransformersNetwork, "enter", enter)
    with pytest.raises(UnsupportedModel, match="the embedding computes something else here"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_config": {"alibi": False}}, "alibi in the config.json of .* is False"),
        ({"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max in the config.json of .* is 16"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln in the config.json of .* is True"),
        ({"logit_scale": 0.5}, "logit_scale in the config.json of .* is 0.5"),
    ],
)
def test_an_mpt_that_transformers_computes_as_another_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": "mpt", **fields})
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("without", ["chunk", "position"])
def test_a_llama4_without_its_chunks_or_its_scales_by_position_is_found_at_the_start(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, VARIANTS["llama4, as Scout"])

    def faulty(module: Any, *inputs: Any, **keywords: Any) -> Any:
        if without == "chunk":
            module.chunk = None
        module.attn_temperature_tuning = without != "position"
        try:
            return llama4.forward(module, *inputs, **keywords)
        finally:
            module.attn_temperature_tuning = True  # of transformers' own

    monkeypatch.setitem(FAMILIES, "llama4_text", replace(FAMILIES["llama4_text"], forward=faulty))
    with pytest.raises(UnsupportedModel, match=rf"layer {int(without != 'chunk')} of 2 computes something else here"):
        load_model(tmp_path, dtype="float32")


AS_RELEASED: dict[str, dict[str, Any]] = {
    "falcon-7b": {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71},
    "falcon-11B": {
        "model_type": "falcon", "hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8,
        "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "rope_theta": 5000042, "ffn_hidden_size": 16384,
        "max_position_embeddings": 8192,
    },
    "falcon-rw-1b": {
        "model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32, "alibi": True, "multi_query": False,
        "parallel_attn": False, "bias": True,
    },
    "bloom-7b1": {"model_type": "bloom", "hidden_size": 4096, "num_attention_heads": 32},
    "mpt-7b": {"model_type": "mpt", "hidden_size": 4096, "num_attention_heads": 32, "max_seq_len": 2048},
    "gpt-j-6b": {"model_type": "gptj", "hidden_size": 4096, "num_attention_heads": 16, "rotary_dim": 64},
    "stablelm-3b": {
        "model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 6912,
    },
    "xglm-564M": {"model_type": "xglm", "hidden_size": 1024, "num_attention_heads": 16, "ffn_dim": 4096},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", AS_RELEASED)
def test_one_layer_of_the_released_width_is_as_transformers_computes_it(name: str, tmp_path: Path) -> None:
    write(tmp_path, {**AS_RELEASED[name], "num_hidden_layers": 1, "vocab_size": 512})
    model = load_model(tmp_path, dtype="float32")
    whole, wanted = logits(model, IDS, (len(IDS),)), dense(tmp_path, IDS)
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert torch.equal(logits(model, IDS, CHUNKS), whole)
