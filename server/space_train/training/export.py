"""Converts a trained network to a plain Llama checkpoint and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from space_train.data.tokenizer import CHAT_TEMPLATE, END_OF_TEXT_ID, PAD_ID
from space_train.networks.network import TrainNetwork


def llama_weights(network: TrainNetwork, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights under Llama's names, with the fused projections split."""
    shape, weights = network.shape, {"model.embed_tokens.weight": network.embedding.weight}
    heads = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
    for index, layer in enumerate(network.decoder_layers):
        query, key, value = torch.split(layer.query_key_value.weight, heads)
        gate, up = layer.gate_up.weight.chunk(2)
        named = {
            "input_layernorm": layer.attention_norm.weight,
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.output.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
        }
        weights |= {f"model.layers.{index}.{name}.weight": weight for name, weight in named.items()}
    weights["model.norm.weight"] = network.final_norm.weight
    return {name: weight.detach().to(dtype).contiguous().clone() for name, weight in weights.items()}


def load_llama(network: TrainNetwork, folder: Path) -> None:
    """Load the weights of an exported checkpoint of the same shape (the inverse of `llama_weights`)."""
    found = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    expected = llama_weights(network, torch.float32)
    wrong = [name for name in sorted(expected) if name not in found or found[name].shape != expected[name].shape]
    if wrong or len(found) != len(expected):
        raise ValueError(
            f"The weights in {folder} are not of this shape (first difference: {(wrong or ['a tensor more'])[0]}). "
            "Give --vocabulary, --hidden, --layers, --heads and --intermediate as they were when it was trained."
        )
    with torch.no_grad():
        network.embedding.weight.copy_(found["model.embed_tokens.weight"])
        network.final_norm.weight.copy_(found["model.norm.weight"])
        for index, layer in enumerate(network.decoder_layers):

            def of(*names: str, index: int = index) -> Tensor:
                return torch.cat([found[f"model.layers.{index}.{name}.weight"] for name in names])

            layer.attention_norm.weight.copy_(of("input_layernorm"))
            layer.query_key_value.weight.copy_(of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
            layer.output.weight.copy_(of("self_attn.o_proj"))
            layer.mlp_norm.weight.copy_(of("post_attention_layernorm"))
            layer.gate_up.weight.copy_(of("mlp.gate_proj", "mlp.up_proj"))
            layer.down.weight.copy_(of("mlp.down_proj"))


def llama_config(network: TrainNetwork, dtype: torch.dtype) -> dict[str, object]:
    """Return the content of `config.json`."""
    shape = network.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.window,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export(network: TrainNetwork, tokenizer_folder: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the plain checkpoint to `folder`: weights, tokenizer and, at the end, the config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(llama_weights(network, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files readable by the owner only
    generation = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(llama_config(network, dtype), indent=1) + "\n")
