"""Merging partial attention results by log-sum-exp, and attention among the rows of one step.

A library attends the pages and returns, per row and head, the log of the sum of weights. That suffices to merge its
result with attention over other keys: for disjoint key sets A and B,

    lse = log(exp(lse_A) + exp(lse_B))        out = exp(lse_A - lse)·out_A + exp(lse_B - lse)·out_B

This is the reference; `attention_triton`, `merge_triton` and `store_kv_triton` have kernels of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.attention.prefix_rows import Block
from space_kernels.fp8 import as_kept, to_keep
from space_kernels.paging.step_tables import StepTables

LN_2 = math.log(2.0)


def natural(lse_base_2: Tensor) -> Tensor:
    """Convert a base-2 log-sum-exp, as flashinfer returns it, to a natural one."""
    return lse_base_2 * LN_2


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: (out [..., D] of the dtype, lse [...]).

    first and second [..., D] in any dtype, their lse [...] float32, natural. A part that saw no key has lse -inf, and
    its out is ignored; a row that saw no key at all gets 0 and -inf. Rows are independent: the result does not depend
    on their number. Merging a part with one that saw no key returns it bit for bit.
    """
    peak = torch.maximum(first_lse, second_lse)
    floor = torch.where(peak == -math.inf, 0.0, peak)
    weights = torch.exp(first_lse - floor), torch.exp(second_lse - floor)
    total = weights[0] + weights[1]
    divisor = torch.where(total == 0, 1.0, total)
    out = _weighted(first, weights[0] / divisor) + _weighted(second, weights[1] / divisor)
    return out.to(dtype), torch.where(total == 0, -math.inf, floor + torch.log(divisor))


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight[..., None]
    return torch.where(weight == 0, 0.0, out.float() * weight)


def in_step_attention(
    qkv: QKV, tables: StepTables, spec: AttentionSpec, *, chain: bool = True
) -> tuple[Tensor, Tensor]:
    """Attend the step's own keys only: (out [R, H, D], lse [R, H]), float32, natural logarithm.

    `chain`: a row sees the chain rows of its sequence up to its reach, and a
    mask row its group up to itself. Otherwise mask rows see their group, chain rows no key (out 0, lse -inf). Keys and
    values that are not finite count as 0.
    """
    query, key, value = qkv
    pattern = tables.pattern
    real, first_key = pattern.num_rows, 0 if chain else pattern.num_chain_rows
    num_heads = query.shape[1]
    row, own = torch.arange(real, device=query.device), slice(first_key, real)
    group, owner, offset = pattern.group, pattern.owner, pattern.offset
    seen = (group[:, None] == group[own]) & (group[:, None] >= 0) & (row[:, None] >= row[own])
    seen |= (row[own] < pattern.num_chain_rows) & (offset[own] < pattern.reach[:, None])
    seen &= owner[:, None] == owner[own]
    if spec.window is not None:
        seen &= offset[own] > offset[:, None] - spec.window
    per_kv = num_heads // key.shape[1]
    keys, values = (
        part[own].float().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(per_kv, 1) for part in (key, value)
    )  # [keys, H, D]
    scores = torch.einsum("rhd,khd->rhk", query[:real].float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)  # [real, H]
    weights = torch.where(seen[:, None], torch.exp(scores - lse[..., None]), 0.0)
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    out[:real] = torch.einsum("rhk,khd->rhd", weights, values)
    all_lse = query.new_full((len(query), num_heads), -math.inf, dtype=torch.float32)
    all_lse[:real] = lse
    return out, all_lse


def store_kv(qkv: QKV, pages: KVPages, tables: StepTables) -> None:
    """Write the chain rows' keys and values to their slots; values that are not finite become 0.

    Synchronises with the device.
    """
    slots = tables.slots()
    rows = (slots >= 0).nonzero().flatten()
    place = slots[rows] // tables.block_size, slots[rows] % tables.block_size
    for kept, new in zip(pages, qkv[1:], strict=True):
        as_kept(kept).transpose(1, 2).index_put_(place, to_keep(new[rows], kept.dtype))


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Our operations beside a library that attends the pages."""

    store_kv: Callable[[QKV, KVPages, StepTables], None]
    in_step_attention: Callable[..., tuple[Tensor, Tensor]]
    merge: Callable[..., tuple[Tensor, Tensor]]

    def add_masks(
        self,
        out: Tensor,
        runs: Block,
        found: Tensor,
        found_lse: Tensor,
        qkv: QKV,
        tables: StepTables,
        spec: AttentionSpec,
    ) -> None:
        """Write the mask rows of `out` [R, H, D]: the library's attention over the pages, merged with that among masks.

        found [n·width, H, D] and its lse [n·width, H] of the mask groups `runs`.
        """
        masks = slice(tables.pattern.num_chain_rows, tables.pattern.num_rows)
        lse = out.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
        runs.put(out, found)
        runs.put(lse, found_lse)
        among, among_lse = self.in_step_attention(qkv, tables, spec, chain=False)
        out[masks], _ = self.merge(out[masks], lse[masks], among[masks], among_lse[masks], out.dtype)

    @classmethod
    def on(cls, device: torch.device) -> OwnPart:
        """Return the kernels on a GPU, the reference elsewhere."""
        return cls.kernels() if device.type == "cuda" else cls(store_kv, in_step_attention, merge)

    @classmethod
    @cache
    def kernels(cls) -> OwnPart:
        """Return the Triton kernels. Raises ImportError if triton is not installed."""
        from space_kernels.attention import attention_triton, store_kv_triton

        return cls(store_kv_triton.store_kv, attention_triton.in_step_attention, attention_triton.merge)
