"""The index arithmetic of paged attention: built once per step, shared by all layers with the same heads and window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from space_kernels.paging import Ints, StepRows

KEY_BLOCK = 256
"""Positions per key block. Fixed and aligned to absolute position, so that a row's sums never depend on its company."""

_TILE = 4
"""Rows of a product are a multiple of this: fewer take another order of summation (measured)."""


@dataclass(frozen=True)
class PlanKey:
    """What a plan depends on besides the rows."""

    num_heads: int
    kv_heads: int
    window: int | None  # positions a row may look back, its own included; None: all


@dataclass(frozen=True)
class KeyBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    pages: Tensor  # [n·G·pages per key block] rows of the pages seen as [num_blocks·G, block_size·D]
    hidden: Tensor | None  # [n, 1, P, 1, KEY_BLOCK] keys a row must not attend; None: every row attends all
    stale: Tensor | None  # [n, 1, KEY_BLOCK, 1] slots not written yet; None: all are


@dataclass(frozen=True)
class Bucket:
    """Sequences with (padded) the same number of rows: S sequences, P rows, G kv heads, Q query heads per kv head."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    queries: Tensor  # [S·G·P·Q] rows of the queries seen as [R·H, D]
    blocks: Sequence[KeyBlock]  # ascending
    step_keys: Tensor | None  # [S·G·N] rows of the step's own keys seen as [R·G, D]: the mask rows; None: no masks
    step_hidden: Tensor | None  # [S, 1, P, 1, N] masks a row must not attend


@dataclass(frozen=True)
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
    if KEY_BLOCK % rows.block_size:
        raise ValueError(
            f"Blocks of {rows.block_size} slots do not tile a key block of {KEY_BLOCK}; use a power of two."
        )
    queries_per_kv = key.num_heads // key.kv_heads
    heads = np.arange(key.kv_heads, dtype=np.int64)

    blocks, offsets = np.divmod(rows.chain_slots(), rows.block_size)
    writes = (blocks[:, None] * key.kv_heads + heads) * rows.block_size + offsets[:, None]

    by_size: dict[int, list[int]] = {}
    for number, (chain, masks) in enumerate(zip(rows.chain_runs, rows.mask_runs, strict=True)):
        by_size.setdefault(_padded(len(chain) + len(masks), queries_per_kv), []).append(number)

    outputs = np.zeros((rows.num_padded, key.kv_heads, queries_per_kv), dtype=np.int64)
    buckets, offset = [], 0
    for num_padded, members in sorted(by_size.items()):
        bucket, table, order = _bucket(rows, key, members, num_padded)
        buckets.append(bucket)
        shape = bucket.shape
        numbers = np.arange(offset, offset + len(bucket.queries), dtype=np.int64).reshape(shape)
        for place, number in enumerate(order):
            count = len(rows.chain_runs[number]) + len(rows.mask_runs[number])
            outputs[table[place, :count]] = numbers[place, :, :count].transpose(1, 0, 2)
        offset += len(bucket.queries)
    return AttentionPlan(_to(writes, rows), buckets, _to(outputs, rows))


def _padded(num_rows: int, queries_per_kv: int) -> int:
    """Rows with padding: few distinct numbers, and rows · queries per kv head a multiple of the tile."""
    step = _TILE // np.gcd(_TILE, queries_per_kv) if num_rows < _TILE else _TILE
    return int(-(-num_rows // step) * step)


def _bucket(rows: StepRows, key: PlanKey, members: list[int], num_padded: int) -> tuple[Bucket, Ints, list[int]]:
    """The bucket, its table of flat row numbers [S, P] (padding repeats the first row), and its sequences in order."""
    first_key, num_blocks = {}, {}
    for number in members:
        chain, masks = rows.chain_runs[number], rows.mask_runs[number]
        start, end = int(rows.positions[chain.start]), int(rows.positions[chain.stop - 1]) + 1
        reach = 0 if key.window is None else max(0, start + 1 - key.window)
        if masks and key.window is not None:  # a pruned layout may have mask rows that look at later keys only
            reach = min(reach, max(0, int(rows.positions[masks.start : masks.stop].min()) + 1 - key.window))
        first_key[number] = reach // KEY_BLOCK
        num_blocks[number] = -(-end // KEY_BLOCK) - first_key[number]
    order = sorted(members, key=lambda number: -num_blocks[number])

    # order by length: sequences that have an i-th key block come first, so that a block works on a leading slice
    table = np.empty((len(order), num_padded), dtype=np.int64)
    for row, number in zip(table, order, strict=True):
        chain, masks = rows.chain_runs[number], rows.mask_runs[number]
        row[:] = chain.start
        row[: len(chain)] = chain
        if masks:
            row[len(chain) : len(chain) + len(masks)] = masks
    visible = rows.visible[table]
    oldest = None if key.window is None else rows.positions[table] + 1 - key.window
    written = np.array([rows.positions[rows.chain_runs[number].stop - 1] + 1 for number in order], dtype=np.int64)
    firsts = np.array([first_key[number] for number in order], dtype=np.int64)
    counts = np.array([num_blocks[number] for number in order], dtype=np.int64)

    pages_per_block = KEY_BLOCK // rows.block_size
    held = rows.page_table(int((firsts + counts).max()) * pages_per_block)
    held = held[np.array(order)]
    heads = np.arange(key.kv_heads, dtype=np.int64)
    lanes, places = np.arange(KEY_BLOCK, dtype=np.int64), np.arange(pages_per_block, dtype=np.int64)
    blocks = []
    for i in range(int(counts[0])):
        n = int((counts > i).sum())
        number = firsts[:n] + i
        pages = held[np.arange(n)[:, None], number[:, None] * pages_per_block + places]  # [n, pages per key block]
        pages = pages[:, None, :] * key.kv_heads + heads[:, None]
        keys = number[:, None] * KEY_BLOCK + lanes  # [n, KEY_BLOCK] absolute positions
        last = int(keys[:, -1].max())
        hidden = stale = None
        if int(visible[:n].min()) <= last or oldest is not None:
            hidden = keys[:, None, :] >= visible[:n, :, None]
            if oldest is not None:
                hidden |= keys[:, None, :] < oldest[:n, :, None]
            hidden = _to(hidden[:, None, :, None, :], rows, flat=False) if hidden.any() else None
        if int(written[:n].min()) <= last:
            stale = _to((keys >= written[:n, None])[:, None, :, None], rows, flat=False)
        blocks.append(KeyBlock(n, _to(pages, rows), hidden, stale))

    queries_per_kv = key.num_heads // key.kv_heads
    queries = (
        table[:, None, :, None] * key.num_heads + heads[:, None, None] * queries_per_kv + np.arange(queries_per_kv)
    )
    step_keys, step_hidden = _in_step(rows, key, table, order)
    shape = (len(order), key.kv_heads, num_padded, queries_per_kv)
    return Bucket(shape, _to(queries, rows), blocks, step_keys, step_hidden), table, order


def _in_step(rows: StepRows, key: PlanKey, table: Ints, order: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """Where the masks of each sequence are, and which of them a row must not attend."""
    widest = max(len(rows.mask_runs[number]) for number in order)
    if not widest:
        return None, None
    masks = np.zeros((len(order), widest), dtype=np.int64)
    real = np.zeros((len(order), widest), dtype=np.bool_)
    for row, there, number in zip(masks, real, order, strict=True):
        run = rows.mask_runs[number]
        row[: len(run)], there[: len(run)] = run, True
    seen = (rows.group[table][:, :, None] == rows.group[masks][:, None, :]) & (table[:, :, None] >= masks[:, None, :])
    seen &= real[:, None, :]
    if key.window is not None:
        seen &= rows.positions[masks][:, None, :] > rows.positions[table][:, :, None] - key.window
    heads = np.arange(key.kv_heads, dtype=np.int64)
    keys = masks[:, None, :] * key.kv_heads + heads[:, None]
    return _to(keys, rows), _to(~seen[:, None, :, None, :], rows, flat=False)


def _to(values: np.ndarray, rows: StepRows, *, flat: bool = True) -> Tensor:  # type: ignore[type-arg]
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return (tensor.flatten() if flat else tensor).to(rows.device)
