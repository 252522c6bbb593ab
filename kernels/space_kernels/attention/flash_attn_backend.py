"""Attention of a SPACE step by flash-attn 2, 3 or 4: the library attends the prefix, our kernels the masks of a group.

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

from space_kernels.attention.attention import QKV, AttentionSpec, KVPages, refuse_rare
from space_kernels.attention.library_parts import WITHOUT_SINKS, OwnPart, PrefixRows, Ragged, Reach
from space_kernels.paging.step_rows import StepRows

Window = tuple[int, int]
"""Positions a row sees before and after its own; -1: all."""

_ALL: Window = (-1, -1)


@dataclass(frozen=True, slots=True)
class FlashSpec:
    """How a call attends. The library aligns the ends of a run's queries and keys."""

    scale: float
    softcap: float  # 0: none
    causal: bool
    window: Window

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords that all versions have."""
        return {"softmax_scale": self.scale, "softcap": self.softcap, "causal": self.causal}


class FlashLibrary(Protocol):
    """The two calls of flash-attn that a step needs, for any version. Pages are [num_blocks, block_size, G, D]."""

    def equal(self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec) -> tuple[Tensor, Tensor]:
        """Attend by runs of equal width: query [n, width, H, D] -> out like query, lse [n, H, width] with natural
        logarithm."""

    def ragged(self, query: Tensor, pages: KVPages, reach: Reach, runs: Ragged, spec: FlashSpec) -> Tensor:
        """Attend by runs of any width: query [total, H, D] -> out like query."""

    def check(self, block_size: int) -> None:
        """Raise ValueError if the library does not support this block size."""


def space_attention(
    qkv: QKV,
    pages: KVPages,
    rows: StepRows,
    spec: AttentionSpec,
    *,
    library: FlashLibrary,
    own: OwnPart | None = None,
    is_stored: bool = False,
) -> Tensor:
    """As `torch_backend.space_attention`, in float16 or bfloat16. Returns [R, H, D].

    `own`: our operations beside the library; None: those of the device. `is_stored`: the pages already hold the step's
    keys and values. Raises ValueError for an unsupported block size, and for a window no longer than a mask group.
    """
    refuse_rare(spec, "flash-attn")
    if spec.sinks is not None:
        raise ValueError(WITHOUT_SINKS.format(library="flash-attn"))
    query = qkv.query
    library.check(pages.keys.shape[2])
    own = OwnPart.on(query.device) if own is None else own
    prefix = PrefixRows.of(rows)
    if not is_stored:
        own.store_kv(qkv, pages, prefix.tables)
    slots_first = KVPages(pages.keys.transpose(1, 2), pages.values.transpose(1, 2))
    causal = FlashSpec(
        spec.scale, spec.softcap or 0.0, causal=True, window=_ALL if spec.window is None else (spec.window - 1, 0)
    )
    pattern = prefix.pattern
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if (short := pattern.short_chains) is not None and prefix.short_chains is not None:
        found, _ = library.equal(short.of(query), slots_first, prefix.short_chains, causal)
        short.put(out, found.flatten(0, 1))
    if (long := pattern.long_chains) is not None and prefix.long_chains is not None:
        found = library.ragged(query.index_select(0, long.rows), slots_first, prefix.long_chains, long, causal)
        out.index_copy_(0, long.rows, found)
    if pattern.masks is not None and prefix.masks is not None:
        found, lse = _attend_masks(library, pattern.masks.of(query), slots_first, prefix.masks, spec)
        own.add_masks(out, pattern.masks, found.flatten(0, 1), lse.flatten(0, 1), qkv, prefix.tables, spec)
    return out


def _attend_masks(
    library: FlashLibrary, query: Tensor, pages: KVPages, reach: Reach, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return the mask rows' attention over the pages, like query [n, width, H, D], and its lse [n, width, H]."""
    num_runs, width, _, head_dim = query.shape
    scale, softcap = spec.scale, spec.softcap or 0.0
    if spec.window is None:
        kv_heads = pages.keys.shape[2]
        packed = query.view(num_runs, width, kv_heads, -1, head_dim).transpose(2, 3)  # [n, width, Q, G, D]
        whole = FlashSpec(scale, softcap, causal=False, window=_ALL)
        found, lse = library.equal(packed.reshape(num_runs, -1, kv_heads, head_dim), pages, reach, whole)
        lse = lse.view(num_runs, kv_heads, width, -1).permute(0, 2, 1, 3).reshape(num_runs, width, -1)
        return found.view(packed.shape).transpose(2, 3).reshape(query.shape), lse
    # Mask j is j positions after the base row, the last slot it sees. The library aligns the ends of queries and keys,
    # so it places each mask `width` positions too early.
    if spec.window <= width:
        raise ValueError(
            f"A window of {spec.window} positions is not longer than a group of {width} masks; use --attention triton "
            "or fewer drafts (--speculation)."
        )
    shifted = FlashSpec(scale, softcap, causal=False, window=(spec.window - 1 - width, width - 1))
    found, lse = library.equal(query, pages, reach, shifted)
    return found, lse.transpose(1, 2)


# ------------------------------------------------------------------------------------------------- the versions

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

    def equal(self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec) -> tuple[Tensor, Tensor]:
        """Implement FlashLibrary. The library splits long contexts over the device."""
        seen: dict[str, Any] = {"cache_seqlens": reach.lengths, "block_table": reach.pages, "window_size": spec.window}
        out, lse = self.with_kvcache(query, *pages, **seen, **spec.keywords, return_softmax_lse=True)
        return out, lse

    def ragged(self, query: Tensor, pages: KVPages, reach: Reach, runs: Ragged, spec: FlashSpec) -> Tensor:
        """Implement FlashLibrary. The library takes cumulative lengths although the keys are paged."""
        out: Tensor = self.varlen(
            query,
            *pages,
            cu_seqlens_q=runs.bounds,
            cu_seqlens_k=torch.nn.functional.pad(reach.lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=runs.widest,
            max_seqlen_k=reach.pages.shape[1] * pages.keys.shape[1],
            block_table=reach.pages,
            window_size=spec.window,
            **spec.keywords,
        )
        return out


@dataclass(frozen=True, slots=True)
class FlashAttn3:
    """flash-attn 3, for Hopper: its own package, or the copy that vLLM's wheel brings along. Any block size.

    Before its kernel the library plans on the device how to split each context. That plan depends on the step alone, so
    it is made once per step and shared by all layers; in a captured graph it is part of the graph.
    """

    call: Callable[..., Any]  # flash_attn_with_kvcache, or vLLM's flash_attn_varlen_func: see `_of_vllm`
    plan: Callable[..., Any]  # get_scheduler_metadata

    @classmethod
    def load(cls) -> FlashAttn3:
        """Import the package, or else vLLM's copy. Raises ImportError."""
        try:
            module = import_module("flash_attn_interface")
        except ModuleNotFoundError:
            return cls.of_vllm(import_module("vllm.vllm_flash_attn.flash_attn_interface"))
        return cls(module.flash_attn_with_kvcache, module.get_scheduler_metadata)

    @classmethod
    def of_vllm(cls, module: Any) -> FlashAttn3:
        """Adapt vLLM's copy: it has one function for paged keys, with other argument names. Raises ImportError if its
        build lacks version 3."""
        if not module.FA3_AVAILABLE:
            raise ImportError(f"vLLM's wheel lacks flash-attn 3: {module.FA3_UNAVAILABLE_REASON}")

        def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> Any:
            for name, theirs in (("cache_seqlens", "seqused_k"), ("page_table", "block_table")):
                keywords[theirs] = keywords.pop(name)
            longest = keywords["block_table"].shape[1] * k_cache.shape[1]
            return module.flash_attn_varlen_func(q, k_cache, v_cache, max_seqlen_k=longest, fa_version=3, **keywords)

        return cls(call, module.get_scheduler_metadata)

    def check(self, block_size: int) -> None:
        """Implement FlashLibrary: every block size is supported."""

    def equal(self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec) -> tuple[Tensor, Tensor]:
        """Implement FlashLibrary."""
        num_runs, width, num_heads, _ = query.shape
        bounds = reach.plans.get(width)
        if bounds is None:
            bounds = torch.arange(0, num_runs * width + 1, width, dtype=torch.int32, device=query.device)
            reach.plans[width] = bounds
        out, lse = self._attend(query.flatten(0, 1), pages, reach, spec, bounds, width)
        return out.view(query.shape), lse.view(num_heads, num_runs, width).transpose(0, 1)

    def ragged(self, query: Tensor, pages: KVPages, reach: Reach, runs: Ragged, spec: FlashSpec) -> Tensor:
        """Implement FlashLibrary."""
        return self._attend(query, pages, reach, spec, runs.bounds, runs.widest)[0]

    def _attend(
        self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec, bounds: Tensor, widest: int
    ) -> tuple[Tensor, Tensor]:
        num_heads, kv_heads, num_runs = query.shape[1], pages.keys.shape[2], len(bounds) - 1
        splits = max(1, min(MOST_SPLITS_3, PROGRAMS_3 // (num_runs * kv_heads)))
        key = (num_heads, kv_heads, query.shape[2], query.dtype, widest, spec.causal, spec.window, spec.softcap > 0)
        plan = reach.plans.get(key)
        if plan is None:
            plan = reach.plans[key] = self.plan(
                batch_size=num_runs,
                max_seqlen_q=widest,
                max_seqlen_k=reach.pages.shape[1] * pages.keys.shape[1],
                num_heads_q=num_heads,
                num_heads_kv=kv_heads,
                headdim=query.shape[2],
                cache_seqlens=reach.lengths,
                qkv_dtype=query.dtype,
                cu_seqlens_q=bounds,
                page_size=pages.keys.shape[1],
                causal=spec.causal,
                window_size=spec.window,
                has_softcap=spec.softcap > 0,
                num_splits=splits,
            )
        found = self.call(
            query,
            *pages,
            cache_seqlens=reach.lengths,
            page_table=reach.pages,
            cu_seqlens_q=bounds,
            max_seqlen_q=widest,
            window_size=spec.window,
            **spec.keywords,
            scheduler_metadata=plan,
            num_splits=splits,
            return_softmax_lse=True,
        )
        return found[0], found[1]  # the package returns more


MOST_SPLITS_3 = 32
"""Most splits of one context."""

PROGRAMS_3 = 264
"""Splits of all contexts and kv heads together, about two per multiprocessor of a Hopper GPU: more would only cost
memory for their float32 results."""


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

    def equal(self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec) -> tuple[Tensor, Tensor]:
        """Implement FlashLibrary."""
        return self._attend(query, pages, reach, spec)

    def ragged(self, query: Tensor, pages: KVPages, reach: Reach, runs: Ragged, spec: FlashSpec) -> Tensor:
        """Implement FlashLibrary."""
        return self._attend(query, pages, reach, spec, cu_seqlens_q=runs.bounds, max_seqlen_q=runs.widest)[0]

    def _attend(
        self, query: Tensor, pages: KVPages, reach: Reach, spec: FlashSpec, **runs: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = self.varlen(
            query,
            *pages,
            **runs,
            seqused_k=reach.lengths,
            page_table=reach.pages,
            window_size=tuple(None if bound < 0 else bound for bound in spec.window),
            **spec.keywords,
            num_splits=self.splits,
            return_lse=True,
        )
        return out, lse
