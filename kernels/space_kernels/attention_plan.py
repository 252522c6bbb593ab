"""The index arithmetic of paged attention: built once per step, shared by all layers with the same heads and window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from space_kernels.paging import Ints, StepRows

Flags = npt.NDArray[np.bool_]

KEY_BLOCK = 128
"""Positions per key block. Fixed and aligned to absolute position, so that a row's sums never depend on its company."""

_TILE = 4
"""Rows of a product are a multiple of this: fewer take another order of summation (measured)."""


@dataclass(frozen=True)
class PlanKey:
    """What a plan depends on besides the rows."""

    num_heads: int
    kv_heads: int
    window: int | None  # positions a row may look back, its own included; None: all

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.kv_heads


@dataclass(frozen=True)
class KeyBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    index: Tensor  # [n·G·KEY_BLOCK/run] rows of the pages seen as [slots·G/run, run·D]
    run: int  # slots fetched at once: whole pages, or single slots where some of the block is not written yet
    bound: Tensor | None  # [n, 1, P·Q, KEY_BLOCK] -inf for keys a row must not attend, else inf; None: it attends all


@dataclass(frozen=True)
class Bucket:
    """Sequences with (padded) the same number of rows: S sequences, P rows, G kv heads, Q query heads per kv head."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    queries: Tensor  # [S·G·P·Q] rows of the queries seen as [R·H, D]
    blocks: Sequence[KeyBlock]  # ascending
    step_keys: Tensor | None  # [S·G·N] rows of the step's own keys seen as [R·G, D]: the mask rows; None: no masks
    step_bound: Tensor | None  # [S, 1, P·Q, N] -inf for masks a row must not attend, else inf


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
    heads = np.arange(key.kv_heads, dtype=np.int64)
    blocks, offsets = np.divmod(rows.chain_slots(), rows.block_size)
    writes = (blocks[:, None] * key.kv_heads + heads) * rows.block_size + offsets[:, None]

    by_size: dict[int, list[int]] = {}
    for number, num_rows in enumerate((rows.chains[1] + rows.masks[1]).tolist()):
        by_size.setdefault(_padded(num_rows, key.queries_per_kv), []).append(number)

    outputs = np.zeros((rows.num_padded, key.kv_heads, key.queries_per_kv), dtype=np.int64)
    buckets, offset = [], 0
    for num_padded, numbers in sorted(by_size.items()):
        members = _Members.of(rows, key, np.array(numbers, dtype=np.int64), num_padded)
        shape = (len(members.order), key.kv_heads, num_padded, key.queries_per_kv)
        head_of = (heads[:, None] * key.queries_per_kv + np.arange(key.queries_per_kv))[:, None, :]  # [G, 1, Q]
        queries = members.table[:, None, :, None] * key.num_heads + head_of
        step_keys, step_bound = _in_step(rows, key, members)
        blocks_of = _key_blocks(rows, key, members)
        buckets.append(Bucket(shape, _to(queries, rows), blocks_of, step_keys, step_bound))
        places = np.arange(offset, offset + queries.size, dtype=np.int64).reshape(shape).transpose(0, 2, 1, 3)
        outputs[members.table[members.real]] = places[members.real]
        offset += queries.size
    return AttentionPlan(_to(writes, rows), buckets, _to(outputs, rows))


def _padded(num_rows: int, queries_per_kv: int) -> int:
    """Rows with padding: few distinct numbers, and rows · queries per kv head a multiple of the tile."""
    step = _TILE // math.gcd(_TILE, queries_per_kv) if num_rows < _TILE else _TILE
    return -(-num_rows // step) * step


@dataclass(frozen=True)
class _Members:
    """The sequences of a bucket, those with the most key blocks first: a block works on a leading slice."""

    order: Ints  # [S] sequence numbers
    table: Ints  # [S, P] flat row numbers; padding repeats the sequence's first row
    real: Flags  # [S, P] False for padding
    written: Ints  # [S] slots that hold keys and values once this step has written
    first_block: Ints  # [S] first key block that any row attends
    num_blocks: Ints  # [S] key blocks from there on, falling

    @classmethod
    def of(cls, rows: StepRows, key: PlanKey, numbers: Ints, num_padded: int) -> _Members:
        chain, num_chain = (bound[numbers, None] for bound in rows.chains)
        masks, num_masks = (bound[numbers, None] for bound in rows.masks)
        lane = np.arange(num_padded, dtype=np.int64)
        real = lane < num_chain + num_masks
        table = np.where(lane < num_chain, chain + lane, np.where(real, masks + lane - num_chain, chain))
        written = rows.positions[(chain + num_chain - 1)[:, 0]] + 1
        first = np.zeros(len(numbers), dtype=np.int64)
        if key.window is not None:
            first = np.maximum(rows.positions[table].min(1) + 1 - key.window, 0) // KEY_BLOCK
        count = -(-written // KEY_BLOCK) - first
        order = np.argsort(-count, kind="stable")
        return cls(numbers[order], table[order], real[order], written[order], first[order], count[order])


def _key_blocks(rows: StepRows, key: PlanKey, members: _Members) -> list[KeyBlock]:
    """Per key block: where its keys are, and what of it each row must not attend."""
    visible = rows.visible[members.table]
    oldest = None if key.window is None else rows.positions[members.table] + 1 - key.window
    pages_per_block = KEY_BLOCK // rows.block_size
    held = rows.page_table[members.order]
    heads = np.arange(key.kv_heads, dtype=np.int64)[:, None]
    lanes, places = np.arange(KEY_BLOCK, dtype=np.int64), np.arange(pages_per_block, dtype=np.int64)
    every = np.arange(len(members.order), dtype=np.int64)[:, None]
    firsts, counts, written = members.first_block.tolist(), members.num_blocks.tolist(), members.written.tolist()
    least_visible = visible.min(1).tolist()
    blocks = []
    n = len(counts)
    for i in range(counts[0]):
        while counts[n - 1] <= i:
            n -= 1
        number = members.first_block[:n, None] + i
        end = (max(firsts[:n]) + i + 1) * KEY_BLOCK
        keys, member = number * KEY_BLOCK + lanes, every[:n]  # keys [n, KEY_BLOCK]: absolute positions
        if min(written[:n]) >= end:
            index = held[member, number * pages_per_block + places][:, None] * key.kv_heads + heads
            run = rows.block_size
        else:
            # a slot not written yet may hold NaN: its key is hidden from every row, and the last written one is read
            page, offset = np.divmod(np.minimum(keys, members.written[:n, None] - 1), rows.block_size)
            index = (held[member, page][:, None] * key.kv_heads + heads) * rows.block_size + offset[:, None]
            run = 1
        bound = None
        if oldest is not None or min(least_visible[:n]) < end:
            hidden = keys[:, None, :] >= visible[:n, :, None]
            if oldest is not None:
                hidden |= keys[:, None, :] < oldest[:n, :, None]
            bound = _bound(hidden, key, rows)
        blocks.append(KeyBlock(n, _to(index, rows), run, bound))
    return blocks


def _in_step(rows: StepRows, key: PlanKey, members: _Members) -> tuple[Tensor | None, Tensor | None]:
    """Where the masks of each sequence are, and which of them a row must not attend."""
    first, count = (bound[members.order, None] for bound in rows.masks)
    widest = int(count.max())
    if not widest:
        return None, None
    lane = np.arange(widest, dtype=np.int64)
    real = lane < count
    masks = np.where(real, first + lane, 0)
    table = members.table
    seen = (rows.group[table][:, :, None] == rows.group[masks][:, None]) & (table[:, :, None] >= masks[:, None])
    seen &= real[:, None]
    if key.window is not None:
        seen &= rows.positions[masks][:, None] > rows.positions[table][:, :, None] - key.window
    heads = np.arange(key.kv_heads, dtype=np.int64)[:, None]
    return _to(masks[:, None] * key.kv_heads + heads, rows), _bound(~seen, key, rows)


def _bound(hidden: Flags, key: PlanKey, rows: StepRows) -> Tensor:
    """hidden [S, P, N] -> [S, 1, P·Q, N]: what scores may at most be (minimum is several times faster than a mask)."""
    bound = np.where(hidden, np.float32(-np.inf), np.float32(np.inf))
    return torch.from_numpy(np.repeat(bound, key.queries_per_kv, axis=1)[:, None]).to(rows.device)


def _to(values: Ints, rows: StepRows) -> Tensor:
    return torch.from_numpy(values.reshape(-1)).to(rows.device)
