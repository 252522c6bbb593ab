"""What attention by a library needs beside it: runs of query rows over a paged prefix, and merging partial results.

A library attends the pages and returns, per row and head, the log of the sum of weights. That suffices to merge its
result with attention over other keys: for disjoint key sets A and B,

    lse = log(exp(lse_A) + exp(lse_B))        out = exp(lse_A - lse)·out_A + exp(lse_B - lse)·out_B

`merge`, `in_step_attention` and `store_kv` are the reference; `attention_triton` has kernels of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.fp8 import as_kept, to_keep
from space_kernels.paging.step_rows import Ints, RowPattern, StepRows, StepTables

LONGEST_SHORT_CHAIN = 32
"""Longest chain that is treated as decoding: such chains are padded to one width and share a call that may split the
context. Longer chains are prompts, with enough rows to fill a device."""


@dataclass(frozen=True, eq=False)
class Block:
    """Runs of rows, padded to one width."""

    sequences: Tensor  # [n] sequence of each run
    reach: Tensor  # [n] int32 slots, from the sequence's first chain row on, that the run's last row sees
    longest: int  # maximum reach
    rows: Tensor | None  # [n·width] flat row numbers; None: the first n·width rows of the step
    width: int
    places: Tensor  # [real rows] indexes of the n·width rows that are not padding
    targets: Tensor  # [real rows] their flat row numbers

    def of(self, rows: Tensor) -> Tensor:
        """Gather the runs' rows: [R, ...] -> [n, width, ...]"""
        num_runs = len(self.sequences)
        found = rows[: num_runs * self.width] if self.rows is None else rows.index_select(0, self.rows)
        return found.reshape(num_runs, self.width, *rows.shape[1:])

    def put(self, rows: Tensor, found: Tensor) -> None:
        """Scatter `found` [n·width, ...] to its rows of `rows` [R, ...], without the padding."""
        if self.rows is None:
            rows[: len(found)] = found
        else:
            rows.index_copy_(0, self.targets, found.index_select(0, self.places))


@dataclass(frozen=True, eq=False)
class Ragged:
    """Runs of rows of any length, one after the other."""

    sequences: Tensor  # [n] sequence of each run
    reach: Tensor  # [n] int32: the length of each run
    rows: Tensor  # [total] flat row numbers
    bounds: Tensor  # [n+1] int32: start of each run
    widest: int

    @property
    def longest(self) -> int:
        """Maximum reach."""
        return self.widest


@dataclass(frozen=True, eq=False)
class PrefixPattern:
    """The runs of a row pattern, by library call."""

    short_chains: Block | None  # causal, padded in front so that the ends align
    long_chains: Ragged | None  # causal
    masks: Block | None  # one run per mask group, padded behind; every row sees the prefix up to the base row

    @classmethod
    def of(cls, pattern: RowPattern, device: torch.device) -> PrefixPattern:
        """Return the runs of a pattern, built on first use."""
        known = pattern.parts.get((cls, device))
        if not isinstance(known, cls):
            known = pattern.parts[cls, device] = _build(pattern, device)
        return known


@dataclass(frozen=True, eq=False)
class Reach:
    """The visible length and the pages of each run in one step."""

    lengths: Tensor  # [n] int32 slots that the run's last row sees; dead rows may see unwritten slots
    pages: Tensor  # [n, most pages] int32, enough for these lengths
    plans: dict[Hashable, Any] = field(default_factory=dict)  # a library's, shared by the layers of the step


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """The runs of one step and how far each sees. Built once, shared by all layers.

    Values derived from the step's tables are computed on the device once per StepRows. A CUDA graph must be captured
    with an unused StepRows, so that these computations are part of the graph.
    """

    pattern: PrefixPattern
    tables: StepTables

    @classmethod
    def of(cls, rows: StepRows) -> PrefixRows:
        """Return the step's runs, built on first use."""
        name = (cls, rows.device)
        known = rows.parts.get(name)
        if not isinstance(known, PrefixRows):
            known = rows.parts[name] = cls(PrefixPattern.of(rows.pattern, rows.device), StepTables.of(rows))
        return known

    @cached_property
    def short_chains(self) -> Reach | None:
        """Reach of the decoding chains."""
        return self._reach(self.pattern.short_chains)

    @cached_property
    def long_chains(self) -> Reach | None:
        """Reach of the prompts."""
        return self._reach(self.pattern.long_chains)

    @cached_property
    def masks(self) -> Reach | None:
        """Reach of the mask groups."""
        return self._reach(self.pattern.masks)

    def _reach(self, runs: Block | Ragged | None) -> Reach | None:
        if runs is None:
            return None
        lengths = self.tables.starts.index_select(0, runs.sequences) + runs.reach
        table = self.tables.page_table.index_select(0, runs.sequences)
        # If only the device knows which rows are live, a run may extend beyond its sequence's last page. Those rows are
        # dead, but the library still looks up the page of the last one, so the table is padded.
        return Reach(lengths, functional.pad(table, (0, -(-runs.longest // self.tables.block_size))))


def _build(pattern: RowPattern, device: torch.device) -> PrefixPattern:
    short: list[int] = []
    long: list[int] = []
    for number, run in enumerate(pattern.chain_runs):
        (short if len(run) <= LONGEST_SHORT_CHAIN else long).append(number)
    groups = mask_groups(pattern)
    return PrefixPattern(
        short_chains=_short(pattern, short, device) if short else None,
        long_chains=_long(pattern, long, device) if long else None,
        masks=_masks(pattern, groups, device) if groups else None,
    )


def mask_groups(pattern: RowPattern) -> list[range]:
    """Return the flat row numbers of each mask group, ascending."""
    groups: list[range] = []
    for run in sorted(pattern.mask_runs, key=lambda run: run.start):
        begin = run.start
        for row in run:
            if row + 1 == run.stop or pattern.group[row + 1] != pattern.group[row]:
                groups.append(range(begin, row + 1))
                begin = row + 1
    return groups


#           width
# [pad pad  c0 c1 c2]   a chain: the last row sees all written slots, each earlier row one slot less
# [M1  M2   pad]        a mask group: every row sees the prefix up to the base row
def _short(pattern: RowPattern, members: Sequence[int], device: torch.device) -> Block:
    runs = [pattern.chain_runs[number] for number in members]
    width = max(map(len, runs))
    rows = [[run.start] * (width - len(run)) + list(run) for run in runs]
    real = [[False] * (width - len(run)) + [True] * len(run) for run in runs]
    return _block(members, [len(run) for run in runs], rows, real, device)


def _masks(pattern: RowPattern, groups: Sequence[range], device: torch.device) -> Block:
    width = max(map(len, groups))
    rows = [[*group, *[group.start] * (width - len(group))] for group in groups]
    real = [[True] * len(group) + [False] * (width - len(group)) for group in groups]
    members = [int(pattern.owner[group.start]) for group in groups]
    return _block(members, [int(pattern.reach[group.start]) for group in groups], rows, real, device)


def _block(
    members: Sequence[int],
    reach: Sequence[int],
    rows: Sequence[Sequence[int]],
    real: Sequence[Sequence[bool]],
    device: torch.device,
) -> Block:
    flat = np.array(rows, dtype=np.int64).reshape(-1)
    places = np.flatnonzero(np.array(real).reshape(-1))
    in_place = bool((flat == np.arange(len(flat))).all())
    return Block(
        sequences=_to(members, device),
        reach=_to(reach, device, torch.int32),
        longest=max(reach),
        rows=None if in_place else _to(flat, device),
        width=len(rows[0]),
        places=_to(places, device),
        targets=_to(flat[places], device),
    )


def _long(pattern: RowPattern, members: Sequence[int], device: torch.device) -> Ragged:
    runs = [pattern.chain_runs[number] for number in members]
    lengths = [len(run) for run in runs]
    return Ragged(
        sequences=_to(members, device),
        reach=_to(lengths, device, torch.int32),
        rows=_to(np.concatenate([np.arange(run.start, run.stop) for run in runs]), device),
        bounds=_to(np.cumsum([0, *lengths]), device, torch.int32),
        widest=max(lengths),
    )


def _to(values: Ints | Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device=device, dtype=dtype)


WITHOUT_SINKS = "The model has attention sinks, which {library} does not compute here; use --attention triton."
"""Error of a library's backend."""

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

    `chain`: a row sees the chain rows of its sequence up to its reach, and a mask row its group up to itself. Otherwise
    mask rows see their group, chain rows no key (out 0, lse -inf). Keys and values that are not finite count as 0.
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
    Synchronises with the device."""
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
        found [n·width, H, D] and its lse [n·width, H] of the mask groups `runs`."""
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
        from space_kernels.attention import attention_triton

        return cls(attention_triton.store_kv, attention_triton.in_step_attention, attention_triton.merge)
