"""Layers as wide as those of published models, with random weights, have the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_testing import write_mxfp4_experts
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from tiny_checkpoints import FAMILIES, MORE_FAMILIES, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

WIDTHS: dict[str, dict[str, Any]] = {
    "gpt_oss": {  # gpt-oss-20b, with 8 of 32 experts
        "hidden_size": 2880, "intermediate_size": 2880, "num_heads": 64, "kv_heads": 8, "head_dim": 64,
        "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "gemma4": {  # transformers' defaults, with the embeddings per layer and the shared keys and values of E2B
        "hidden_size": 2304, "intermediate_size": 9216, "num_heads": 8, "kv_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "hidden_size_per_layer_input": 256, "sliding_window": 128,
        "use_double_wide_mlp": True,
    },
    "gemma4_moe": {  # the same, with 8 experts of the 128 of 26B-A4B, and keys that are values, too
        "hidden_size": 2304, "intermediate_size": 2112, "num_heads": 8, "kv_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 2, "moe_intermediate_size": 704, "num_experts": 8,
        "top_k_experts": 4, "sliding_window": 128,
    },
    "deepseek_v2": {  # DeepSeek-V2-Lite, with 8 of 64 experts
        **_LATENT, "hidden_size": 2048, "intermediate_size": 10944, "num_heads": 16, "moe_intermediate_size": 1408,
        "n_routed_experts": 8, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "rope_parameters": {
            **_LATENT["rope_parameters"], "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "deepseek_v3": {  # one layer of DeepSeek-V3, with 8 of 256 experts
        **_LATENT, "hidden_size": 7168, "intermediate_size": 18432, "num_heads": 128, "q_lora_rank": 1536,
        "num_layers": 1, "moe_intermediate_size": 2048, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {  # GLM-4.7-Flash, with 8 of 64 experts
        **_LATENT, "hidden_size": 2048, "intermediate_size": 10240, "num_heads": 20, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 8, "n_group": 1,
        "num_experts_per_tok": 4, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "llama4": {  # Scout, with 4 of 16 experts, in one of two layers, and chunks shorter than the prompt
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_heads": 40, "kv_heads": 8,
        "head_dim": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "no_rope_layers": [1, 0], "moe_layers": [1], "attention_chunk_size": 64, "floor_scale": 50,
    },
    "qwen3_next": {  # Qwen3-Next-80B-A3B, with 8 of 512 experts
        "hidden_size": 2048, "intermediate_size": 5120, "num_heads": 16, "kv_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 8, "num_experts_per_tok": 4,
    },
    "lfm2": {  # LFM2-1.2B
        "hidden_size": 2048, "intermediate_size": 12288, "num_heads": 32, "kv_heads": 8, "head_dim": 64,
    },
    "granite4": {  # Granite 4.0 H Tiny, with 8 of 64 experts
        "hidden_size": 1536, "intermediate_size": 512, "num_heads": 12, "kv_heads": 4, "head_dim": 128,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 8,
        "num_experts_per_tok": 4, "shared_intermediate_size": 1024,
    },
    "gemma3n": {  # E4B, with two layers that have keys of their own and two that read them
        "hidden_size": 2048, "intermediate_size": 16384, "num_heads": 8, "kv_heads": 2, "head_dim": 256,
        "hidden_size_per_layer_input": 256, "laurel_rank": 64, "sliding_window": 128,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "jamba": {  # Jamba's 3B: one layer that attends, two of Mamba
        "hidden_size": 2560, "intermediate_size": 8192, "num_heads": 20, "kv_heads": 1, "head_dim": 128,
        "mamba_d_state": 16, "mamba_dt_rank": 160, "num_experts": 1,
    },
    "lfm3": {  # transformers' defaults
        "hidden_size": 2048, "intermediate_size": 7680, "num_heads": 16, "kv_heads": 4, "head_dim": 128,
        "sliding_window": 128,
    },
    "gemma3": {  # Gemma 3 4B
        "hidden_size": 2560, "intermediate_size": 10240, "num_heads": 8, "kv_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 128, "num_layers": 6,
    },
    "phi3": {  # Phi-3 mini
        "hidden_size": 3072, "intermediate_size": 8192, "num_heads": 32, "kv_heads": 32, "head_dim": 96,
        "sliding_window": 128,
    },
    "cohere2": {  # Command R7B
        "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
        "sliding_window": 128, "logit_scale": 0.25,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B, with 8 of 128 experts
        "hidden_size": 2048, "intermediate_size": 6144, "num_heads": 32, "kv_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True,
    },
    "glm4_moe": {  # GLM-4.5-Air, with 8 of 128 experts
        "hidden_size": 4096, "intermediate_size": 10944, "num_heads": 96, "kv_heads": 8, "head_dim": 128,
        "moe_intermediate_size": 1408, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {  # Qwen3.5-2B's widths
        "hidden_size": 2048, "intermediate_size": 6144, "num_heads": 8, "kv_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "falcon_h1": {  # Falcon-H1-1.5B
        "hidden_size": 2048, "intermediate_size": 4096, "num_heads": 8, "kv_heads": 2, "head_dim": 128,
        "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1,
    },
    "nemotron_h": {  # Nemotron-Nano-9B-v2
        "hidden_size": 4480, "intermediate_size": 15680, "num_heads": 40, "kv_heads": 8, "head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
    },
    "apertus": {  # Apertus-8B
        "hidden_size": 4096, "intermediate_size": 21504, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
    },
    "olmoe": {  # OLMoE-1B-7B, with 8 of 64 experts
        "hidden_size": 2048, "intermediate_size": 1024, "num_heads": 16, "kv_heads": 16, "head_dim": 128,
        "num_experts": 8, "num_experts_per_tok": 4,
    },
    "nemotron": {  # Minitron-4B
        "hidden_size": 3072, "intermediate_size": 9216, "num_heads": 24, "kv_heads": 8, "head_dim": 128,
    },
    "gpt_bigcode": {  # StarCoderBase-1B
        "hidden_size": 2048, "intermediate_size": 8192, "num_heads": 16, "kv_heads": 1, "head_dim": 128,
        "n_positions": 4096,
    },
    "opt": {  # OPT-1.3B
        "hidden_size": 2048, "ffn_dim": 8192, "num_heads": 32, "kv_heads": 32, "head_dim": 64,
        "word_embed_proj_dim": 2048,
    },
    "mamba": {  # Mamba-2.8B
        "hidden_size": 2560, "intermediate_size": 5120, "state_size": 16, "time_step_rank": 160,
    },
    "falcon_mamba": {  # FalconMamba-7B
        "hidden_size": 4096, "intermediate_size": 8192, "state_size": 16, "time_step_rank": 256,
    },
    "mamba2": {  # Codestral Mamba 7B
        "hidden_size": 4096, "num_heads": 128, "state_size": 128, "n_groups": 8,
        "time_step_limit": [0.0, float("inf")],
    },
    "llama": {  # Llama 2 7B
        "hidden_size": 4096, "intermediate_size": 11008, "num_heads": 32, "kv_heads": 32, "head_dim": 128,
    },
    "llama3": {  # Llama 3.2 3B
        "hidden_size": 3072, "intermediate_size": 8192, "num_heads": 24, "kv_heads": 8, "head_dim": 128,
    },
    "mistral": {  # Ministral 8B, with a window shorter than the prompt
        "hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
        "sliding_window": 128,
    },
    "qwen2": {  # Qwen2.5-3B
        "hidden_size": 2048, "intermediate_size": 11008, "num_heads": 16, "kv_heads": 2, "head_dim": 128,
    },
    "qwen3": {  # Qwen3-4B
        "hidden_size": 2560, "intermediate_size": 9728, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
    },
    "gemma2": {  # Gemma 2 2B
        "hidden_size": 2304, "intermediate_size": 9216, "num_heads": 8, "kv_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 128,
    },
    "olmo2": {  # OLMo-2-1B
        "hidden_size": 2048, "intermediate_size": 8192, "num_heads": 16, "kv_heads": 16, "head_dim": 128,
    },
    "granite": {  # Granite 3.3 2B
        "hidden_size": 2048, "intermediate_size": 8192, "num_heads": 32, "kv_heads": 8, "head_dim": 64,
    },
    "starcoder2": {  # StarCoder2-3B
        "hidden_size": 3072, "intermediate_size": 12288, "num_heads": 24, "kv_heads": 2, "head_dim": 128,
    },
    "mixtral": {  # Mixtral 8x7B, with 4 of 8 experts
        "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
        "num_layers": 1,
    },
    "qwen2_moe": {  # Qwen1.5-MoE-A2.7B, with 8 of 60 experts
        "hidden_size": 2048, "intermediate_size": 5632, "num_heads": 16, "kv_heads": 16, "head_dim": 128,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 8,
        "num_experts_per_tok": 4,
    },
    "granitemoe": {  # Granite 3.0 3B-A800M, with 8 of 40 experts
        "hidden_size": 1536, "intermediate_size": 512, "num_heads": 24, "kv_heads": 8, "head_dim": 64,
        "num_local_experts": 8, "num_experts_per_tok": 4,
    },
    "phimoe": {  # Phi-3.5-MoE, with 4 of 16 experts
        "hidden_size": 4096, "intermediate_size": 6400, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "falcon": {  # one layer of Falcon 40B
        "hidden_size": 8192, "num_heads": 128, "num_kv_heads": 8, "head_dim": 64, "num_layers": 1,
    },
    "bloom": {  # BLOOM-7B1
        "hidden_size": 4096, "num_heads": 32, "head_dim": 128,
    },
    "mpt": {  # MPT-7B
        "hidden_size": 4096, "num_heads": 32, "kv_heads": 32, "head_dim": 128, "d_model": 4096, "n_heads": 32,
        "n_layers": 2, "max_seq_len": 4096,
    },
    "stablelm": {  # StableLM 2 1.6B
        "hidden_size": 2048, "intermediate_size": 5632, "num_heads": 32, "kv_heads": 32, "head_dim": 64,
        "partial_rotary_factor": 0.25, "use_qkv_bias": True,
    },
    "gpt_neox": {  # Pythia 1.4B
        "hidden_size": 2048, "intermediate_size": 8192, "num_heads": 16, "kv_heads": 16, "head_dim": 128,
        "rotary_pct": 0.25,
    },
    "gptj": {  # GPT-J 6B
        "hidden_size": 4096, "num_heads": 16, "kv_heads": 16, "head_dim": 256, "rotary_dim": 64, "n_positions": 4096,
    },
    "cohere": {  # Aya 23 8B
        "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "kv_heads": 8, "head_dim": 128,
        "logit_scale": 0.0625,
    },
    "glm": {  # GLM-4 9B
        "hidden_size": 4096, "intermediate_size": 13696, "num_heads": 32, "kv_heads": 2, "head_dim": 128,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
"""Fields of config.json as published, but for layers, experts and vocabulary."""


def logits(model: SpaceModel, ids: list[int], chunks: tuple[int, ...]) -> Tensor:
    kv, parts, start = model.allocate_kv(-(-len(ids) // 16), 16), [], 0
    for length in chunks:
        segment = Segment(ids[start : start + length], start, range(kv.num_blocks))
        parts.append(
            model.logits(model.forward(ForwardBatch.build([segment], block_size=16, mask_ids=()), kv)[:length])
        )
        start += length
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", WIDTHS)
@torch.inference_mode()
def test_layers_of_real_width_have_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    fields = WIDTHS[family] | ({} if family in FAMILIES | MORE_FAMILIES else {"model_type": family})
    known = "llama" if "model_type" in fields else family
    folder = tiny_checkpoint(tmp_path / "plain", known, num_masks=0, window=4096, **fields)
    served = folder
    if family == "gpt_oss":  # as it is published
        served, source, folder = tmp_path / "packed", folder, tmp_path / "dequantised"
        write_mxfp4_experts(source, served, folder)
    ids = torch.randint(16, 128, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    wanted = dense(torch.tensor([ids]), use_cache=False).logits[0]
    del dense
    model = load_model(served, dtype="float32")
    whole = logits(model, ids, (200,))
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 2e-5
    assert torch.equal(logits(model, ids, (1, 2, 60, 120, 17)), whole)
