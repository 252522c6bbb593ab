"""Compiled attention of a SPACE step, for bfloat16 pages on a CPU."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.attention.torch_backend import space_attention
from space_kernels.build.cpu_library import AttentionStruct, CpuLibrary, HeadsStruct, RowsStruct
from space_kernels.paging.step_rows import Ints, RowPattern, StepRows

MOST_TOGETHER = 32
"""Maximum rows of one sequence that are processed together."""

WIDEST_HEAD = 1024


@dataclass(frozen=True, eq=False)
class RowTiles:
    """A row pattern as the compiled operation takes it: the groups of masks, and tiles of rows processed together."""

    peers: Ints  # [rows] first row of a mask's group, -1 for chain rows
    rows: Ints  # flat row numbers, tile after tile
    bounds: Ints  # [tiles + 1] where each tile starts in `rows`
    addresses: tuple[int, ...]  # of owner, offsets, reach and these three arrays; the pattern keeps them alive

    @classmethod
    def of(cls, pattern: RowPattern) -> RowTiles:
        """Return the pattern's tiles, built on first use."""
        known = pattern.parts.get("cpu")
        if not isinstance(known, cls):
            known = pattern.parts["cpu"] = _tiles(pattern)
        return known


def _tiles(pattern: RowPattern) -> RowTiles:
    tiles: list[list[int]] = []
    for chain, masks in zip(pattern.chain_runs, pattern.mask_runs, strict=True):
        members = [*chain, *masks]
        tiles += [members[begin : begin + MOST_TOGETHER] for begin in range(0, len(members), MOST_TOGETHER)]
    first: dict[int, int] = {}
    for row, group in enumerate(pattern.group.tolist()):
        first.setdefault(group, row)
    first[-1] = -1
    peers = np.array([first[group] for group in pattern.group.tolist()], dtype=np.int64)
    rows = np.array([row for tile in tiles for row in tile], dtype=np.int64)
    bounds = np.cumsum([0, *map(len, tiles)], dtype=np.int64)
    arrays = pattern.owner, pattern.offsets, pattern.reach, peers, rows, bounds
    return RowTiles(peers, rows, bounds, tuple(array.ctypes.data for array in arrays))


@dataclass(frozen=True, eq=False, slots=True)
class CpuRows:
    """The rows of one step as the compiled operations take them. Built once, shared by all layers."""

    struct: RowsStruct
    held: tuple[RowTiles, Ints, Ints]  # keeps the arrays alive that `struct` points to

    @classmethod
    def of(cls, rows: StepRows) -> CpuRows:
        """Return the step's rows, built on first use."""
        known = rows.parts.get("cpu")
        if not isinstance(known, cls):
            known = rows.parts["cpu"] = _rows(rows)
        return known


def _rows(rows: StepRows) -> CpuRows:
    table = np.ascontiguousarray(rows.page_table)
    starts = np.ascontiguousarray(rows.starts, dtype=np.int64)
    # numpy's own way to an address takes longer
    addresses = torch.from_numpy(starts).data_ptr(), torch.from_numpy(table).data_ptr()
    struct = rows_struct(rows.pattern, *addresses, table.shape[1])
    return CpuRows(struct, (RowTiles.of(rows.pattern), starts, table))


def rows_struct(pattern: RowPattern, starts: int, pages: int, most_pages: int) -> RowsStruct:
    """Return the C struct of a step's rows, which keeps nothing alive. `starts`, `pages`: addresses of [S] int64 and
    [S, most_pages] int64."""
    tiles = RowTiles.of(pattern)
    owner, offsets, reach, peers, members, bounds = tiles.addresses
    return RowsStruct(
        len(pattern.offsets),
        owner,
        offsets,
        reach,
        peers,
        starts,
        pages,
        most_pages,
        pattern.num_chain_rows,
        len(tiles.bounds) - 1,
        members,
        bounds,
    )


class CompiledAttention:
    """Compiled `torch_backend.space_attention`; falls back to the reference for unsupported dtypes and head sizes.
    The choice depends on the model's dtype and heads alone, so all its rows are computed the same way."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    def __call__(self, qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec) -> Tensor:
        """Return [R, H, E]; padding rows are 0."""
        num_rows, num_heads, dim = qkv.query.shape
        kv_heads, value_dim = pages.keys.shape[1], qkv.value.shape[2]
        if not (attends(pages.keys.dtype, dim) and attends(pages.keys.dtype, value_dim)):
            return space_attention(qkv, pages, rows, spec)
        query, key = qkv.query.contiguous(), qkv.key.contiguous()
        value = key if spec.is_latent else qkv.value.contiguous()
        out = query.new_zeros(num_rows, num_heads, value_dim)
        heads = HeadsStruct(num_heads, kv_heads, dim, value_dim)
        slopes = None if spec.alibi is None else spec.alibi.on(query.device)
        attention = AttentionStruct(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            num_heads * dim,
            kv_heads * dim,
            kv_heads * value.shape[2],
            pages.keys.data_ptr(),
            (pages.keys if spec.is_latent else pages.values).data_ptr(),
            pages.keys.shape[2],
            out.data_ptr(),
            spec.scale,
            spec.softcap or 0.0,
            spec.window or 0,
            None if slopes is None else slopes.data_ptr(),
            1.0 if spec.alibi is None else spec.alibi.factor,
            0 if spec.alibi is None else spec.alibi.form,
            None if spec.sinks is None else spec.sinks.data_ptr(),
            spec.chunk or 0,
        )
        those, threads = byref(CpuRows.of(rows).struct), torch.get_num_threads()
        self._library.store(those, byref(heads), byref(attention), None, None, 0.0, None, None, threads)
        self._library.attend(those, byref(heads), byref(attention), threads)
        return out


def attends(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the compiled operation supports this dtype and head size."""
    return dtype == torch.bfloat16 and head_dim % 16 == 0 and head_dim <= WIDEST_HEAD
