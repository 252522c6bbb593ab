"""Synthetic steps for attention tests: sequences with random keys and values, and one step over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from space_kernels.attention.alibi import Alibi
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.fp8 import nearest
from space_kernels.paging.step_rows import RowPattern, StepRows
from torch import Tensor

SCALE = 0.3  # of the scores


@dataclass(frozen=True)
class MadeUp:
    """One sequence of a step: its cached slots, chain rows and mask groups."""

    cached: int  # slots written by earlier steps
    num_chain: int
    groups: Sequence[tuple[int, int]] = ()  # base chain row, masks
    seed: int = 0


@dataclass(frozen=True)
class MadeUpStep:
    """The arguments of one `space_attention` call."""

    qkv: QKV
    pages: KVPages
    rows: StepRows

    @property
    def num_rows(self) -> int:
        return len(self.rows.pattern.offsets)

    @property
    def query(self) -> Tensor:
        """[R, H, D]"""
        return self.qkv.query

    @property
    def key(self) -> Tensor:
        """[R, G, D]"""
        return self.qkv.key

    @property
    def value(self) -> Tensor:
        """[R, G, D]"""
        return self.qkv.value

    def copied_pages(self) -> KVPages:
        """Return copies of the pages, which a call may write to."""
        return KVPages(*(pages.clone() for pages in self.pages))


def run(
    step: MadeUpStep,
    attention: Callable[..., Tensor],
    *,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Alibi | None = None,
    **options: object,
) -> Tensor:
    """Return the outputs of the step's rows, without padding; its pages stay as they are."""
    spec = AttentionSpec(SCALE, window, softcap, alibi)
    return attention(step.qkv, step.copied_pages(), step.rows, spec, **options)[: step.num_rows]


def made_up_step(
    sequences: Sequence[MadeUp],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    garbage: float = float("nan"),
    fp8: bool = False,
) -> MadeUpStep:
    """Build a step; keys, values and queries do not depend on the block size.

    Unwritten slots hold `garbage`. Pages are assigned backwards and interleaved, and two belong to no sequence.
    `fp8`: the pages are fp8.
    """
    device = torch.device(device)
    counts = [-(-(one.cached + one.num_chain) // block_size) for one in sequences]
    num_blocks = sum(counts) + 2
    numbers = list(range(num_blocks - 1, 0, -1))
    pages: list[list[int]] = [[] for _ in sequences]
    while any(len(held) < count for held, count in zip(pages, counts, strict=True)):
        for held, count in zip(pages, counts, strict=True):
            if len(held) < count:
                held.append(numbers.pop(0))

    key_pages = torch.full((num_blocks, kv_heads, block_size, head_dim), garbage, dtype=dtype)
    value_pages = key_pages.clone()
    chains: list[tuple[Tensor, Tensor, Tensor]] = []
    masks: list[tuple[Tensor, Tensor, Tensor]] = []
    for one, held in zip(sequences, pages, strict=True):
        generator = torch.Generator().manual_seed(one.seed)

        def normal(count: int, width: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(count, width, head_dim, generator=generator).to(dtype)

        old_key, old_value = normal(one.cached, kv_heads), normal(one.cached, kv_heads)
        positions = torch.arange(one.cached)
        page, offset = torch.tensor(held, dtype=torch.int64)[positions // block_size], positions % block_size
        key_pages[page, :, offset], value_pages[page, :, offset] = old_key, old_value
        num_masks = sum(count for _, count in one.groups)
        for rows, count in ((chains, one.num_chain), (masks, num_masks)):
            rows.append((normal(count, heads), normal(count, kv_heads), normal(count, kv_heads)))

    if fp8:
        key_pages, value_pages = nearest(key_pages), nearest(value_pages)
    pattern = _pattern(sequences)

    def packed(kind: int) -> Tensor:
        joined = torch.cat([rows[kind] for rows in (*chains, *masks)])
        padding = joined.new_zeros(pattern.num_padded - len(joined), *joined.shape[1:])
        return torch.cat([joined, padding]).to(device)

    step_rows = StepRows(
        pattern=pattern, starts=np.array([one.cached for one in sequences], dtype=np.int64), pages=pages,
        block_size=block_size, device=device,
    )  # fmt: skip
    pages_there = KVPages(key_pages.to(device), value_pages.to(device))
    return MadeUpStep(QKV(packed(0), packed(1), packed(2)), pages_there, step_rows)


def _pattern(sequences: Sequence[MadeUp]) -> RowPattern:
    chain_runs, mask_runs = [], []
    offsets: list[int] = []
    reach: list[int] = []
    group: list[int] = []
    for one in sequences:
        chain_runs.append(range(len(offsets), len(offsets) + one.num_chain))
        offsets += range(one.num_chain)
        reach += range(1, one.num_chain + 1)
        group += [-1] * one.num_chain
    num_chain = len(offsets)
    number = 0
    for one in sequences:
        first = len(offsets)
        for base, count in one.groups:
            offsets += range(base + 1, base + 1 + count)
            reach += [base + 1] * count
            group += [number] * count
            number += 1
        mask_runs.append(range(first, len(offsets)))
    return RowPattern(
        chain_runs=chain_runs, mask_runs=mask_runs, offsets=np.array(offsets), reach=np.array(reach),
        group=np.array(group), num_chain_rows=num_chain, num_padded=-(-len(offsets) // 4) * 4,
    )  # fmt: skip


def full_layout(k: int) -> list[tuple[int, int]]:
    """Return the full SPACE layout: a group of k masks behind each of the k+1 chain rows."""
    return [(base, k) for base in range(k + 1)] if k else []
