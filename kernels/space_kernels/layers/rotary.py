"""Rotary embedding of queries and keys, fused with storing chain rows into the pages: the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.fp8 import as_kept, to_keep
from space_kernels.layers.norm import rms_norm


@dataclass(frozen=True)
class HeadNorm:
    """The norm over the head dimension of queries and keys before the rotary embedding (Qwen3)."""

    query_weight: Tensor  # [D]
    key_weight: Tensor  # [D]
    eps: float


def angles(positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair's angle, times the model family's scaling.

    positions [R] int64, frequencies [D/2] float32 -> (cos, sin), float32 [R, D/2] each.
    """
    turned = positions[:, None].float() * frequencies
    return turned.cos() * scaling, turned.sin() * scaling


# fused [R, H + 2G, D]:   | query heads 0..H | key heads 0..G | value heads 0..G |
#                           normed?, rotated   normed?, rotated  unchanged             all R rows, in place
#                                              -> key_pages      -> value_pages        rows with a slot only
def rotary_store(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    kv_heads: int,
    norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rotary embedding to queries and keys in place, and store keys and values of rows that have a slot.

    fused [R, (H+2G)·D]; cos, sin [R, D/2] float32; pages [num_blocks, G, block_size, D];
    slots [N] int64, N ≤ R: block number · block size + offset of the first N rows; negative: not stored.
    Returns (query [R, H, D], key [R, G, D], value [R, G, D]): views of `fused`.

    Norm and rotation are computed in float32, each rounded to the dtype once. Values that are not finite are stored as
    0, so that NaN in one row does not spread to others.
    """
    num_rows = len(fused)
    heads = fused.view(num_rows, num_heads + 2 * kv_heads, -1)
    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        query.copy_(rms_norm(query, norm.query_weight, norm.eps))
        key.copy_(rms_norm(key, norm.key_weight, norm.eps))
    turned = heads[:, : num_heads + kv_heads]
    first, second = turned.float().chunk(2, dim=-1)  # [R, H+G, D/2]
    cos, sin = cos[:, None], sin[:, None]
    turned.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

    count, (_, _, size, width) = len(slots), key_pages.shape
    offset = slots % size
    first_head = (slots - offset) * kv_heads + offset  # of pages seen as [num_blocks·G·block_size, D]
    places = first_head[:, None] + torch.arange(0, kv_heads * size, size, device=slots.device)
    stays = (slots >= 0).repeat_interleave(kv_heads)
    for pages, new in ((key_pages, key), (value_pages, value)):
        rows = to_keep(new[:count], pages.dtype).reshape(-1, width)
        as_kept(pages).view(-1, width).index_copy_(0, places.reshape(-1)[stays], rows[stays])
    return query, key, value
