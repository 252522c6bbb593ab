"""The paged KV cache of all sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from space_kernels.attention.attention import KVPages
from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """Keys and values by layer: [num_blocks, kv_heads, block_size, head_dim] each."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    block_size: int

    def layer(self, number: int) -> KVPages:
        """Return one layer's pages."""
        return KVPages(self.keys[number], self.values[number])

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKV:
        """Allocate blocks of zeros; every page is touched now, so that lack of memory fails here."""
        shape = (num_blocks, kv_heads, block_size, head_dim)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        return cls(keys, values, num_blocks, block_size)
