"""Tile sizes of fused attention; `attention_triton` gives the reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPLIT = 512
"""Positions per split of the context. Fixed, so that a row's sums do not depend on the rest of the batch."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The tile of one program."""

    queries: int  # packed rows
    keys: int  # positions per block
    warps: int
    stages: int  # blocks in flight


def tile_for(head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """Choose the tile by head size and dtype alone, never by rows, sequences or context."""
    wide = padded(head_dim)
    warps = 4 if wide <= 128 else 8
    if dtype is torch.float32:
        return AttentionTile(queries=16, keys=max(16, min(64, 2048 // wide)), warps=warps, stages=2)
    return AttentionTile(queries=64, keys=max(32, min(64, 8192 // wide)), warps=warps, stages=3)


def padded(head_dim: int) -> int:
    """Return the head size padded to a power of two, at least a tensor core's depth of 16."""
    return max(1 << (head_dim - 1).bit_length(), 16)


def padded_queries(num_heads: int, kv_heads: int) -> int:
    """Return the query heads per kv head, padded to a power of two, for `combine`."""
    return 1 << (num_heads // kv_heads - 1).bit_length()


def combine_warps(block_q: int, block_d: int) -> int:
    """Return one warp per 256 sums: two 16-byte loads per thread and split."""
    return min(max(block_q * block_d // 256, 1), 4)


def precision(dtype: torch.dtype) -> str | None:
    """Return "ieee" for float32; None (the tensor cores' default) for 16 bits."""
    return "ieee" if dtype is torch.float32 else None
