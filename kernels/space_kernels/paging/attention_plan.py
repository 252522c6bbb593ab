"""The index arithmetic of paged attention, built once per step and shared by layers with the same heads and window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from space_kernels.paging.bucket_pattern import PlanKey
from space_kernels.paging.cached_plan import KEY_BLOCK as KEY_BLOCK
from space_kernels.paging.cached_plan import CachedBlock, CachedBucket, CachedPlan
from space_kernels.paging.step_rows import Ints, StepRows


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    index: Tensor  # [n·G·KEY_BLOCK/run] rows of the pages seen as [slots·G/run, run·D]
    run: int  # slots fetched at once: whole pages (or a larger page's part of the block); single slots if some of the
    # block is not written yet
    bound: Tensor | None  # [m, 1, P, 1, KEY_BLOCK] for the last m of the n; -inf for masked keys, else inf; None: every
    # row attends the whole block


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences with (padded) the same number of rows: S sequences, P rows, G kv heads, Q query heads per kv head."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    queries: Tensor  # [S·G·P·Q] rows of the queries seen as [R·H, D]
    blocks: Sequence[KeyBlock]  # ascending
    step_keys: Tensor | None  # [S·G·N] rows of the step's own keys seen as [R·G, D]: the mask rows; None: no masks
    step_bound: Tensor | None  # [S, 1, P, 1, N] -inf for masks that a row must not attend, else inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The indexes of one step's queries, keys, values and outputs."""

    writes: Tensor  # [chain rows·G] rows of the pages seen as [num_blocks·G·block_size, D]
    buckets: Sequence[Bucket]
    outputs: Tensor  # [R·H] rows of all buckets' outputs, one after the other

    @classmethod
    def of(cls, rows: StepRows, key: PlanKey) -> AttentionPlan:
        """Return the plan of a step, built on first use. Raises ValueError for a block size that does not fit."""
        plan = rows.parts.get(key)
        if not isinstance(plan, cls):
            plan = rows.parts[key] = _build(rows, key)
        return plan

    @staticmethod
    def keys_of(rows: StepRows) -> tuple[PlanKey, ...]:
        """Return the keys of the plans that a step has built so far."""
        return tuple(key for key in rows.parts if isinstance(key, PlanKey))


def _build(rows: StepRows, key: PlanKey) -> AttentionPlan:
    size = rows.block_size
    if KEY_BLOCK % size and size % KEY_BLOCK:
        raise ValueError(f"Blocks of {size} slots do not tile a key block of {KEY_BLOCK}; use a power of two.")
    slots = rows.chain_slots()
    offsets = slots % size
    first_head = (slots - offsets) * key.kv_heads + offsets
    writes = first_head[:, None] + np.arange(0, key.kv_heads * size, size)
    ground = CachedPlan.of(rows, key)
    buckets = []
    for of_bucket in ground.buckets:
        starts, written = rows.starts, rows.written
        if of_bucket.order is not None:
            starts, written = starts[of_bucket.order], written[of_bucket.order]
        blocks = [_key_block(rows, of_bucket, block, starts, written) for block in of_bucket.blocks]
        buckets.append(Bucket(of_bucket.shape, of_bucket.queries, blocks, of_bucket.step_keys, of_bucket.step_bound))
    return AttentionPlan(_to(writes.reshape(-1), rows), buckets, ground.outputs)


def _key_block(rows: StepRows, bucket: CachedBucket, block: CachedBlock, starts: Ints, written: Ints) -> KeyBlock:
    """Return the indexes of the block's keys and the bounds of its scores. starts, written [S]"""
    n, free = block.num_sequences, block.num_free
    if isinstance(block.keys, Tensor):
        index, run = block.keys, min(rows.block_size, KEY_BLOCK)
    else:
        # an unwritten slot may hold NaN: every row masks it, so the block's first key is read in its place
        behind = (written[:n] - block.begin)[:, None, None]
        index, run = _to(np.where(behind > _LANES, block.keys, block.keys[..., :1]).reshape(-1), rows), 1
    bound = None
    if free < n:
        base = (starts[free:n] - block.begin[free:])[:, None]
        bound = _UP_TO.take(base + bucket.reach[free:n], axis=0, mode="clip")  # [m, P, KEY_BLOCK]
        if bucket.oldest is not None:
            np.minimum(bound, _FROM.take(base + bucket.oldest[free:n], axis=0, mode="clip"), out=bound)
    return KeyBlock(n, index, run, None if bound is None else _to(bound[:, None, :, None], rows))


_LANES = np.arange(KEY_BLOCK, dtype=np.int64)
_UP_TO = np.where(np.arange(KEY_BLOCK + 1)[:, None] > _LANES, np.float32(np.inf), np.float32(-np.inf))
"""[KEY_BLOCK+1, KEY_BLOCK] row n: upper bounds of the scores if the first n keys are attended (a minimum is several
times faster than a masked fill)."""
_FROM = -_UP_TO
"""[KEY_BLOCK+1, KEY_BLOCK] row n: the same if the keys from n on are attended."""


def _to(values: npt.NDArray[Any], rows: StepRows) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor if rows.device.type == "cpu" else tensor.to(rows.device)
