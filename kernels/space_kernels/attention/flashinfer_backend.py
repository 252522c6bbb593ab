"""Attention of a SPACE step by flashinfer: the library attends the pages, our kernels the masks of a group.

flashinfer takes our pages unchanged ([num_blocks, G, block_size, D] is its layout HND) and ragged runs of rows, and
packs the query heads of a kv head itself. Every sequence's chain is a causal run. Every mask group is a run that sees
the pages up to its base row; the result is merged with the attention among its masks by log-sum-exp (which the library
returns in base 2). Its custom masks are not used, because they cover the whole context of every row.

The library plans on the host: how it divides the rows over the device depends on the step's lengths. So the host must
know every length before it launches a step, cannot launch a step before it has read the last one, and must call
`FlashInfer.plan` with the step's rows before each replay of a CUDA graph. The split of the context depends on the
batch, so a row's last bits depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from space_kernels.attention.attention import QKV, AttentionSpec, KVPages, refuse_rare
from space_kernels.attention.library_parts import WITHOUT_SINKS, OwnPart, PrefixRows, mask_groups, natural
from space_kernels.paging.step_rows import Ints, RowPattern, StepRows

WORKSPACE_BYTES = 128 * 1024**2
"""Size of the workspace for partial results of splits, as the library recommends."""

Kind = Literal["chains", "masks"]


def space_attention(
    qkv: QKV,
    pages: KVPages,
    rows: StepRows,
    spec: AttentionSpec,
    *,
    library: FlashInfer,
    own: OwnPart | None = None,
    is_stored: bool = False,
) -> Tensor:
    """As `torch_backend.space_attention`, in float16 or bfloat16. Returns [R, H, D].

    `own`: our operations beside the library; None: those of the device. `is_stored`: the pages already hold the step's
    keys and values. Raises ValueError for a window no longer than a mask group.
    """
    refuse_rare(spec, "flashinfer")
    if spec.sinks is not None:
        raise ValueError(WITHOUT_SINKS.format(library="flashinfer"))
    query = qkv.query
    own = OwnPart.on(query.device) if own is None else own
    prefix = PrefixRows.of(rows)
    if not is_stored:
        own.store_kv(qkv, pages, prefix.tables)
    ask = FlashInferCall(query.shape[1], qkv.key.shape[1], query.shape[2], rows.block_size, query.dtype, spec)
    chain = rows.num_chain_rows
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    out[:chain], _ = library.run("chains", rows, ask, query[:chain], pages)
    runs = prefix.pattern.masks
    if runs is not None:
        found, lse = library.run("masks", rows, ask, runs.of(query).flatten(0, 1), pages)
        own.add_masks(out, runs, found, natural(lse), qkv, prefix.tables, spec)
    return out


@dataclass(frozen=True, slots=True)
class FlashInferCall:
    """The parameters of a plan besides the rows."""

    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    spec: AttentionSpec


@dataclass(slots=True)
class _Slot:
    """One wrapper of the library and the step that its current plan is for."""

    wrapper: Any
    step: object = None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of rows of one kind, on the host."""

    members: Ints  # [n] sequence of each run
    reach: Ints  # [n] slots from the sequence's first chain row on that the run's last row sees
    bounds: Ints  # [n+1] first row of each run
    width: int  # rows of the longest run

    @classmethod
    def of(cls, pattern: RowPattern, kind: Kind) -> _Runs | None:
        """Return a pattern's runs of one kind, or None if it has none."""
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
    """Return the mask groups, padded to one width as in `PrefixPattern.masks`: windows count from a run's end."""
    groups = mask_groups(pattern)
    if not groups:
        return None
    first = np.array([group.start for group in groups])
    width = max(map(len, groups))
    return _Runs(pattern.owner[first], pattern.reach[first], np.arange(len(groups) + 1) * width, width)


@dataclass(slots=True)
class FlashInfer:
    """flashinfer's paged prefill, with one wrapper per kind of layer and of rows.

    `graphs`: wrappers keep their plans at fixed addresses, one wrapper per number of runs, for CUDA graphs;
    `most_pages` is then the maximum total of pages over all runs of a step.
    """

    make_wrapper: Callable[..., Any]  # flashinfer.BatchPrefillWithPagedKVCacheWrapper
    workspace: Tensor  # [WORKSPACE_BYTES] uint8
    graphs: bool = False
    most_pages: int = 0
    _slots: dict[object, _Slot] = field(default_factory=dict)

    @classmethod
    def load(cls, device: torch.device, *, graphs: bool = False, most_pages: int = 0) -> FlashInfer:
        """Import the installed library and allocate its workspace. Raises ImportError."""
        module = import_module("flashinfer")
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(module.BatchPrefillWithPagedKVCacheWrapper, workspace, graphs, most_pages)

    def run(
        self, kind: Kind, rows: StepRows, ask: FlashInferCall, query: Tensor, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        """Attend, planning first if needed: query [rows of the kind, H, D] -> out like it, lse [rows, H] in base 2."""
        slot = self._planned(kind, rows, ask)
        out, lse = slot.wrapper.run(query, pages, return_lse=True)
        return out, lse

    def plan(self, rows: StepRows) -> None:
        """Plan a step for every kind of layer seen with this pattern; call it before replaying a CUDA graph."""
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
        if ask.spec.window is not None:
            window_left = ask.spec.window - 1
            if kind == "masks":
                # Mask j is j positions after the base row, the last slot that it sees.
                window_left -= runs.width
                if window_left < 0:
                    raise ValueError(
                        f"A window of {ask.spec.window} positions is not longer than a group of {runs.width} masks; "
                        "use --attention triton or fewer drafts (--speculation)."
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
            sm_scale=ask.spec.scale,
            window_left=window_left,
            logits_soft_cap=ask.spec.softcap or 0.0,
            q_data_type=ask.dtype,
            kv_data_type=ask.dtype,
        )


def _asked(pattern: RowPattern) -> set[tuple[Kind, FlashInferCall]]:
    """Return the plans that steps with this pattern need."""
    known: Any = pattern.parts.setdefault(FlashInfer, set())
    return known  # type: ignore[no-any-return]


def _host(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
