"""Tiny random checkpoints of every served family, complete with a tokenizer, for tests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from space_model.adapters import GATED_LORA_FILE, GatedLora
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import decoder_layers, name_base, read_config
from space_model.networks.latent_heads import is_absorbed
from space_model.random_checkpoint import ASCII, END, FIRST_MASK, write_byte_tokenizer, write_draft_head
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

_LLAMA3_FACTORS = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **_LLAMA3_FACTORS}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2], "long_factor": [1.0, 1.4, 2.1, 3.3, 4.0, 5.0, 6.0, 8.0],
}  # fmt: skip
_GRANITE = {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}
_MOE = {"num_experts_per_tok": 2}
_SIGMOID_ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5, "first_k_dense_replace": 0,
}  # fmt: skip
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64,
    }
}  # fmt: skip

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 0.9,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", **_GRANITE},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64, **_MOE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **_MOE},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "cohere2": {"model_type": "cohere2", "sliding_window": 24, "logit_scale": 0.5},
    "glm4_moe": {"model_type": "glm4_moe", **_SIGMOID_ROUTED, **_MOE},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 24, **_YARN, **_MOE},
}
"""The config fields that characterise each family; `gemma2` has soft caps by default, `mistral` a sliding window,
`glm4_moe` experts chosen within groups by sigmoids with a bias, and a shared expert, `gpt_oss` attention sinks and
experts with biases and limits."""

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {"model_type": "falcon", "new_decoder_architecture": True},
    "bloom": {"model_type": "bloom"},
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 256,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", "q_lora_rank": None, **_SIGMOID_ROUTED, **_MOE, **_LATENT},
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 48, **_SIGMOID_ROUTED, **_MOE, **_LATENT},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", "q_lora_rank": 48, **_SIGMOID_ROUTED, **_MOE, **_LATENT},
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash", "v_head_dim": 32, "sliding_window": 24, "n_routed_experts": 8,
        "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1, **_MOE,
    },
    "gemma4": {
        "model_type": "gemma4_text", "sliding_window": 24, "num_hidden_layers": 4, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    },
    "gemma4_moe": {
        "model_type": "gemma4_text", "sliding_window": 24, "num_hidden_layers": 3, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 64,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", **_DELTA_NET, "num_experts": 4, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, **_MOE,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_DELTA_NET},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", **_DELTA_NET, "num_experts": 4, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, **_MOE,
    },
    "olmo_hybrid": {"model_type": "olmo_hybrid", **_DELTA_NET},
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "bamba": {
        "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1], "time_step_limit": [0.01, 0.2],
        **_MAMBA_2,
    },
    "granite4": {
        "model_type": "granitemoehybrid", **_GRANITE, **_MAMBA_2, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 4, **_MOE,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", **_MAMBA_2, "mamba_d_ssm": 128, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "lm_head_multiplier": 0.6, "embedding_multiplier": 1.5,
        "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.8,
        "mlp_multipliers": [0.9, 0.7],
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
    },
    "llama4": {
        "model_type": "llama4_text", "num_hidden_layers": 3, "intermediate_size_mlp": 128, "attention_chunk_size": 24,
        "no_rope_layers": [1, 0, 1], "moe_layers": [1, 2], "num_local_experts": 4, "floor_scale": 10, "attn_scale": 0.5,
        **_MOE,
    },
    "gemma3n": {
        "model_type": "gemma3n_text", "sliding_window": 24, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 16,
        "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
    },
    "xglm": {"model_type": "xglm", "ffn_dim": 128},
    "alibi_llama": {"model_type": "alibi_llama"},
    "lfm3": {
        "model_type": "lfm3", "num_hidden_layers": 4, "sliding_window": 24,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    },
    "jamba": {
        "model_type": "jamba", "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 12,
        **_MOE,
    },
    "mamba": {"model_type": "mamba", "state_size": 8, "time_step_rank": 12},
    "falcon_mamba": {"model_type": "falcon_mamba", "state_size": 8, "time_step_rank": 12, "mixer_rms_eps": 1e-6},
    "mamba2": {"model_type": "mamba2", "state_size": 8, "n_groups": 2, "time_step_limit": [0.01, 0.2]},
}  # fmt: skip
"""Families that compute their attention themselves (`bloom` has linear biases), one whose angles depend on the served
window, and latent attention (MLA) with queries from one linear, as in V2-Lite, or from two. MiMo has values of another
size than keys, and sliding layers with twice as many heads of both. Layers of Gemma 4 differ in their heads: the small
ones have embeddings for every layer, and the last layers read the keys and values of earlier ones; in the large ones
keys are values, too, and some have experts. Llama 4 has layers that see chunks of positions, one without rotary
positions whose queries are scaled by position, and experts of scaled rows. Gemma 3n passes on four versions of every
row, and XGLM adds its positions to embeddings. `alibi_llama` is Baichuan of 13B. Of the hybrids, whose layers are
recurrent or attend, the first four have a gated delta rule, LFM2 and LFM3 short convolutions, Jamba Mamba's scan, the
others Mamba-2's: Falcon-H1 beside attention in every layer, with factors everywhere. The last three have no layer that
attends."""


_FEW_IMAGES = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

WHOLE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": _SECTIONS, "vision_config": _FEW_IMAGES},
}
"""Models that see images, too: the fields that characterise their text part, and the config of the other."""


def tiny_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    vocab_size: int = 128,
    num_masks: int = 5,
    shared_mask: bool = False,
    draft_head: bool = True,
    draft_head_width: int = 32,
    words: bool = False,
    adapter_rank: int | None = None,
    head_drafts: int = 0,
    draft_vocab: int | None = None,
    dtype: str = "float32",
    window: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random checkpoint of `family` to the folder `path` (created if absent) and return it.

    It has a byte-level tokenizer (printable ASCII and newline if the vocabulary is too small for all bytes), a chat
    template, per-position mask ids from FIRST_MASK on, and a draft head. `config` overrides fields of the config.
    `words`: ids without a byte become made-up words, so that every id decodes to text. With an
    `adapter_rank` the masks have no ids: they belong to a random gated adapter on every linear of the decoder layers.
    `head_drafts`: also a random recurrent head for so many drafts; `draft_vocab`: of the first so many ids without
    mask tokens (None: the whole vocabulary). The weights do not depend on masks, adapter or heads.
    """
    path.mkdir(parents=True, exist_ok=True)
    mask_tokens = 0 if adapter_rank is not None else min(num_masks, 1) if shared_mask else num_masks
    specials = FIRST_MASK + mask_tokens
    if vocab_size < specials + len(ASCII):
        raise ValueError(
            f"vocab_size must be at least {specials + len(ASCII)} with {mask_tokens} mask ids; got {vocab_size}."
        )
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": window,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END),
        "tie_word_embeddings": True,
        **(FAMILIES | MORE_FAMILIES | WHOLE_FAMILIES)[family],
        **config,
    }
    _name_heads(fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # some families draw biases, which stay as they are below
        torch.manual_seed(seed)
        if family not in WHOLE_FAMILIES:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
        else:
            tied, images = fields["tie_word_embeddings"], fields.pop("vision_config")
            whole = AutoConfig.for_model(family, text_config=fields, vision_config=images, tie_word_embeddings=tied)
            model = AutoModelForMultimodalLM.from_config(whole)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # unit gain per layer, and logits spread enough that text is not one long loop
            gain = 2.0 if "embed" in name or "lm_head" in name else 1.0
            weight.data = torch.randn(weight.shape, generator=generator) * (gain * weight.shape[-1] ** -0.5)
        elif name.endswith("sinks"):
            weight.data = torch.randn(weight.shape, generator=generator) + 1.0
        elif name.endswith(("dt_bias", "A_log")):  # states of which something is left after tens of rows
            weight.data = torch.randn(weight.shape, generator=generator) - (3.0 if name.endswith("dt_bias") else 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith("score_correction_bias"):  # part of an expert's score while experts are chosen
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(path)
    if num_masks or head_drafts:
        ids = list(range(FIRST_MASK, FIRST_MASK + mask_tokens))
        section: dict[str, Any] = {"num_masks": num_masks, "mask_token_ids": ids, "adapter": None, "draft_head": None}
        if draft_head and num_masks:
            section["draft_head"] = write_draft_head(path, hidden_size, dtype, generator, draft_head_width)
        if head_drafts:
            drafted = None if draft_vocab is None else torch.arange(specials, specials + draft_vocab)
            section["recurrent_head"] = _write_recurrent_head(path, hidden_size, dtype, head_drafts, drafted, generator)
        if adapter_rank is not None:
            random_gated_lora(model, num_masks=num_masks, rank=adapter_rank, seed=seed).save(path / GATED_LORA_FILE)
            section["adapter"] = GATED_LORA_FILE
        written = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(json.dumps(written | {"space": section}, indent=1), encoding="utf-8")
    write_byte_tokenizer(path, vocab_size, mask_tokens, words=words)
    return path


def _name_heads(fields: dict[str, Any]) -> None:
    """Give the heads the names that the family's config has for them."""
    kind = fields["model_type"]
    if kind in ("bloom", "falcon", "xglm"):
        del fields["head_dim"]
        kv_heads = fields.pop("num_key_value_heads")
        if kind == "falcon":
            fields["num_kv_heads"] = kv_heads
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        heads = fields.pop("num_attention_heads")
        for name in ("head_dim", "num_key_value_heads", "max_position_embeddings"):
            del fields[name]
        fields |= {"num_heads": heads, "head_dim": 2 * fields["hidden_size"] // heads} if kind == "mamba2" else {}
    if "kv_lora_rank" in fields:  # every head has keys of its own, until they are compressed
        del fields["head_dim"]
        fields["num_key_value_heads"] = fields["num_attention_heads"]


def tiny_adapter(
    path: Path,
    base: Path,
    *,
    num_masks: int = 5,
    rank: int = 4,
    draft_head: bool = True,
    seed: int = 1,
    linears: tuple[str, ...] | None = None,
) -> Path:
    """Write a random gated adapter for the checkpoint `base`, which it declares as its base, to the folder `path`.
    `linears`: last path components of the adapted linears, such as ("q_proj", "up_proj"); None: all."""
    path.mkdir(parents=True, exist_ok=True)
    config = read_config(Checkpoint.open(base))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    gated = random_gated_lora(model, num_masks=num_masks, rank=rank, seed=seed, linears=linears)
    gated.save(path / GATED_LORA_FILE)
    generator = torch.Generator().manual_seed(seed)
    head = write_draft_head(path, config.hidden_size, "float32", generator) if draft_head else None
    section = {"base": str(base), "num_masks": num_masks, "mask_token_ids": [], "adapter": GATED_LORA_FILE}
    (path / "config.json").write_text(json.dumps({"space": section | {"draft_head": head}}, indent=1), encoding="utf-8")
    return path


def released_adapter(
    path: Path, base: Path, *, rank: int = 128, seed: int = 1, prefix: str = "base_model.model."
) -> Path:
    """Write a random LoRA on every linear of the layers of the checkpoint `base` to the folder `path`, in the files
    that Uno and I-DLM release: adapter_config.json and adapter_model.safetensors. `prefix`: of the tensors' names."""
    path.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    gated = random_gated_lora(model, num_masks=1, rank=rank, seed=seed)
    weights: dict[str, torch.Tensor] = {}
    for name, (a, b) in gated.pairs.items():
        weights |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b * rank**-0.5}
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank}
    config |= {"lora_alpha": 16 * rank, "bias": "none", "use_dora": False, "use_rslora": False, "lora_dropout": 0.0}
    config |= {"target_modules": sorted({name.rpartition(".")[2] for name in gated.pairs}), "modules_to_save": None}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def tiny_lora(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    linears: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random ordinary LoRA for the checkpoint `base` to the folder `path`, as peft saves it. `linears`: last
    path components of the adapted linears; None: all. `config`: further fields of adapter_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(Checkpoint.open(base)))
    pairs = random_gated_lora(model, num_masks=1, rank=rank, seed=seed, linears=linears).pairs
    weights: dict[str, torch.Tensor] = {}
    for name, (a, b) in pairs.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        weights[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank}
    fields |= {"lora_alpha": 2 * rank, "target_modules": sorted({name.rpartition(".")[2] for name in pairs})}
    (path / "adapter_config.json").write_text(json.dumps(fields | config, indent=1), encoding="utf-8")
    return path


def perturbed(base: Path, path: Path, *, share: float = 0.25, seed: int = 5) -> Path:
    """Write the checkpoint `base` to the folder `path`, with noise added to its last layer: a model that agrees with
    `base` now and then. `share`: of a weight's own deviation."""
    shutil.copytree(base, path, dirs_exist_ok=True)
    file = path / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(seed)
    last = max(int(found[1]) for name in weights if (found := re.search(r"\.layers\.(\d+)\.", name)))
    for name, weight in weights.items():
        if f".layers.{last}." in name and weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * (share * weight.float().std())
            weights[name] = (weight + noise).to(weight.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return path


def add_mtp_layer(path: Path, *, share: float = 0.05, seed: int = 5) -> Path:
    """Add an MTP layer to the checkpoint at `path`, and return the folder. It is the last layer with noise added, and
    mostly reads the embedding, so behind a model of one layer it is often right. `share`: of a weight's own
    deviation."""
    file = path / "model.safetensors"
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    number, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    weights, generator = load_file(file), torch.Generator().manual_seed(seed)
    dtype, embedding = weights["model.embed_tokens.weight"].dtype, weights["model.embed_tokens.weight"].float()

    def noise(weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(weight.shape, generator=generator) * (share * weight.float().std())

    beside = config["model_type"] in (
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    )  # whose factors of norms are 1 + weight
    source = max(layer for layer in range(number) if any(f".{layer}.self_attn." in name for name in weights))
    of_mimo, of_mimo_v2 = config["model_type"] == "mimo", config["model_type"] == "mimo_v2_flash"
    last, own = f"model.layers.{source}.", "mtp." if beside else f"model.layers.{number}."
    own = "model.mtp_layers.0." if of_mimo else "model.mtp.layers.0." if of_mimo_v2 else own
    for name in [name for name in weights if name.startswith(last)]:
        weight, part = weights[name], name.removeprefix(last)
        part = part.replace("post_attention_layernorm", "pre_mlp_layernorm") if of_mimo_v2 else part
        changed = weight + noise(weight) if weight.dim() > 1 else weight.clone()
        weights[own + "layers.0." * beside + part] = changed.to(weight.dtype)
    from_states = torch.randn(hidden, hidden, generator=generator) * (share * hidden**-0.5)
    projection = torch.cat([torch.eye(hidden), from_states], dim=1).to(dtype)
    enorm = torch.full((hidden,), float(embedding.square().mean().sqrt())).to(dtype)
    hnorm = torch.full((hidden,), 0.5).to(dtype)
    last_norm = weights["model.norm.weight"].clone()
    if beside:
        more = {
            "fc": projection,
            "pre_fc_norm_embedding": enorm - 1,
            "pre_fc_norm_hidden": hnorm - 1,
            "norm": last_norm,
        }
    elif of_mimo:
        more = {
            "input_proj": projection.roll(hidden, dims=1),
            "token_layernorm": enorm,
            "hidden_layernorm": hnorm,
            "final_layernorm": last_norm,
        }
    elif of_mimo_v2:
        more = {"eh_proj": projection, "enorm": enorm, "hnorm": hnorm, "final_layernorm": last_norm}
    else:
        more = {"eh_proj": projection, "enorm": enorm, "hnorm": hnorm, "shared_head.norm": last_norm}
        more |= {"shared_head.head": weights["lm_head.weight"].clone()}
        more |= {"embed_tokens": weights["model.embed_tokens.weight"].clone()}
    weights |= {f"{own}{name}.weight": weight for name, weight in more.items()}
    save_file(weights, file, metadata={"format": "pt"})
    return path


def random_gated_lora(
    model: PreTrainedModel, *, num_masks: int, rank: int, seed: int, linears: tuple[str, ...] | None = None
) -> GatedLora:
    """Return random float32 pairs whose deltas are about as large as the outputs they are added to."""
    generator = torch.Generator().manual_seed(seed)
    name_base(model)
    layers, _ = decoder_layers(model.base_model)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        noise = torch.randn(rows, columns, generator=generator)
        return noise.mul_(gain * columns**-0.5)

    pairs = {
        name: (normal(rank, module.in_features, 1.0), normal(module.out_features, rank, 0.5))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not hasattr(module, "top_k")  # a router of Llama 4
        and name.startswith(f"{model.base_model_prefix}.{layers}.")
        and (name.rpartition(".")[2] in linears if linears else not is_absorbed(model, name))
    }
    return GatedLora(normal(num_masks, model.config.hidden_size, 2.0), pairs, scale=2.0)


def _write_recurrent_head(
    path: Path, hidden: int, dtype: str, num_drafts: int, ids: torch.Tensor | None, generator: torch.Generator
) -> dict[str, Any]:
    """Write a random recurrent head of 32 inner units, and return its part of the `space` section."""
    weights = {
        "recurrent_head.w1.weight": torch.randn(32, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5,
        "recurrent_head.w2.weight": torch.randn(hidden, 32, generator=generator) * 32**-0.5,
    }
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    if ids is not None:
        weights["recurrent_head.ids"] = ids
    save_file(weights, path / "recurrent_head.safetensors", metadata={"format": "pt"})
    return {"file": "recurrent_head.safetensors", "hidden": 32, "embedding_scale": 2.0, "num_drafts": num_drafts}
