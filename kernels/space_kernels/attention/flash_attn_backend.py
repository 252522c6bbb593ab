"""Attention of a SPACE step by flash-attn 2 or 4: the library attends the prefix, our kernels the masks of a group.

How the rows are passed to the library:

    chains of at most 32 rows    one causal call, [S, width, H, D]. The library aligns query and key ends, so chain row
                                 i of a sequence sees its slots up to start + i. Shorter chains are padded in front.
    longer chains (prompts)      one causal ragged call over the same pages
    mask groups                  one call that is not causal, each group a run over its sequence's pages up to the base
                                 row. Without a window the query heads of a kv head are packed into the rows, so that a
                                 group's prefix is read once per kv head. The result is merged by log-sum-exp with the
                                 attention among the group's masks. Every mask sees at least its base row in the pages,
                                 so version 2's lse of +inf for "no key" never occurs.

So chain rows take the library's path for plain decoding and prefill, and only mask rows are merged. Our pages are
[num_blocks, G, block_size, D], the library's [num_blocks, block_size, G, D]. It takes any strides with a contiguous
last dimension (2.8.3: csrc/flash_attn/flash_api.cpp reads stride(0), stride(-3), stride(-2) and requires only
stride(-1) == 1), so a transposed view is passed without a copy.

The library chooses its splits of the context by the batch and returns 16-bit results, so a row's last bits depend on
the rest of the batch. `--exact` therefore needs another backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from space_kernels.attention.merge import OwnPart
from space_kernels.attention.prefix_rows import Block, PrefixRows, Reach
from space_kernels.paging.slots import StepRows

Window = tuple[int, int]
"""Positions a row sees before and after its own; -1: all."""

_ALL: Window = (-1, -1)


class FlashLibrary(Protocol):
    """The two calls of flash-attn that a step needs, for either version."""

    def equal(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        *,
        scale: float,
        causal: bool,
        window: Window,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend by runs of equal width: query [n, width, H, D], pages [num_blocks, block_size, G, D] -> out like
        query, lse [n, H, width] with natural logarithm."""
        ...

    def ragged(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        bounds: Tensor,
        widest: int,
        *,
        scale: float,
        window: Window,
        softcap: float,
    ) -> Tensor:
        """Attend causally by runs of any width: query [total, H, D], run i is rows bounds[i] .. bounds[i+1] -> out like
        query."""
        ...

    def check(self, block_size: int) -> None:
        """Raise ValueError if the library does not support this block size."""
        ...


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
    library: FlashLibrary,
    own: OwnPart | None = None,
    is_stored: bool = False,
) -> Tensor:
    """As `torch_backend.space_attention`, in float16 or bfloat16. Returns [R, H, D].

    `own`: our operations beside the library; None: those of the device. `is_stored`: the pages already hold the step's
    keys and values. Raises ValueError for an unsupported block size, and for a window no longer than a mask group.
    """
    library.check(key_pages.shape[2])
    own = OwnPart.on(query.device) if own is None else own
    prefix = PrefixRows.of(rows)
    if not is_stored:
        own.store_kv(key, value, key_pages, value_pages, prefix.tables)
    call = _Call(query, key_pages.transpose(1, 2), value_pages.transpose(1, 2), library, scale, softcap or 0.0)
    pattern = prefix.pattern
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if pattern.short_chains is not None and prefix.short_chains is not None:
        call.chains(out, pattern.short_chains, prefix.short_chains, window)
    if pattern.long_chains is not None and prefix.long_chains is not None:
        runs = pattern.long_chains
        found = library.ragged(
            query.index_select(0, runs.rows),
            call.key_pages,
            call.value_pages,
            prefix.long_chains,
            runs.bounds,
            runs.widest,
            scale=scale,
            window=_ALL if window is None else (window - 1, 0),
            softcap=call.softcap,
        )
        out.index_copy_(0, runs.rows, found)
    if pattern.masks is not None and prefix.masks is not None:
        masks = slice(rows.num_chain_rows, prefix.tables.pattern.num_rows)
        lse = query.new_full((len(query), query.shape[1]), -torch.inf, dtype=torch.float32)
        call.masks(out, lse, pattern.masks, prefix.masks, window)
        among, among_lse = own.in_step_attention(
            query, key, value, prefix.tables, scale=scale, softcap=softcap, window=window, chain=False
        )
        out[masks], _ = own.merge(out[masks], lse[masks], among[masks], among_lse[masks], out.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that all calls of one layer share."""

    query: Tensor  # [R, H, D]
    key_pages: Tensor  # [num_blocks, block_size, G, D]
    value_pages: Tensor
    library: FlashLibrary
    scale: float
    softcap: float

    def chains(self, out: Tensor, runs: Block, reach: Reach, window: int | None) -> None:
        """Write the outputs of decoding sequences' chain rows to `out`."""
        found, _ = self._equal(runs.of(self.query), reach, True, _ALL if window is None else (window - 1, 0))
        runs.put(out, found.flatten(0, 1))

    def masks(self, out: Tensor, lse: Tensor, runs: Block, reach: Reach, window: int | None) -> None:
        """Write the mask rows' attention over the pages to `out`, and its log-sum-exp to `lse` [R, H]."""
        query = runs.of(self.query)  # [n, width, H, D]
        num_runs, width, _, head_dim = query.shape
        if window is None:
            kv_heads = self.key_pages.shape[2]
            packed = query.view(num_runs, width, kv_heads, -1, head_dim).transpose(2, 3)  # [n, width, Q, G, D]
            found, found_lse = self._equal(packed.reshape(num_runs, -1, kv_heads, head_dim), reach, False, _ALL)
            found = found.view(packed.shape).transpose(2, 3).reshape(query.shape)
            found_lse = found_lse.view(num_runs, kv_heads, width, -1).permute(0, 2, 1, 3).reshape(num_runs, width, -1)
        else:
            # Mask j is j positions after the base row, the last slot it sees. The library aligns the ends of queries
            # and keys, so it places each mask `width` positions too early.
            if window <= width:
                raise ValueError(
                    f"A window of {window} positions is not longer than a group of {width} masks; use --attention "
                    "triton or fewer drafts (--speculation)."
                )
            found, found_lse = self._equal(query, reach, False, (window - 1 - width, width - 1))
            found_lse = found_lse.transpose(1, 2)
        runs.put(out, found.flatten(0, 1))
        runs.put(lse, found_lse.flatten(0, 1))

    def _equal(self, query: Tensor, reach: Reach, causal: bool, window: Window) -> tuple[Tensor, Tensor]:
        return self.library.equal(
            query,
            self.key_pages,
            self.value_pages,
            reach,
            scale=self.scale,
            causal=causal,
            window=window,
            softcap=self.softcap,
        )


# ------------------------------------------------------------------------------------------------- the two versions

PAGE_2 = 256
"""Block sizes must be a multiple of this: 2.8.3 refuses others ("Paged KV cache block size must be divisible by 256"),
so that a tile of keys never crosses a page."""


@dataclass(frozen=True, slots=True)
class FlashAttn2:
    """flash-attn 2.8, compiled for compute capability 8.0 (also runs on 8.6 and 8.9) and 9.0."""

    with_kvcache: Callable[..., Any]  # flash_attn.flash_attn_with_kvcache
    varlen: Callable[..., Any]  # flash_attn.flash_attn_varlen_func

    @classmethod
    def load(cls) -> FlashAttn2:
        """Import the installed library. Raises ImportError."""
        module = import_module("flash_attn")
        return cls(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)

    def check(self, block_size: int) -> None:
        """Implement FlashLibrary."""
        if block_size % PAGE_2:
            raise ValueError(
                f"flash-attn 2 takes pages of a multiple of {PAGE_2} slots; these have {block_size}. Use --block-size "
                f"{PAGE_2}, or --attention triton."
            )

    def equal(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        *,
        scale: float,
        causal: bool,
        window: Window,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """Implement FlashLibrary. The library splits long contexts over the device."""
        out, lse = self.with_kvcache(
            query,
            key_pages,
            value_pages,
            cache_seqlens=reach.lengths,
            block_table=reach.pages,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            return_softmax_lse=True,
        )
        return out, lse

    def ragged(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        bounds: Tensor,
        widest: int,
        *,
        scale: float,
        window: Window,
        softcap: float,
    ) -> Tensor:
        """Implement FlashLibrary. The library takes cumulative lengths although the keys are paged."""
        ends = torch.nn.functional.pad(reach.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        out: Tensor = self.varlen(
            query,
            key_pages,
            value_pages,
            cu_seqlens_q=bounds,
            cu_seqlens_k=ends,
            max_seqlen_q=widest,
            max_seqlen_k=reach.pages.shape[1] * key_pages.shape[1],
            softmax_scale=scale,
            causal=True,
            window_size=window,
            softcap=softcap,
            block_table=reach.pages,
        )
        return out


@dataclass(frozen=True, slots=True)
class FlashAttn4:
    """flash-attn-4, a pre-release that compiles at run time, with one function for both calls.

    It supports any block size, but no paged KV cache on compute capability 8.x and 12.x. If a page is as long as its
    tile of keys, it reads whole pages, so unwritten slots must be finite: `PagedKV.allocate` fills them with zeros. It
    splits the context only on 10.x and 11.x; on 9.0 a single long sequence uses few multiprocessors.
    """

    varlen: Callable[..., Any]  # flash_attn.cute.flash_attn_varlen_func
    splits: int  # 0: the library chooses; 1: the context is never split

    @classmethod
    def load(cls) -> FlashAttn4:
        """Import the installed library. Raises ImportError."""
        major, _ = torch.cuda.get_device_capability()
        return cls(import_module("flash_attn.cute").flash_attn_varlen_func, 0 if major in (10, 11) else 1)

    def check(self, block_size: int) -> None:
        """Implement FlashLibrary: every block size is supported."""

    def equal(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        *,
        scale: float,
        causal: bool,
        window: Window,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """As FlashLibrary says."""
        out, lse = self.varlen(
            query,
            key_pages,
            value_pages,
            seqused_k=reach.lengths,
            page_table=reach.pages,
            softmax_scale=scale,
            causal=causal,
            window_size=_or_none(window),
            softcap=softcap,
            num_splits=self.splits,
            return_lse=True,
        )
        return out, lse

    def ragged(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        reach: Reach,
        bounds: Tensor,
        widest: int,
        *,
        scale: float,
        window: Window,
        softcap: float,
    ) -> Tensor:
        """As FlashLibrary says."""
        out, _ = self.varlen(
            query,
            key_pages,
            value_pages,
            cu_seqlens_q=bounds,
            max_seqlen_q=widest,
            seqused_k=reach.lengths,
            page_table=reach.pages,
            softmax_scale=scale,
            causal=True,
            window_size=_or_none(window),
            softcap=softcap,
            num_splits=self.splits,
            return_lse=True,
        )
        return out  # type: ignore[no-any-return]


def _or_none(window: Window) -> tuple[int | None, int | None]:
    """Convert -1 (no bound) to None, as version 4 expects."""
    back, ahead = window
    return None if back < 0 else back, None if ahead < 0 else ahead
