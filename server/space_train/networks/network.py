"""A small Llama for training: fused projections, and rows whose order, positions and visibility are free.

The arithmetic is Llama's (RMSNorm, rotary halves, grouped key/value heads, SwiGLU, tied embeddings), so that
`space_train.training.export` can split the fused matrices and write a checkpoint any Llama loader reads.

Letters: `B` sequences, `R` rows per sequence, `E` hidden size, `H` heads, `G` key/value heads, `D` head dimension,
`V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> Tensor:
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
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None)
        x = x + self.output(mixed.transpose(1, 2).reshape(B, R, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return torch.add(x, self.down(F.silu(gate) * up))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on `heads` [B, H, R, D]; `cos` and `sin` are [R, D] (halves repeated) or [B, 1, R, D]."""
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

    def forward(self, ids: Tensor, positions: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Return hidden rows [B, R, E] of `ids` [B, R].

        `positions` [R] or [B, R] defaults to 0..R-1. `visible` (bool, broadcastable to [B, 1, R, R]: row, key)
        defaults to causal.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[..., None].float() * self.inverse_frequency  # [(B,) R, D/2]
        if angles.dim() == 3:
            angles = angles[:, None]
        x = self.embedding(ids)
        angles = torch.cat((angles, angles), dim=-1)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, visible)
        return torch.as_tensor(self.final_norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """E·h: [..., V]."""
        return F.linear(hidden, self.embedding.weight)
