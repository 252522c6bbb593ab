"""Multi-head latent attention (MLA) over pages of compressed keys gives what transformers gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sweep import paged_logits
from space_kernels.dispatch import ops_for
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, InvalidSpaceSection
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [(7 * i + 3) % 100 + 16 for i in range(40)]
CHUNKS = (1, 1, 2, 3, 7, 26)
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite: no q_lora_rank, yarn with both factors": {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, **ROUTED,
    },
    "DeepSeek-V2: experts in groups by the greatest": {
        "model_type": "deepseek_v2", "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, **ROUTED,
    },
    "DeepSeek-V3 and Kimi-K2: sigmoids in groups": {
        "model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 4, "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, **ROUTED,
    },
    "Moonlight: no q_lora_rank, one group": {
        "model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1, **ROUTED,
    },
    "halves instead of pairs turned, with biases": {
        "model_type": "deepseek_v3", "q_lora_rank": 48, "rope_interleave": False, "attention_bias": True, "n_group": 2,
        "topk_group": 1, **ROUTED,
    },
    "GLM-4.7-Flash: values longer than keys": {
        "model_type": "glm4_moe_lite", "q_lora_rank": 48, "v_head_dim": 40, "n_group": 1, "topk_group": 1, **ROUTED,
    },
    "MiniCPM3: dense, with values of another size": {
        "model_type": "minicpm3", "q_lora_rank": 48, "v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4,
    },
}  # fmt: skip


def write(folder: Path, fields: dict[str, Any]) -> None:
    """Write a random checkpoint: unit gain per layer, with biases and norms large enough to matter."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**sizes, **heads, **LATENT, **fields}))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = noise * weight.shape[-1] ** -0.5 if weight.dim() > 1 else weight.data + 0.1 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("score_correction_bias"):
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    model.save_pretrained(folder)


def logits(model: SpaceModel, chunks: tuple[int, ...] = (len(IDS),)) -> Tensor:
    return paged_logits(model, IDS, chunks, pages=(2, 0, 1))


@torch.inference_mode()
def dense(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_its_logits_are_those_of_transformers_and_chunks_have_the_same_bits(name: str, tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name])
    model = load_model(tmp_path, dtype="float32")
    whole = logits(model)
    assert difference(whole, dense(tmp_path)) < 1e-5
    assert torch.equal(logits(model, CHUNKS), whole)


@pytest.mark.parametrize("name", [*VARIANTS][:3])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"attention": "torch"},
        {"weights": "int8"},
        {"weights": "int4"},
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_in_bfloat16_chunks_have_the_same_bits_in_every_format(name: str, how: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name])
    model = load_model(tmp_path, dtype="bfloat16", **how)
    assert torch.equal(logits(model, CHUNKS), logits(model))


def test_in_fp8_chunks_have_the_same_bits(tmp_path: Path) -> None:
    write(tmp_path, VARIANTS["MiniCPM3: dense, with values of another size"])
    model = load_model(tmp_path, dtype="bfloat16", weights="fp8")
    assert torch.equal(logits(model, CHUNKS), logits(model))


def test_pages_hold_one_latent_for_all_heads(tmp_path: Path) -> None:
    write(tmp_path, VARIANTS["DeepSeek-V3 and Kimi-K2: sigmoids in groups"])
    model = load_model(tmp_path, dtype="bfloat16")
    kv = model.allocate_kv(5, 16)
    pages = {tensor.data_ptr(): tensor.nbytes for tensor in (*kv.keys, *kv.values)}
    assert sum(pages.values()) == 5 * 16 * model.facts.kv_bytes_per_token
    assert model.facts.kv_bytes_per_token == 2 * 2 * (32 + 16)  # layers, bytes, rank and rotated part
    of_each_head = 2 * 2 * 4 * (16 + 16 + 24)
    assert model.facts.kv_bytes_per_token < of_each_head / 4


def test_an_attention_without_it_is_refused_with_the_one_to_take(tmp_path: Path) -> None:
    write(tmp_path, VARIANTS["DeepSeek-V2-Lite: no q_lora_rank, yarn with both factors"])
    with pytest.raises(InvalidSetting, match=r"latent attention \(MLA\).*give --attention torch"):
        load_model(tmp_path, choose_ops=lambda facts: replace(ops_for("cpu"), attention="triton"))


def test_an_adapter_of_the_linear_that_queries_are_multiplied_by_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "base", "deepseek_v3")
    fine = tiny_adapter(tmp_path / "fine", path, linears=("q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"))
    load_model(path, dtype="float32", adapters={"fine": fine})
    odd = tiny_adapter(tmp_path / "odd", path, linears=("kv_b_proj",))
    with pytest.raises(InvalidSpaceSection, match=r"odd.*kv_b_proj, by which latent attention"):
        load_model(path, dtype="float32", adapters={"odd": odd})
