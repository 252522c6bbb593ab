"""Attention of a SPACE step by flash-attn, version 2 or 4: the prefix by the library, masks among each other by ours.

How the rows go through the library:

    chains of at most 32 rows    one call, [S, width, H, D], causal: the library aligns query and key ends, so chain
                                 row i of a sequence sees its slots up to start + i. Shorter chains are padded in front.
    longer chains (prompts)      one ragged call over the same pages, causal likewise
    mask groups                  one call, each group a run of its own over its sequence's pages up to the base row, not
                                 causal. Without a window the query heads of a kv head are packed into the rows, so that
                                 a group's prefix is read once per kv head. Its result and what a mask finds among the
                                 masks of its group are joined by log-sum-exp; every mask
                                 sees at least its base row there, so version 2's +inf for "nothing" never comes in.

So chain rows take the library's path for plain decoding and prefill, and only mask rows are merged. The pages are
[num_blocks, G, block_size, D] and the library wants [num_blocks, block_size, G, D]: it takes any strides as long as the
last dimension is contiguous (2.8.3: csrc/flash_attn/flash_api.cpp reads stride(0), stride(-3), stride(-2) and asks only
stride(-1) == 1), so the transposed view is passed and nothing is copied.

The library splits the context by a rule that looks at the batch, and returns its dtype: a row's last bits depend on its
company. `--exact` therefore takes another backend.
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
"""Positions a row looks back and ahead of its own; -1: all of them."""

_ALL: Window = (-1, -1)


class FlashLibrary(Protocol):
    """The two calls that a step needs of one version of the library."""

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
        """query [n, width, H, D], pages [num_blocks, block_size, G, D] -> out like query, lse [n, H, width] natural."""
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
        """query [total, H, D], run i of it rows bounds[i] up to bounds[i+1], causal -> out like query."""
        ...

    def check(self, block_size: int) -> None:
        """Raise ValueError where pages of this size cannot be taken."""
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
    """As `space_kernels.attention.torch_backend.space_attention`, in float16 or bfloat16. Returns [R, H, D].

    `own`: what is ours; None: as the device has it. `is_stored`: the pages hold the step's keys and values already.
    Raises ValueError for blocks the library does not take, and for a
    window shorter than a mask group.
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
    """What all calls of one layer have in common."""

    query: Tensor  # [R, H, D]
    key_pages: Tensor  # [num_blocks, block_size, G, D]
    value_pages: Tensor
    library: FlashLibrary
    scale: float
    softcap: float

    def chains(self, out: Tensor, runs: Block, reach: Reach, window: int | None) -> None:
        """Fill in the chain rows of the decoding sequences."""
        found, _ = self._equal(runs.of(self.query), reach, True, _ALL if window is None else (window - 1, 0))
        runs.put(out, found.flatten(0, 1))

    def masks(self, out: Tensor, lse: Tensor, runs: Block, reach: Reach, window: int | None) -> None:
        """Fill in what mask rows find in the pages, and its log-sum-exp [R, H]."""
        query = runs.of(self.query)  # [n, width, H, D]
        num_runs, width, _, head_dim = query.shape
        if window is None:
            kv_heads = self.key_pages.shape[2]
            packed = query.view(num_runs, width, kv_heads, -1, head_dim).transpose(2, 3)  # [n, width, Q, G, D]
            found, found_lse = self._equal(packed.reshape(num_runs, -1, kv_heads, head_dim), reach, False, _ALL)
            found = found.view(packed.shape).transpose(2, 3).reshape(query.shape)
            found_lse = found_lse.view(num_runs, kv_heads, width, -1).permute(0, 2, 1, 3).reshape(num_runs, width, -1)
        else:
            # Mask j stands j positions behind the base row, which is the last slot that it sees: by the library's
            # count, which aligns the ends of queries and keys, `width` positions before its own.
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
"""What a page size must be a multiple of: 2.8.3 refuses others ("Paged KV cache block size must be divisible by 256");
a tile of keys then never crosses a page."""


@dataclass(frozen=True, slots=True)
class FlashAttn2:
    """flash-attn 2.8: compiled for 8.0 and 9.0 (the former's code also runs on 8.6 and 8.9)."""

    with_kvcache: Callable[..., Any]  # flash_attn.flash_attn_with_kvcache
    varlen: Callable[..., Any]  # flash_attn.flash_attn_varlen_func

    @classmethod
    def load(cls) -> FlashAttn2:
        """The installed one. Raises ImportError where there is none."""
        module = import_module("flash_attn")
        return cls(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)

    def check(self, block_size: int) -> None:
        """As FlashLibrary says."""
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
        """As FlashLibrary says; splits long contexts over the device by itself."""
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
        """As FlashLibrary says; lengths go in as sums from the first run on, though the keys lie in pages."""
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
    """flash-attn-4, a pre-release that compiles at run time: one function for both calls.

    Pages of any size, but neither on 8.x nor on 12.x; where a page is as long as its tile of keys it reads whole pages,
    so what lies in unwritten slots must be finite: `PagedKV.allocate` fills them with zeros. It splits the context on
    10.x and 11.x only: on 9.0 a single long sequence is read by few processors.
    """

    varlen: Callable[..., Any]  # flash_attn.cute.flash_attn_varlen_func
    splits: int  # 0: as the library sees fit; 1: the context is never split

    @classmethod
    def load(cls) -> FlashAttn4:
        """The installed one. Raises ImportError where there is none."""
        major, _ = torch.cuda.get_device_capability()
        return cls(import_module("flash_attn.cute").flash_attn_varlen_func, 0 if major in (10, 11) else 1)

    def check(self, block_size: int) -> None:
        """As FlashLibrary says: all are taken."""

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
    """Version 4 writes None for no bound."""
    back, ahead = window
    return None if back < 0 else back, None if ahead < 0 else ahead
