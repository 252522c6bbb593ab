"""The index arithmetic of paged attention: built once per step, shared by all layers with the same heads and window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from space_kernels.bucket_pattern import BucketPattern, PlanKey, bucket_patterns
from space_kernels.paging import StepRows
from space_kernels.row_pattern import Ints

KEY_BLOCK = 128
"""Positions per key block. Fixed and aligned to absolute position, so that a row's sums never depend on its company."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    index: Tensor  # [n·G·KEY_BLOCK/run] rows of the pages seen as [slots·G/run, run·D]
    run: int  # slots fetched at once: whole pages, or single slots where some of the block is not written yet
    bound: Tensor | None  # [m, 1, P, 1, KEY_BLOCK] of the last m of the n; -inf for keys a row must not attend, else
    # inf; None: every row attends all


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences with (padded) the same number of rows: S sequences, P rows, G kv heads, Q query heads per kv head."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    queries: Tensor  # [S·G·P·Q] rows of the queries seen as [R·H, D]
    blocks: Sequence[KeyBlock]  # ascending
    step_keys: Tensor | None  # [S·G·N] rows of the step's own keys seen as [R·G, D]: the mask rows; None: no masks
    step_bound: Tensor | None  # [S, 1, P, 1, N] -inf for masks a row must not attend, else inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where one step's queries, keys and values are."""

    writes: Tensor  # [chain rows·G] rows of the pages seen as [num_blocks·G·block_size, D]
    buckets: Sequence[Bucket]
    outputs: Tensor  # [R·H] rows of all buckets' outputs, one after the other

    @classmethod
    def of(cls, rows: StepRows, key: PlanKey) -> AttentionPlan:
        """The plan of this step, built on first use."""
        plan = rows.plans.get(key)
        if plan is None:
            plan = rows.plans[key] = _build(rows, key)
        return plan


def _build(rows: StepRows, key: PlanKey) -> AttentionPlan:
    size = rows.block_size
    if KEY_BLOCK % size:
        raise ValueError(f"Blocks of {size} slots do not tile a key block of {KEY_BLOCK}; use a power of two.")
    slots = rows.chain_slots()
    offsets = slots % size
    first_head = (slots - offsets) * key.kv_heads + offsets
    writes = first_head[:, None] + np.arange(0, key.kv_heads * size, size)

    pattern = bucket_patterns(rows.pattern, key, rows.device)
    places, moved = pattern.places, False
    buckets = []
    for of_bucket in pattern.buckets:
        members = _Members.of(rows, key, of_bucket)
        blocks = _key_blocks(rows, key, members)
        queries, step_keys, step_bound = of_bucket.queries, of_bucket.step_keys, of_bucket.step_bound
        if members.moved is not None:
            order = _to(members.moved, rows)
            queries = queries[order]
            step_keys = None if step_keys is None else step_keys[order]
            step_bound = step_bound if step_bound is None or len(step_bound) == 1 else step_bound[order]
            places = places.copy() if not moved else places
            places[of_bucket.numbers[members.moved]] = pattern.places[of_bucket.numbers]
            moved = True
        if step_bound is not None:
            step_bound = step_bound.expand(len(queries), *step_bound.shape[1:])
        flat_keys = None if step_keys is None else step_keys.view(-1)
        buckets.append(Bucket(of_bucket.shape, queries.view(-1), blocks, flat_keys, step_bound))
    outputs = pattern.outputs
    if moved:
        owner = rows.pattern.owner
        within = pattern.within.copy()
        within[: len(owner)] += places[owner, None]
        outputs = _to(within, rows)
    return AttentionPlan(_to(writes.reshape(-1), rows), buckets, outputs.view(-1))


@dataclass(frozen=True, slots=True)
class _Members:
    """The sequences of a bucket, those with the most key blocks first: a block works on a leading slice.

    Of sequences with equally many, those come last whose rows are the first not to see all of a block.
    """

    order: Ints  # [S] sequence numbers
    table: Ints  # [S, P] flat row numbers; padding repeats the sequence's first row
    moved: Ints | None  # [S] the order among the bucket's sequences; None: as they are
    written: Ints  # [S] slots that hold keys and values once this step has written
    first_block: Ints  # [S] first key block that any row attends
    num_blocks: Ints  # [S] key blocks from there on, falling
    num_whole: Ints  # [S] how many of them every row attends whole, where there is no window

    @classmethod
    def of(cls, rows: StepRows, key: PlanKey, bucket: BucketPattern) -> _Members:
        order, table = bucket.numbers, bucket.table
        starts, written = rows.starts[order], rows.written[order]
        first = np.zeros_like(starts)
        if key.window is not None:
            first = np.maximum(starts + 1 - key.window, 0) // KEY_BLOCK
        count = (written + (KEY_BLOCK - 1)) // KEY_BLOCK - first
        whole = (starts + 1) // KEY_BLOCK - first
        rank = count * (1 << 32) + whole
        if len(order) == 1 or (rank[1:] <= rank[:-1]).all():
            return cls(order, table, None, written, first, count, whole)
        moved = np.argsort(-rank, kind="stable")
        return cls(order[moved], table[moved], moved, written[moved], first[moved], count[moved], whole[moved])


# the i-th key block of the first n sequences                          sequences with fewer key blocks
# [0 ... whole for every row ...) [... some row does not see it all)   [n ...
def _key_blocks(rows: StepRows, key: PlanKey, members: _Members) -> list[KeyBlock]:
    """Per key block: where its keys are, and what of it each row must not attend."""
    size = rows.block_size
    pages_per_block = KEY_BLOCK // size
    counts, whole = members.num_blocks.tolist(), members.num_whole.tolist()
    pages = _pages(rows, key, members)  # [S, G, pages of the key blocks]
    behind = members.written - members.first_block * KEY_BLOCK  # [S] slots written from the first key block on
    least = behind.tolist()
    last = visible = oldest = None
    blocks = []
    n = len(counts)
    for i in range(counts[0]):
        while counts[n - 1] <= i:
            n -= 1
        begin = i * KEY_BLOCK
        index, run = pages[:n, :, i * pages_per_block : (i + 1) * pages_per_block], size
        if min(least[:n]) < begin + KEY_BLOCK:
            # a slot not written yet may hold NaN: its key is hidden from every row, and the last written one is read
            if last is None:
                last = _last_slots(pages, behind, size)
            slots = (index[..., None] * size + _LANES[:size]).reshape(n, -1, KEY_BLOCK)
            index, run = np.where((behind[:n, None, None] - begin) > _LANES, slots, last[:n]), 1
        bound = None
        seen = 0 if key.window is not None else next((m for m in range(n) if whole[m] <= i), n)
        if seen < n:
            if visible is None:
                visible = rows.visible[members.table] - members.first_block[:, None] * KEY_BLOCK
            bound = _UP_TO.take(visible[seen:n] - begin, axis=0, mode="clip")  # [m, P, KEY_BLOCK]
            if key.window is not None:
                if oldest is None:
                    oldest = rows.positions[members.table] + 1 - key.window - members.first_block[:, None] * KEY_BLOCK
                np.minimum(bound, _FROM.take(oldest[:n] - begin, axis=0, mode="clip"), out=bound)
            bound = bound[:, None, :, None]
        at_most = None if bound is None else _to(bound, rows)
        blocks.append(KeyBlock(n, _to(index.reshape(-1), rows), run, at_most))
    return blocks


_LANES = np.arange(KEY_BLOCK, dtype=np.int64)
_UP_TO = np.where(np.arange(KEY_BLOCK + 1)[:, None] > _LANES, np.float32(np.inf), np.float32(-np.inf))
"""[KEY_BLOCK+1, KEY_BLOCK] row n: what scores may at most be where the first n keys are attended (minimum is several
times faster than a mask)."""
_FROM = -_UP_TO
"""[KEY_BLOCK+1, KEY_BLOCK] row n: the same where the keys from the n-th on are attended."""


def _pages(rows: StepRows, key: PlanKey, members: _Members) -> Ints:
    """[S, G, pages of the key blocks] pages seen as [num_blocks·G]; any page where a sequence has no more."""
    per_block = KEY_BLOCK // rows.block_size
    table = rows.page_table
    columns = np.arange(int(members.num_blocks[0]) * per_block, dtype=np.int64)
    if key.window is not None:
        columns = members.first_block[:, None] * per_block + columns
    held = table[members.order[:, None], np.minimum(columns, table.shape[1] - 1)]
    pages: Ints = held[:, None] * key.kv_heads + np.arange(key.kv_heads, dtype=np.int64)[:, None]
    return pages


def _last_slots(pages: Ints, behind: Ints, block_size: int) -> Ints:
    """[S, G, 1] the slot of each sequence that was written last. `behind`: slots written from the first page on."""
    place, offset = np.divmod(behind - 1, block_size)
    last: Ints = pages[np.arange(len(pages)), :, place] * block_size + offset[:, None]
    return last[..., None]


def _to(values: npt.NDArray[Any], rows: StepRows) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor if rows.device.type == "cpu" else tensor.to(rows.device)
