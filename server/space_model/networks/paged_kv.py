"""Keys and values of all sequences, in blocks that sequences own by number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """Per layer, keys and values of every slot: [num_blocks, kv_heads, block_size, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    block_size: int

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
        """Blocks full of zeros: every page is touched now, so that memory that is not there fails here."""
        shape = (num_blocks, kv_heads, block_size, head_dim)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        return cls(keys, values, num_blocks, block_size)
