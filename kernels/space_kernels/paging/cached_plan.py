"""The part of an attention plan that stays valid while no sequence gets a new page or reaches a new key block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from space_kernels.paging.bucket_pattern import BucketPattern, PlanKey, bucket_patterns
from space_kernels.paging.step_rows import Ints, StepRows

KEY_BLOCK = 128
"""Positions per key block. Fixed and aligned to absolute positions, so that a row's sums do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    begin: Ints  # [n] absolute position of the block's first slot
    keys: Tensor | Ints  # if the whole block is written: [n·G·units] units seen as [slots·G/unit], on the device;
    # else [n, G, KEY_BLOCK] slots seen as [num_blocks·G·block_size]
    num_free: int  # leading sequences whose rows all attend the whole block


@dataclass(frozen=True, slots=True)
class CachedBucket:
    """Sequences with the same padded number of rows, by descending number of key blocks.

    Ties are ordered by descending number of blocks that all of the sequence's rows see whole.
    """

    shape: tuple[int, int, int, int]  # S, G, P, Q
    order: Ints | None  # [S] sequence numbers; None: all, as they are
    queries: Tensor  # [S·G·P·Q]
    step_keys: Tensor | None  # [S·G·N]
    step_bound: Tensor | None  # [S, 1, P, 1, N]
    reach: Ints  # [S, P] slots that a row attends, counted from its sequence's first chain row
    oldest: Ints | None  # [S, P] the first slot that it attends, counted likewise; None: no window
    blocks: Sequence[CachedBlock]  # ascending


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The part of a plan that consecutive steps share."""

    page_table: Ints
    lowest: Ints  # [sequences] smallest and
    highest: Ints  # [sequences] largest start for which the fields below are valid
    buckets: Sequence[CachedBucket]
    outputs: Tensor  # [R·H]

    @classmethod
    def of(cls, rows: StepRows, key: PlanKey) -> CachedPlan:
        """Return the cached plan of the last step with this pattern if it is still valid, else build a new one."""
        name = (cls, key, rows.device)
        known = rows.pattern.parts.get(name)
        if not isinstance(known, CachedPlan) or not known._holds(rows):
            known = rows.pattern.parts[name] = _build(rows, key)
        return known

    def _holds(self, rows: StepRows) -> bool:
        starts = rows.starts
        return rows.page_table is self.page_table and bool(((starts >= self.lowest) & (starts <= self.highest)).all())


def _build(rows: StepRows, key: PlanKey) -> CachedPlan:
    starts, num_chain = rows.starts, rows.pattern.chains[1]
    first, highest = (
        np.zeros_like(starts),
        np.minimum(
            -(-rows.written // KEY_BLOCK) * KEY_BLOCK - num_chain,  # the written slots still fit the key blocks
            ((starts + 1) // KEY_BLOCK + 1) * KEY_BLOCK - 2,  # the first row does not yet see another whole block
        ),
    )
    if key.window is not None:
        first = np.maximum(starts + 1 - key.window, 0) // KEY_BLOCK  # [sequences] first key block that any row attends
        highest = np.minimum(highest, (first + 1) * KEY_BLOCK + key.window - 2)

    pattern = bucket_patterns(rows.pattern, key, rows.device)
    places = pattern.places
    buckets = []
    for bucket in pattern.buckets:
        ground, moved = _bucket(rows, key, bucket, first)
        buckets.append(ground)
        if moved is not None:
            places = places.copy()
            places[bucket.numbers[moved]] = pattern.places[bucket.numbers]
    outputs = pattern.outputs
    if places is not pattern.places:
        within = pattern.within.copy()
        within[: len(rows.pattern.owner)] += places[rows.pattern.owner, None]
        outputs = torch.from_numpy(within).to(rows.device)
    return CachedPlan(rows.page_table, starts, highest, buckets, outputs.view(-1))


def _bucket(rows: StepRows, key: PlanKey, bucket: BucketPattern, first: Ints) -> tuple[CachedBucket, Ints | None]:
    """Build a bucket; also return the order of its sequences, or None if unchanged."""
    order, table = bucket.numbers, bucket.table
    queries, step_keys, step_bound = bucket.queries, bucket.step_keys, bucket.step_bound
    count = -(-rows.written[order] // KEY_BLOCK) - first[order]
    num_whole = (rows.starts[order] + 1) // KEY_BLOCK - first[order]
    rank = count * (1 << 32) + num_whole
    moved: Ints | None = None
    if (rank[1:] > rank[:-1]).any():
        moved = np.argsort(-rank, kind="stable")
        order, table, count, num_whole = order[moved], table[moved], count[moved], num_whole[moved]
        at = torch.from_numpy(moved).to(rows.device)
        queries = queries[at]
        step_keys = None if step_keys is None else step_keys[at]
        step_bound = step_bound if step_bound is None or len(step_bound) == 1 else step_bound[at]
    if step_bound is not None:
        step_bound = step_bound.expand(len(order), *step_bound.shape[1:])
    is_whole_step = moved is None and len(order) == len(rows.starts)
    ground = CachedBucket(
        shape=bucket.shape,
        order=None if is_whole_step else order,
        queries=queries.view(-1),
        step_keys=None if step_keys is None else step_keys.view(-1),
        step_bound=step_bound,
        reach=rows.pattern.reach[table],
        oldest=None if key.window is None else rows.pattern.offsets[table] + 1 - key.window,
        blocks=_blocks(rows, key, order, first[order], count, num_whole),
    )
    return ground, moved


# the i-th key block of the first n sequences                          sequences with fewer key blocks
# [0 ... num_free: every row sees it whole) [... some row does not)     [n ...
def _blocks(
    rows: StepRows, key: PlanKey, order: Ints, first: Ints, num_blocks: Ints, num_whole: Ints
) -> list[CachedBlock]:
    unit = min(rows.block_size, KEY_BLOCK)  # slots of a page that one key block takes
    per_block, per_page = KEY_BLOCK // unit, rows.block_size // unit
    counts, whole = num_blocks.tolist(), num_whole.tolist()
    least = (rows.written[order] - first * KEY_BLOCK).tolist()  # slots written from the first key block on
    columns = first[:, None] * per_block + np.arange(counts[0] * per_block, dtype=np.int64)
    held = rows.page_table[order[:, None], np.minimum(columns // per_page, rows.page_table.shape[1] - 1)]
    heads = np.arange(key.kv_heads, dtype=np.int64)[:, None]
    # [S, G, units]: an arbitrary page beyond a sequence's last
    pages = (held[:, None] * key.kv_heads + heads) * per_page + (columns % per_page)[:, None]
    lanes = np.arange(unit, dtype=np.int64)
    blocks = []
    n = len(counts)
    for i in range(counts[0]):
        while counts[n - 1] <= i:
            n -= 1
        of_block = pages[:n, :, i * per_block : (i + 1) * per_block]
        keys: Tensor | Ints
        if min(least[:n]) >= (i + 1) * KEY_BLOCK:
            keys = torch.from_numpy(of_block.reshape(-1)).to(rows.device)
        else:
            keys = (of_block[..., None] * unit + lanes).reshape(n, -1, KEY_BLOCK)
        num_free = 0 if key.window is not None else next((m for m in range(n) if whole[m] <= i), n)
        blocks.append(CachedBlock(n, (first[:n] + i) * KEY_BLOCK, keys, num_free))
    return blocks
