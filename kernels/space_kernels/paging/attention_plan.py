"""The index arithmetic of paged attention, built once per step and shared by layers with the same heads and window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from space_kernels.paging.step_rows import Ints, RowPattern, StepRows

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
    chunk: int | None = None  # positions of a chunk, beyond which a row sees nothing; None: all

    @property
    def queries_per_kv(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.kv_heads

    def padded(self, num_rows: int) -> int:
        """Return the padded number of rows: rows · queries per kv head fill whole tiles, and enough of them.
        Few distinct values result, so sequences share buckets."""
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
    masks: Ints  # [S, N] flat row numbers of the masks; 0 for padding


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
        known = rows.parts[key, device] = _bucket_patterns(rows, key, device)
    return known


def _bucket_patterns(rows: RowPattern, key: PlanKey, device: torch.device) -> BucketPatterns:
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
        step_keys, step_bound, masks = _in_step(rows, key, numbers, table, device)
        buckets.append(BucketPattern(shape, numbers, table, _to(queries, device), step_keys, step_bound, masks))
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
) -> tuple[Tensor | None, Tensor | None, Ints]:
    """Return the indexes of each sequence's masks, bounds that are -inf for masks a row must not attend (chunks apart,
    which depend on the step), and the masks' row numbers [S, N]."""
    first, count = (bound[numbers, None] for bound in rows.masks)
    widest = int(count.max())
    if not widest:
        return None, None, np.zeros((len(numbers), 0), dtype=np.int64)
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
    return _to(keys, device), _to(bound, device), masks


def _to(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


KEY_BLOCK = 128
"""Positions per key block. Fixed and aligned to absolute positions, so that a row's sums do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    begin: Ints  # [n] absolute position of the block's first slot
    keys: Tensor | Ints  # if the whole block is written: [n·G·units] units seen as [slots·G/unit], on the device;
    # else [n, G, KEY_BLOCK] slots seen as [num_blocks·G·block_size]
    num_free: int  # leading sequences in which every row attends the whole block


@dataclass(frozen=True, slots=True)
class Chunked:
    """What a bucket's rows see with chunks, which depends on the positions of a step."""

    chunk: int
    offsets: Ints  # [S, P] of the rows, from their sequence's first chain row on
    masks: Ints  # [S, N] of the masks, likewise

    def oldest(self, starts: Ints) -> Ints:
        """Return [S, P]: the first slot that each row attends, counted from the sequence's first chain row."""
        positions = starts[:, None] + self.offsets
        first: Ints = positions // self.chunk * self.chunk - starts[:, None]
        return first

    def step_bound(self, bound: Tensor, starts: Ints) -> Tensor:
        """Return [S, 1, P, 1, N]: `bound`, and -inf for masks of another chunk."""
        seen = self.masks[:, None] >= self.oldest(starts)[:, :, None]
        here = np.where(seen, np.float32(np.inf), np.float32(-np.inf))[:, None, :, None]
        return torch.minimum(bound, _to(here, bound.device))


@dataclass(frozen=True, slots=True)
class CachedBucket:
    """Sequences with the same padded number of rows, by descending number of key blocks.
    Ties are ordered by descending number of blocks that all of the sequence's rows see whole."""

    shape: tuple[int, int, int, int]  # S, G, P, Q
    order: Ints | None  # [S] sequence numbers; None: all, as they are
    queries: Tensor  # [S·G·P·Q]
    step_keys: Tensor | None  # [S·G·N]
    step_bound: Tensor | None  # [S, 1, P, 1, N]
    reach: Ints  # [S, P] slots that a row attends, counted from its sequence's first chain row
    oldest: Ints | None  # [S, P] the first slot that it attends, counted likewise; None: no window
    chunked: Chunked | None  # None: no chunks
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
            known = rows.pattern.parts[name] = _cached_plan(rows, key)
        return known

    def _holds(self, rows: StepRows) -> bool:
        starts = rows.starts
        return rows.page_table is self.page_table and bool(((starts >= self.lowest) & (starts <= self.highest)).all())


def _cached_plan(rows: StepRows, key: PlanKey) -> CachedPlan:
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
    if key.chunk is not None:
        first = starts // key.chunk * key.chunk // KEY_BLOCK
        highest = np.minimum(highest, (starts // key.chunk + 1) * key.chunk - 1)

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
    order, table, masks = bucket.numbers, bucket.table, bucket.masks
    queries, step_keys, step_bound = bucket.queries, bucket.step_keys, bucket.step_bound
    count = -(-rows.written[order] // KEY_BLOCK) - first[order]
    num_whole = (rows.starts[order] + 1) // KEY_BLOCK - first[order]
    rank = count * (1 << 32) + num_whole
    moved: Ints | None = None
    if (rank[1:] > rank[:-1]).any():
        moved = np.argsort(-rank, kind="stable")
        order, table, count, num_whole = order[moved], table[moved], count[moved], num_whole[moved]
        masks = masks[moved]
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
        chunked=None
        if key.chunk is None
        else Chunked(key.chunk, rows.pattern.offsets[table], rows.pattern.offsets[masks]),
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
            keys = _to(of_block.reshape(-1), rows.device)
        else:
            keys = (of_block[..., None] * unit + lanes).reshape(n, -1, KEY_BLOCK)
        is_bounded = key.window is not None or key.chunk is not None
        num_free = 0 if is_bounded else next((m for m in range(n) if whole[m] <= i), n)
        blocks.append(CachedBlock(n, (first[:n] + i) * KEY_BLOCK, keys, num_free))
    return blocks


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The i-th key block of the first `num_sequences` sequences of a bucket."""

    num_sequences: int
    begin: Ints  # [n] absolute position of the block's first slot
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
            plan = rows.parts[key] = _attention_plan(rows, key)
        return plan

    @staticmethod
    def keys_of(rows: StepRows) -> tuple[PlanKey, ...]:
        """Return the keys of the plans that a step has built so far."""
        return tuple(key for key in rows.parts if isinstance(key, PlanKey))


def _attention_plan(rows: StepRows, key: PlanKey) -> AttentionPlan:
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
        chunked, step_bound = of_bucket.chunked, of_bucket.step_bound
        oldest = of_bucket.oldest if chunked is None else chunked.oldest(starts)
        if chunked is not None and step_bound is not None:
            step_bound = chunked.step_bound(step_bound, starts)
        blocks = [_key_block(rows, of_bucket, block, starts, written, oldest) for block in of_bucket.blocks]
        buckets.append(Bucket(of_bucket.shape, of_bucket.queries, blocks, of_bucket.step_keys, step_bound))
    return AttentionPlan(_to(writes.reshape(-1), rows.device), buckets, ground.outputs)


def _key_block(
    rows: StepRows, bucket: CachedBucket, block: CachedBlock, starts: Ints, written: Ints, oldest: Ints | None
) -> KeyBlock:
    """Return the indexes of the block's keys and the bounds of its scores. starts, written [S]; oldest [S, P]"""
    n, free = block.num_sequences, block.num_free
    if isinstance(block.keys, Tensor):
        index, run = block.keys, min(rows.block_size, KEY_BLOCK)
    else:
        # an unwritten slot may hold NaN: every row masks it, so the block's first key is read in its place
        behind = (written[:n] - block.begin)[:, None, None]
        index, run = _to(np.where(behind > _LANES, block.keys, block.keys[..., :1]).reshape(-1), rows.device), 1
    bound = None
    if free < n:
        base = (starts[free:n] - block.begin[free:])[:, None]
        bound = _UP_TO.take(base + bucket.reach[free:n], axis=0, mode="clip")  # [m, P, KEY_BLOCK]
        if oldest is not None:
            np.minimum(bound, _FROM.take(base + oldest[free:n], axis=0, mode="clip"), out=bound)
    return KeyBlock(n, block.begin, index, run, None if bound is None else _to(bound[:, None, :, None], rows.device))


_LANES = np.arange(KEY_BLOCK, dtype=np.int64)
_UP_TO = np.where(np.arange(KEY_BLOCK + 1)[:, None] > _LANES, np.float32(np.inf), np.float32(-np.inf))
"""[KEY_BLOCK+1, KEY_BLOCK] row n: upper bounds of the scores if the first n keys are attended (a minimum is several
times faster than a masked fill)."""
_FROM = -_UP_TO
"""[KEY_BLOCK+1, KEY_BLOCK] row n: the same if the keys from n on are attended."""
