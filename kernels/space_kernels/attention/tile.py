"""How much of a step one program of fused attention holds at a time; `attention_triton` gives the reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPLIT = 512
"""Positions per split of the context. Fixed: a row's sums must not depend on who else is in the step."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What one program holds at a time."""

    queries: int  # packed rows
    keys: int  # positions per block
    warps: int
    stages: int  # blocks in flight


def tile_for(head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """By the rule of `attention_triton`; never by rows, sequences or context."""
    wide = padded(head_dim)
    warps = 4 if wide <= 128 else 8
    if dtype is torch.float32:
        return AttentionTile(queries=16, keys=max(16, min(64, 2048 // wide)), warps=warps, stages=2)
    return AttentionTile(queries=64, keys=max(32, min(64, 8192 // wide)), warps=warps, stages=3)


def padded(head_dim: int) -> int:
    """The head size that products are made with: a power of two, at least a tensor core's depth."""
    return max(1 << (head_dim - 1).bit_length(), 16)


def padded_queries(num_heads: int, kv_heads: int) -> int:
    """Query heads per kv head, as a program that adds up splits holds them."""
    return 1 << (num_heads // kv_heads - 1).bit_length()


def combine_warps(block_q: int, block_d: int) -> int:
    """A warp per 256 sums: two 16-byte loads per thread and split."""
    return min(max(block_q * block_d // 256, 1), 4)


def precision(dtype: torch.dtype) -> str | None:
    """float32 means IEEE; None: whatever tensor cores do with 16 bits."""
    return "ieee" if dtype is torch.float32 else None
