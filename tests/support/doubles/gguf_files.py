"""GGUF files of tiny checkpoints, laid out as llama.cpp's converter does, for tests.

Names of tensors come from the tables of the `gguf` package; the order of rows and what is added to norms are written
here from what the converter does, apart from the code that undoes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, RopeScalingType, constants, get_tensor_name_map
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

_ARCHITECTURES = {
    "llama": constants.MODEL_ARCH.LLAMA, "mistral": constants.MODEL_ARCH.LLAMA, "qwen2": constants.MODEL_ARCH.QWEN2,
    "qwen3": constants.MODEL_ARCH.QWEN3, "gemma2": constants.MODEL_ARCH.GEMMA2,
    "gemma3_text": constants.MODEL_ARCH.GEMMA3, "phi3": constants.MODEL_ARCH.PHI3,
    "mixtral": constants.MODEL_ARCH.LLAMA, "qwen2_moe": constants.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": constants.MODEL_ARCH.QWEN3MOE, "olmoe": constants.MODEL_ARCH.OLMOE,
    "gpt_oss": constants.MODEL_ARCH.GPT_OSS, "smollm3": constants.MODEL_ARCH.SMOLLM3,
    "granite": constants.MODEL_ARCH.GRANITE, "olmo2": constants.MODEL_ARCH.OLMO2, "gemma": constants.MODEL_ARCH.GEMMA,
}  # fmt: skip

_TURNED = ("llama", "mistral", "mixtral", "smollm3", "granite")


def write_gguf(
    folder: Path,
    file: Path,
    kind: str = "F32",
    *,
    experts: str | None = None,
    values: Mapping[str, Any] | None = None,
    tokens: bool = True,
    without: str | None = None,
    more: Mapping[str, Tensor] | None = None,
    swap_attention: bool = False,
    rope_factors: Sequence[float] | None = None,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file, matrices as `kind`, and return the file.

    `experts`: kind of the matrices of experts, None: as the others; `values`: further metadata, by key; `tokens`: with
    its tokenizer, which must be byte-level; `without`: a tensor that is left out; `more`: tensors besides;
    `swap_attention`: query, key and value in one matrix where the family has three, and the other way round;
    `rope_factors`: the long ones of LongRoPE instead of the config's, none: left out.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = _ARCHITECTURES[config.model_type]
    writer = GGUFWriter(file, constants.MODEL_ARCH_NAMES[architecture])
    _describe(writer, config)
    if tokens:
        _add_tokens(writer, folder)
    for key, value in (values or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[
                type(value)
            ](key, value)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    laid_out = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): _laid_out(name, tensor.float(), config)
        for name, tensor in _apart(_stacked(load_file(folder / "model.safetensors"))).items()
    }
    if swap_attention:
        laid_out = _swapped(laid_out, config)
    for name, tensor in (laid_out | dict(more or {})).items():
        if name == without:
            continue
        is_small = tensor.dim() == 1 or "ffn_gate_inp" in name or name.endswith(".bias")
        of_matrix = experts if experts is not None and "_exps." in name else kind
        held = GGMLQuantizationType["F32" if is_small else of_matrix]
        writer.add_tensor(name, quantize(tensor.numpy(), held), raw_dtype=held)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config.head_dim))
    if rope["rope_type"] == "longrope":
        for which, given in (("long", rope_factors), ("short", None)):
            if len(factors := rope[f"{which}_factor"] if given is None else given):
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if count := getattr(config, "num_experts", getattr(config, "num_local_experts", 0)):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":  # as the converter of Phi-3 writes it, which names no type
        original = rope["original_max_position_embeddings"]
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(original)) ** 0.5)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _laid_out(name: str, tensor: Tensor, config: Any) -> Tensor:
    """As the converter writes it."""
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze()
    if config.model_type in _TURNED and ".q_proj." in name:
        return _interleaved(tensor, config.num_attention_heads)
    if config.model_type in _TURNED and ".k_proj." in name:
        return _interleaved(tensor, config.num_key_value_heads)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts of a layer in one tensor for each of their linears."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        block, _, rest = name.partition(".experts.")
        number, _, linear = rest.partition(".")
        if not linear:  # outside the experts, or stacked already
            found[name] = tensor
            continue
        experts.setdefault(f"{block}.experts.{linear}", {})[int(number)] = tensor
    return found | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts of gpt-oss, of which outputs of gate and up alternate behind the inputs, as three linears with biases."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, linear = name.rpartition(".")
        weight = tensor.transpose(-1, -2) if linear in ("gate_up_proj", "down_proj") else tensor
        kind = "bias" if linear.endswith("_bias") else "weight"
        if linear.startswith("gate_up_proj"):
            for number, role in enumerate(("gate", "up")):
                found[f"{path}.{role}_proj.{kind}"] = weight[:, number::2].contiguous()
        elif linear.startswith("down_proj"):
            found[f"{path}.down_proj.{kind}"] = weight.contiguous()
        else:
            found[f"{name}.weight" if linear == "sinks" else name] = tensor
    return found


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows that the rotation takes together, half a head apart, become neighbours."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _swapped(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".attn_")
        if kind == "q.weight":
            found[f"{layer}.attn_qkv.weight"] = torch.cat([tensors[f"{layer}.attn_{x}.weight"] for x in "qkv"])
        elif kind == "qkv.weight":
            head_dim = config.hidden_size // config.num_attention_heads
            counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
            start = 0
            for x, count in zip("qkv", counts, strict=True):
                found[f"{layer}.attn_{x}.weight"] = tensor[start : start + head_dim * count].contiguous()
                start += head_dim * count
        elif kind not in ("k.weight", "v.weight"):
            found[name] = tensor
    return found


def _llama3_divisors(rope: Mapping[str, float], head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    original = rope["original_max_position_embeddings"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(
        wavelengths < original / high, 1.0, np.where(wavelengths > original / low, rope["factor"], between)
    )
    return divisors.astype(np.float32)


def _add_tokens(writer: GGUFWriter, folder: Path) -> None:
    """Byte-level, as tiny checkpoints have it, with the one merge that no file may lack: its id is the next."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = [*sorted(ids, key=ids.__getitem__), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = constants.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges(["t h"])
    for role, add in {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "unk_token": writer.add_unk_token_id,
        "pad_token": writer.add_pad_token_id,
    }.items():
        add(ids[settings[role]])
    writer.add_chat_template(settings["chat_template"])
