"""The operations of a decoder layer between its linear layers, and row-invariant activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from space_kernels.attention.attention import QKV, KVPages
from space_kernels.fp8 import as_kept, to_keep


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension: x [..., D], weight [D] -> [..., D].
    Computed in float32 and rounded to x's dtype once, at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum: x, residual [R, D] -> (normed, sum), [R, D] each.
    The sum is rounded to x's dtype, because it becomes the next residual; the rounded sum is normed."""
    total = x + residual
    return rms_norm(total, weight, eps), total


_LANES = 64
"""torch's element-wise loop handles pairs of vectors (at most 64 elements), and the tail singly with other rounding."""


def has_no_tail(width: int, num_threads: int, row_tile: int = 4) -> bool:
    """Whether every thread's share of [rows, width] is whole vectors, for any multiple of `row_tile` rows.
    Threads share the flat elements evenly, and torch may use fewer threads than there are."""
    return all((row_tile * width) % (_LANES * threads) == 0 for threads in range(1, num_threads + 1))


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), from operations that round all elements of a tensor alike."""
    wide = x.float()
    return wide.div(wide.neg().exp_().add_(1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return x·Φ(x), from operations that round all elements of a tensor alike."""
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of x·Φ(x), from operations that round all elements of a tensor alike."""
    wide = x.float()
    inner = wide.mul(wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)


class RowInvariantActivation(nn.Module):
    """An activation by torch's own function where its loop has no tail, else composed."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], composed: Callable[[Tensor], Tensor], threads: int
    ) -> None:
        super().__init__()
        self._function, self._composed, self._threads = function, composed, threads
        self._whole: dict[int, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]; the number of rows is a multiple of 4."""
        width = x.shape[-1]
        whole = self._whole.get(width)
        if whole is None:
            whole = self._whole[width] = has_no_tail(width, self._threads)
        return self._function(x) if whole else self._composed(x)


def same_function(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> bool:
    """Whether two activations agree on a grid, up to rounding."""
    grid = torch.linspace(-6.0, 6.0, 256)
    return bool(torch.allclose(a(grid), b(grid), rtol=1e-5, atol=1e-6))


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up of [R, 2·I], gate first -> [R, I]. Computed in float32, rounded to the dtype once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


@dataclass(frozen=True)
class HeadNorm:
    """The norm over the head dimension of queries and keys before the rotary embedding (Qwen3)."""

    query_weight: Tensor  # [D]
    key_weight: Tensor  # [D]
    eps: float


class HeadCounts(NamedTuple):
    """How many heads a fused projection has: H of queries, G each of keys and of values."""

    query: int
    kv: int


def angles(positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair's angle, times the model family's scaling.
    positions [R] int64, frequencies [D/2] float32 -> (cos, sin), float32 [R, D/2] each."""
    turned = positions[:, None].float() * frequencies
    return turned.cos() * scaling, turned.sin() * scaling


# fused [R, H + 2G, D]:   | query heads 0..H | key heads 0..G | value heads 0..G |
#                           normed?, rotated   normed?, rotated  unchanged             all R rows, in place
#                                              -> key_pages      -> value_pages        rows with a slot only
def rotary_store(
    fused: Tensor,
    angles: tuple[Tensor, Tensor],
    pages: KVPages,
    slots: Tensor,
    heads: HeadCounts,
    norm: HeadNorm | None = None,
) -> QKV:
    """Apply the rotary embedding to queries and keys in place, and store keys and values of rows that have a slot.

    fused [R, (H+2G)·D]; angles: cos and sin [R, D/2] float32;
    slots [N] int64, N ≤ R: block number · block size + offset of the first N rows; negative: not stored.
    Returns views of `fused`.

    Norm and rotation are computed in float32, each rounded to the dtype once. Values that are not finite are stored as
    0, so that NaN in one row does not spread to others.
    """
    num_heads, kv_heads = heads
    rows = fused.view(len(fused), num_heads + 2 * kv_heads, -1)
    query, key, value = torch.split(rows, [num_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        query.copy_(rms_norm(query, norm.query_weight, norm.eps))
        key.copy_(rms_norm(key, norm.key_weight, norm.eps))
    turned = rows[:, : num_heads + kv_heads]
    first, second = turned.float().chunk(2, dim=-1)  # [R, H+G, D/2]
    cos, sin = (of_row[:, None] for of_row in angles)
    turned.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

    count, (_, _, size, width) = len(slots), pages.keys.shape
    offset = slots % size
    first_head = (slots - offset) * kv_heads + offset  # of pages seen as [num_blocks·G·block_size, D]
    places = first_head[:, None] + torch.arange(0, kv_heads * size, size, device=slots.device)
    stays = (slots >= 0).repeat_interleave(kv_heads)
    for kept, new in ((pages.keys, key), (pages.values, value)):
        written = to_keep(new[:count], kept.dtype).reshape(-1, width)
        as_kept(kept).view(-1, width).index_copy_(0, places.reshape(-1)[stays], written[stays])
    return QKV(query, key, value)


_PIECE = 1024
"""Positions computed at a time. Fixed, so that a position's angles do not depend on how the table grew."""


class RotaryTable:
    """Cosines and sines of all positions used so far."""

    def __init__(self, frequencies: Tensor, scaling: float = 1.0) -> None:
        """frequencies [D/2] float32, on the CPU; `scaling`: the model family's factor of both tables."""
        self._frequencies, self._scaling = frequencies, scaling
        self.cos = self.sin = frequencies.new_empty(0, len(frequencies))  # [positions, D/2] float32
        self._num_positions = 0

    def reach(self, num_positions: int) -> None:
        """Grow the table to at least the positions 0 .. num_positions - 1."""
        known = self._num_positions
        if num_positions <= known:
            return
        missing = range(known, max(num_positions, 2 * known), _PIECE)
        pieces = [angles(torch.arange(begin, begin + _PIECE), self._frequencies, self._scaling) for begin in missing]
        self.cos = torch.cat([self.cos, *(cos for cos, _ in pieces)])
        self.sin = torch.cat([self.sin, *(sin for _, sin in pieces)])
        self._num_positions = len(self.cos)
