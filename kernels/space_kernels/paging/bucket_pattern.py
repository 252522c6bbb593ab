"""The part of an attention plan that depends on the row pattern alone: built once and reused by later steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from space_kernels.paging.step_rows import Ints, RowPattern

_TILE = 4
"""Matmul rows are padded to a multiple of this: fewer rows are summed in another order (measured)."""

_TILE_DIM = 64
"""One tile of rows is required per this many head elements: with few rows, long heads are summed in another order
(below 3 rows of 64 elements, 6 of 128, 11 of 256 on an x86-64 of model 207; torch 2.13)."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """The parameters of a plan besides the rows."""

    num_heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # positions a row sees back, its own included; None: all

    @property
    def queries_per_kv(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.kv_heads

    def padded(self, num_rows: int) -> int:
        """Return the padded number of rows: rows · queries per kv head fill whole tiles, and enough of them.

        Few distinct values result, so sequences share buckets.
        """
        fewest = -(-self.head_dim // _TILE_DIM) * _TILE
        most = max(num_rows, -(-fewest // self.queries_per_kv))
        step = _TILE // math.gcd(_TILE, self.queries_per_kv) if most < _TILE else _TILE
        return -(-most // step) * step


@dataclass(frozen=True, slots=True)
class BucketPattern:
    """Sequences with (padded) the same number of rows: S sequences, P rows, G kv heads, Q query heads per kv head."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    numbers: Ints  # [S] sequence numbers, ascending
    table: Ints  # [S, P] flat row numbers; padding repeats the sequence's first row
    queries: Tensor  # [S, G·P·Q] rows of the queries seen as [R·H, D]
    step_keys: Tensor | None  # [S, G·N] rows of the step's own keys seen as [R·G, D]: the mask rows; None: no masks
    step_bound: Tensor | None  # [S or 1, 1, P, 1, N] -inf for masks a row must not attend, else inf; 1: equal for all


@dataclass(frozen=True, slots=True)
class BucketPatterns:
    """The buckets of a step, and the location of each row's outputs."""

    buckets: Sequence[BucketPattern]
    places: Ints  # [sequences] first output row of a sequence, in the buckets' own order
    within: Ints  # [R, H] output row relative to the sequence's first; 0 for padding
    outputs: Tensor  # [R, H] the sum of both


def bucket_patterns(rows: RowPattern, key: PlanKey, device: torch.device) -> BucketPatterns:
    """Return the buckets of a pattern, built on first use."""
    known = rows.parts.get((key, device))
    if not isinstance(known, BucketPatterns):
        known = rows.parts[key, device] = _build(rows, key, device)
    return known


def _build(rows: RowPattern, key: PlanKey, device: torch.device) -> BucketPatterns:
    heads, lanes = np.arange(key.kv_heads, dtype=np.int64), np.arange(key.queries_per_kv, dtype=np.int64)
    by_size: dict[int, list[int]] = {}
    for number, num_rows in enumerate((rows.chains[1] + rows.masks[1]).tolist()):
        by_size.setdefault(key.padded(num_rows), []).append(number)

    places = np.zeros(len(rows.chain_runs), dtype=np.int64)
    within = np.zeros((rows.num_padded, key.kv_heads, key.queries_per_kv), dtype=np.int64)
    buckets, offset = [], 0
    for num_padded, members in sorted(by_size.items()):
        numbers = np.array(members, dtype=np.int64)
        table, real = _table(rows, numbers, num_padded)
        shape = (len(numbers), key.kv_heads, num_padded, key.queries_per_kv)
        head_of = (heads[:, None] * key.queries_per_kv + lanes)[:, None, :]  # [G, 1, Q]
        queries = (table[:, None, :, None] * key.num_heads + head_of).reshape(len(numbers), -1)
        step_keys, step_bound = _in_step(rows, key, numbers, table, device)
        buckets.append(BucketPattern(shape, numbers, table, _to(queries, device), step_keys, step_bound))
        size = queries.shape[1]
        places[numbers] = offset + np.arange(len(numbers), dtype=np.int64) * size
        own = np.arange(size, dtype=np.int64).reshape(shape[1:]).transpose(1, 0, 2)  # [P, G, Q]
        within[table[real]] = np.broadcast_to(own, (len(numbers), *own.shape))[real]
        offset += queries.size
    flat = within.reshape(rows.num_padded, key.num_heads)
    outputs = flat.copy()
    outputs[: len(rows.owner)] += places[rows.owner, None]
    return BucketPatterns(buckets, places, flat, _to(outputs, device))


def _table(rows: RowPattern, numbers: Ints, num_padded: int) -> tuple[Ints, np.ndarray]:
    """Return flat row numbers [S, P], and a mask that is False for padding."""
    chain, num_chain = (bound[numbers, None] for bound in rows.chains)
    masks, num_masks = (bound[numbers, None] for bound in rows.masks)
    lane = np.arange(num_padded, dtype=np.int64)
    real = lane < num_chain + num_masks
    return np.where(lane < num_chain, chain + lane, np.where(real, masks + lane - num_chain, chain)), real


def _in_step(
    rows: RowPattern, key: PlanKey, numbers: Ints, table: Ints, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the indexes of each sequence's masks, and bounds that are -inf for masks a row must not attend."""
    first, count = (bound[numbers, None] for bound in rows.masks)
    widest = int(count.max())
    if not widest:
        return None, None
    lane = np.arange(widest, dtype=np.int64)
    real = lane < count
    masks = np.where(real, first + lane, 0)
    seen = (rows.group[table][:, :, None] == rows.group[masks][:, None]) & (table[:, :, None] >= masks[:, None])
    seen &= real[:, None]
    if key.window is not None:
        seen &= rows.offsets[masks][:, None] > rows.offsets[table][:, :, None] - key.window
    if (seen == seen[:1]).all():
        seen = seen[:1]
    bound = np.where(seen, np.float32(np.inf), np.float32(-np.inf))[:, None, :, None]
    heads = np.arange(key.kv_heads, dtype=np.int64)[:, None]
    keys = (masks[:, None] * key.kv_heads + heads).reshape(len(numbers), -1)
    return _to(keys, device), torch.from_numpy(bound).to(device)


def _to(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
