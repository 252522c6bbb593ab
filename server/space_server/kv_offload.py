"""Host memory for blocks of the KV cache, a draft network's included, which the router fills and reads by commands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from space_model.networks.network import PagedKV
from torch import Tensor

from space_server.machine.memory import NotEnoughMemory


class HostBlocks:
    """Copies of KV blocks in host memory, which is pinned where the cache is on a GPU.

    Copies on a GPU are enqueued behind the steps under way and before those launched later, so that nothing waits for
    them here.
    """

    def __init__(self, kv: PagedKV, num_blocks: int) -> None:
        """Allocates `num_blocks` times the bytes of a block. Raises RuntimeError if the memory is not there."""
        self.num_blocks = num_blocks
        self._draft = kv.draft
        self._num_read = np.zeros(num_blocks, dtype=np.int64)  # as DraftKV.num_read, of the copies
        both = [kv] if kv.draft is None else [kv, kv.draft.pages]
        pages = {page.data_ptr(): page for one in both for page in (*one.keys, *one.values)}  # layers may share theirs
        if kv.draft is not None and kv.draft.states is not None:
            pages[kv.draft.states.data_ptr()] = kv.draft.states
        self._pages = [(page, _host_copy(page, num_blocks)) for page in pages.values()]

    def offload(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks of the cache to host blocks, one after the other."""
        for block, host_block in zip(blocks, host_blocks, strict=True):
            for page, host in self._pages:
                host[host_block].copy_(page[block], non_blocking=True)
            if self._draft is not None:
                self._num_read[host_block] = self._draft.num_read[block]

    def restore(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy host blocks into blocks of the cache."""
        for block, host_block in zip(blocks, host_blocks, strict=True):
            for page, host in self._pages:
                page[block].copy_(host[host_block], non_blocking=True)
            if self._draft is not None:
                self._draft.num_read[block] = self._num_read[host_block]


def choose_host_blocks(num_bytes: int | None, *, block_bytes: int, available: int) -> int:
    """Return the blocks of `block_bytes` that fit in `num_bytes` of host memory (None: none), of which `available`
    bytes are free. Raises NotEnoughMemory."""
    if num_bytes is None:
        return 0
    if num_bytes > available:
        raise NotEnoughMemory(f"--kv-offload asks for {num_bytes} bytes of host memory; {available} are available.")
    if num_bytes < block_bytes:
        raise NotEnoughMemory(f"--kv-offload {num_bytes} holds no block, which has {block_bytes} bytes.")
    return num_bytes // block_bytes


def _host_copy(page: Tensor, num_blocks: int) -> Tensor:
    """[num_blocks, …] like page [blocks, …], in host memory."""
    return torch.empty(num_blocks, *page.shape[1:], dtype=page.dtype, pin_memory=page.device.type == "cuda")
