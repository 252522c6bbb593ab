"""A small Llama for training, and its conversion to a plain Llama checkpoint and back.

The arithmetic is Llama's (RMSNorm, rotary halves, grouped key/value heads, SwiGLU, tied embeddings), so the fused
matrices can be split and written as a checkpoint any Llama loader reads.

Letters: `B` sequences, `R` rows per sequence, `E` hidden size, `H` heads, `G` key/value heads, `D` head dimension,
`V` vocabulary.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from space_train.data.corpus import CHAT_TEMPLATE, END_OF_TEXT_ID, PAD_ID


@dataclass(frozen=True)
class NetworkShape:
    """The sizes of a small Llama. `window` is the largest number of positions it is trained for."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    window: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def num_parameters(self) -> int:
        """Parameters, the tied embedding counted once."""
        query_key_value = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        output = self.num_heads * self.head_dim * self.hidden_size
        layer = query_key_value + output + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class TrainLayer(nn.Module):
    """One decoder layer: attention, then SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        hidden, self.shape = shape.hidden_size, shape
        self.attention_norm = RMSNorm(hidden, shape.norm_eps)
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        self.query_key_value = nn.Linear(hidden, num_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.num_heads * shape.head_dim, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, shape.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        B, R, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(B, R, -1, shape.head_dim)
        heads = heads.transpose(1, 2)  # [B, H+2G, R, D]
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        query, key = torch.split(rotated, [shape.num_heads, shape.num_kv_heads], dim=1)
        value = heads[:, num_rotated:]
        group = shape.num_heads // shape.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(B, R, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return torch.add(x, self.down(F.silu(gate) * up))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `heads` [B, H, R, D]; `cos` and `sin` are [R, D] (halves repeated)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class TrainNetwork(nn.Module):
    """Rows of token ids in, hidden rows (after the final norm) out."""

    inverse_frequency: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TrainLayer(shape) for _ in range(shape.num_layers))
        self.final_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("inverse_frequency", shape.rope_theta**-exponents, persistent=False)

    @property
    def decoder_layers(self) -> list[TrainLayer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, TrainLayer)]

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise normally: 0.02 for the tied embedding, 1/sqrt(fan-in) for matrices, residual outputs by depth."""
        depth_scale = 1.0 / math.sqrt(2 * self.shape.num_layers)
        with torch.no_grad():
            self.embedding.weight.normal_(0.0, 0.02, generator=generator)
            for layer in self.decoder_layers:
                for linear in (layer.query_key_value, layer.gate_up):
                    linear.weight.normal_(0.0, linear.in_features**-0.5, generator=generator)
                for linear in (layer.output, layer.down):
                    linear.weight.normal_(0.0, depth_scale * linear.in_features**-0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden rows [B, R, E] of `ids` [B, R]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[..., None].float() * self.inverse_frequency  # [R, D/2]
        x = self.embedding(ids)
        angles = torch.cat((angles, angles), dim=-1)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return torch.as_tensor(self.final_norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """E·h: [..., V]."""
        return F.linear(hidden, self.embedding.weight)


def _llama_views(network: TrainNetwork) -> dict[str, Tensor]:
    """Return the network's own weights under Llama's names, with the fused projections split."""
    shape, weights = network.shape, {"model.embed_tokens.weight": network.embedding.weight.detach()}
    heads = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
    for index, layer in enumerate(network.decoder_layers):
        query, key, value = torch.split(layer.query_key_value.weight.detach(), heads)
        gate, up = layer.gate_up.weight.detach().chunk(2)
        named = {
            "input_layernorm": layer.attention_norm.weight.detach(),
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.output.weight.detach(),
            "post_attention_layernorm": layer.mlp_norm.weight.detach(),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight.detach(),
        }
        weights |= {f"model.layers.{index}.{name}.weight": weight for name, weight in named.items()}
    return weights | {"model.norm.weight": network.final_norm.weight.detach()}


def llama_weights(network: TrainNetwork, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of the weights under Llama's names."""
    return {name: weight.to(dtype).contiguous().clone() for name, weight in _llama_views(network).items()}


def load_llama(network: TrainNetwork, folder: Path) -> None:
    """Load the weights of an exported checkpoint of the same shape (the inverse of `llama_weights`)."""
    found = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    own = _llama_views(network)
    wrong = [name for name in sorted(own) if name not in found or found[name].shape != own[name].shape]
    if wrong or len(found) != len(own):
        raise ValueError(
            f"The weights in {folder} are not of this shape (first difference: {(wrong or ['a tensor more'])[0]}). "
            "Give --vocabulary, --hidden, --layers, --heads and --intermediate as they were when it was trained."
        )
    for name, weight in own.items():
        weight.copy_(found[name])


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
