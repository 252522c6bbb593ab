"""Attention of a SPACE step by flashinfer: chains and mask groups over the pages by the library, masks among each other
by ours.

flashinfer takes our pages as they are ([num_blocks, G, block_size, D] is its layout HND), ragged runs of rows, and
packs the query heads of a kv head by itself. Every sequence's chain is a causal run; every mask group is a run of its
own that sees the pages up to its base row, and is joined with what its masks find among each other by log-sum-exp
(which the library returns in base 2). Its custom masks are not used: they cover the whole context of every row.

The library plans on the host: how rows are shared out over the device depends on the lengths of this step. So the host
must know every length before a step is launched, and before each replay of a CUDA graph `FlashInfer.plan` must be
called with the step's rows; a step cannot be launched while the host has not read the one before. Its split of the
context depends on the batch: a row's last bits depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from space_kernels.attention.merge import OwnPart, natural
from space_kernels.attention.prefix_rows import PrefixRows, mask_groups
from space_kernels.paging.row_pattern import Ints, RowPattern
from space_kernels.paging.slots import StepRows

WORKSPACE_BYTES = 128 * 1024**2
"""For partial results where the context is split: the size that the library recommends."""

Kind = Literal["chains", "masks"]


def space_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: StepRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    library: FlashInfer,
    own: OwnPart | None = None,
    is_stored: bool = False,
) -> Tensor:
    """As `space_kernels.attention.torch_backend.space_attention`, in float16 or bfloat16. Returns [R, H, D].

    `own`: what is ours; None: as the device has it. `is_stored`: the pages hold the step's keys and values already.
    Raises ValueError for a window shorter than a mask group.
    """
    own = OwnPart.on(query.device) if own is None else own
    prefix = PrefixRows.of(rows)
    if not is_stored:
        own.store_kv(key, value, key_pages, value_pages, prefix.tables)
    ask = FlashInferCall(
        query.shape[1], key.shape[1], query.shape[2], rows.block_size, query.dtype, scale, window, softcap or 0.0
    )
    pages = key_pages, value_pages
    chain, num_rows = rows.num_chain_rows, prefix.tables.pattern.num_rows
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    out[:chain], _ = library.run("chains", rows, ask, query[:chain], pages)
    runs = prefix.pattern.masks
    if runs is not None:
        found, found_lse = library.run("masks", rows, ask, runs.of(query).flatten(0, 1), pages)
        lse = query.new_full((len(query), query.shape[1]), -torch.inf, dtype=torch.float32)
        runs.put(out, found)
        runs.put(lse, natural(found_lse))
        among, among_lse = own.in_step_attention(
            query, key, value, prefix.tables, scale=scale, softcap=softcap, window=window, chain=False
        )
        masks = slice(chain, num_rows)
        out[masks], _ = own.merge(out[masks], lse[masks], among[masks], among_lse[masks], out.dtype)
    return out


@dataclass(frozen=True, slots=True)
class FlashInferCall:
    """What a plan depends on besides the rows."""

    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float


@dataclass(slots=True)
class _Slot:
    """One wrapper of the library, and the step that it is planned for."""

    wrapper: Any
    step: object = None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of rows of one kind, on the host."""

    members: Ints  # [n] sequence
    reach: Ints  # [n] slots from its first chain row on that the last row of the run sees
    bounds: Ints  # [n+1] where each run's rows begin
    width: int  # rows of the longest

    @classmethod
    def of(cls, pattern: RowPattern, kind: Kind) -> _Runs | None:
        """Those of a pattern; None where it has none of the kind."""
        name = (cls, kind)
        if name not in pattern.parts:
            pattern.parts[name] = _chains(pattern) if kind == "chains" else _masks(pattern)
        known = pattern.parts[name]
        return known if isinstance(known, _Runs) else None


def _chains(pattern: RowPattern) -> _Runs:
    first, lengths = pattern.chains
    order = np.argsort(first, kind="stable")
    return _Runs(order, lengths[order], np.cumsum([0, *lengths[order]]), int(lengths.max()))


def _masks(pattern: RowPattern) -> _Runs | None:
    """Padded to one width, as `PrefixPattern.masks` packs them: a window is counted from the end of the run."""
    groups = mask_groups(pattern)
    if not groups:
        return None
    first = np.array([group.start for group in groups])
    width = max(map(len, groups))
    return _Runs(pattern.owner[first], pattern.reach[first], np.arange(len(groups) + 1) * width, width)


@dataclass(slots=True)
class FlashInfer:
    """flashinfer's paged prefill, with a wrapper for each kind of layer and of rows.

    `graphs`: the wrappers keep their plan at fixed addresses, one per number of runs, for steps captured in CUDA
    graphs; `most_pages` is then the most pages that all runs of a step hold together.
    """

    make_wrapper: Callable[..., Any]  # flashinfer.BatchPrefillWithPagedKVCacheWrapper
    workspace: Tensor  # [WORKSPACE_BYTES] uint8
    graphs: bool = False
    most_pages: int = 0
    _slots: dict[object, _Slot] = field(default_factory=dict)

    @classmethod
    def load(cls, device: torch.device, *, graphs: bool = False, most_pages: int = 0) -> FlashInfer:
        """The installed one. Raises ImportError where there is none."""
        module = import_module("flashinfer")
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(module.BatchPrefillWithPagedKVCacheWrapper, workspace, graphs, most_pages)

    def run(
        self, kind: Kind, rows: StepRows, ask: FlashInferCall, query: Tensor, pages: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """query [rows of the kind, H, D] -> out like it, lse [rows, H] in base 2. Plans where that is not done yet."""
        slot = self._planned(kind, rows, ask)
        out, lse = slot.wrapper.run(query, pages, return_lse=True)
        return out, lse

    def plan(self, rows: StepRows) -> None:
        """Plan a step for every kind of layer that steps with this pattern have had: before a graph is replayed."""
        for kind, ask in _asked(rows.pattern):
            self._planned(kind, rows, ask)

    def _planned(self, kind: Kind, rows: StepRows, ask: FlashInferCall) -> _Slot:
        runs = _Runs.of(rows.pattern, kind)
        if runs is None:
            raise ValueError(f"This step has no {kind}.")
        _asked(rows.pattern).add((kind, ask))
        name = (kind, ask, len(runs.members) if self.graphs else None)
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = _Slot(self._wrapper(len(runs.members)))
        step = rows.parts.setdefault(FlashInfer, object())
        if slot.step is not step:
            self._plan(slot.wrapper, kind, rows, ask, runs)
            slot.step = step
        return slot

    def _wrapper(self, num_runs: int) -> Any:
        if not self.graphs:
            return self.make_wrapper(self.workspace, "HND")

        def kept(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.workspace.device)

        return self.make_wrapper(
            self.workspace,
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=kept(num_runs + 1),
            paged_kv_indptr_buf=kept(num_runs + 1),
            paged_kv_indices_buf=kept(self.most_pages),
            paged_kv_last_page_len_buf=kept(num_runs),
        )

    def _plan(self, wrapper: Any, kind: Kind, rows: StepRows, ask: FlashInferCall, runs: _Runs) -> None:
        size = rows.block_size
        lengths = rows.starts[runs.members] + runs.reach
        counts = -(-lengths // size)
        table = rows.page_table[runs.members]
        held = table[np.arange(table.shape[1]) < counts[:, None]]  # run by run, its pages in order
        window_left = -1
        if ask.window is not None:
            window_left = ask.window - 1
            if kind == "masks":
                # Mask j stands j positions behind the base row, the last slot that it sees.
                window_left -= runs.width
                if window_left < 0:
                    raise ValueError(
                        f"A window of {ask.window} positions is not longer than a group of {runs.width} masks; use "
                        "--attention triton or fewer drafts (--speculation)."
                    )
        wrapper.plan(
            _host(runs.bounds),
            _host(np.cumsum([0, *counts])),
            _host(held),
            _host(lengths - (counts - 1) * size),
            ask.num_heads,
            ask.kv_heads,
            ask.head_dim,
            size,
            causal=kind == "chains",
            sm_scale=ask.scale,
            window_left=window_left,
            logits_soft_cap=ask.softcap,
            q_data_type=ask.dtype,
            kv_data_type=ask.dtype,
        )


def _asked(pattern: RowPattern) -> set[tuple[Kind, FlashInferCall]]:
    """Which plans steps with this pattern need."""
    known: Any = pattern.parts.setdefault(FlashInfer, set())
    return known  # type: ignore[no-any-return]


def _host(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
