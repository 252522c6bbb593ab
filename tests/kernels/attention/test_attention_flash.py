"""The flash-attn adapters against the reference: by stand-ins with the library's signatures, for real on a GPU."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from doubles.kernels import SCALE, MadeUp, full_layout, made_up_step, run
from space_kernels.attention.attention import AttentionSpec
from space_kernels.attention.flash_attn_backend import (
    PAGE_2,
    FlashAttn2,
    FlashAttn3,
    FlashAttn4,
    FlashLibrary,
    space_attention,
)
from space_kernels.attention.library_parts import OwnPart
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.paging.step_rows import StepTables
from torch import Tensor

# What the libraries take and give, in torch. Sources: flash-attn 2.8.3, flash_attn/flash_attn_interface.py and the
# checks of csrc/flash_attn/flash_api.cpp; flash-attn-4 4.0.0b36, flash_attn/cute/interface.py.


def dense(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool, window: tuple[int, int], softcap: float,
    nothing: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query [sq, H, D], keys [sk, G, D] -> out [sq, H, D], lse [H, sq]; bottom-right aligned, as both versions are."""
    num_queries, num_keys, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    ends = torch.arange(num_queries)[:, None] + num_keys - num_queries
    at = torch.arange(num_keys)
    back, ahead = window
    if causal:
        ahead = 0
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if back >= 0:
        seen &= at >= ends - back
    if ahead >= 0:
        seen &= at <= ends + ahead
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double().repeat_interleave(group, 1)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)  # [H, sq]
    weights = torch.where(seen, torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, values.double().repeat_interleave(group, 1))
    return out.to(query.dtype), lse.masked_fill(lse == -math.inf, nothing).float()


def gathered(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Gather [length, G, D] from the pages in the table; no other page is read."""
    size = pages.shape[1]
    count = -(-length // size)
    assert count <= len(table)
    return pages[table[:count].long()].flatten(0, 1)[:length]


class StandIn:
    """The checks that both versions share."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes, self.calls = dtypes, 0

    def check(self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, batch: int) -> None:
        self.calls += 1
        assert query.dtype in self.dtypes
        assert keys.dtype == query.dtype == values.dtype
        num_blocks, size, kv_heads, head_dim = keys.shape
        assert values.shape == keys.shape
        assert query.shape[-1] == head_dim <= 256
        assert head_dim % 8 == 0
        assert query.shape[-2] % kv_heads == 0
        assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        # the pages themselves, not a copy: [num_blocks, G, size, D] seen with slots before heads
        assert keys.stride() == (kv_heads * size * head_dim, head_dim, size * head_dim, 1)
        assert batch > 0
        assert table.shape[0] == batch
        assert table.dtype == torch.int32
        assert table.stride(-1) == 1
        assert ((table >= 0) & (table < num_blocks)).all()

    @staticmethod
    def check_lengths(lengths: Tensor, table: Tensor, size: int) -> None:
        assert lengths.dtype == torch.int32
        assert lengths.shape == (len(table),)
        assert lengths.is_contiguous()
        assert (lengths <= table.shape[1] * size).all()

    @staticmethod
    def check_bounds(bounds: Tensor, total: int, widest: int) -> None:
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        assert bounds[0] == 0
        assert bounds[-1] == total
        assert int((bounds[1:] - bounds[:-1]).max()) == widest


class Version2(StandIn):
    def with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, rotary_cos: None = None,
        rotary_sin: None = None, cache_seqlens: Tensor | None = None, cache_batch_idx: None = None,
        cache_leftpad: None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert block_table is not None
        assert cache_seqlens is not None
        assert softmax_scale is not None
        assert return_softmax_lse
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        self.check(q, k_cache, v_cache, block_table, len(q))
        self.check_lengths(cache_seqlens, block_table, k_cache.shape[1])
        found = [
            dense(
                q[n], gathered(k_cache, block_table[n], length), gathered(v_cache, block_table[n], length),
                scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, nothing=math.inf,
            )
            for n, length in enumerate(cache_seqlens.tolist())
        ]  # fmt: skip
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])  # lse [batch, H, sq]

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert block_table is not None
        assert softmax_scale is not None
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        batch = len(cu_seqlens_q) - 1
        self.check(q, k, v, block_table, batch)
        self.check_bounds(cu_seqlens_q, len(q), max_seqlen_q)
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
        assert cu_seqlens_k[0] == 0
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        self.check_lengths(lengths, block_table, k.shape[1])
        assert cu_seqlens_k.dtype == torch.int32
        assert int(lengths.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
        begins = cu_seqlens_q.tolist()
        return torch.cat([
            dense(
                q[begins[n] : begins[n + 1]], gathered(k, block_table[n], length), gathered(v, block_table[n], length),
                scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, nothing=math.inf,
            )[0]
            for n, length in enumerate(lengths.tolist())
        ])  # fmt: skip


class Version3(StandIn):
    """vLLM's names; `package` has those of the library's own package."""

    FA3_AVAILABLE, FA3_UNAVAILABLE_REASON = True, None

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(dtypes)
        self.plans: list[dict[str, object]] = []

    def get_scheduler_metadata(
        self, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
        cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, cache_leftpad: None = None,
        page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), has_softcap: bool = False, num_splits: int = 0, pack_gqa: None = None,
        sm_margin: int = 0,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q is not None
        assert page_size is not None
        self.plans.append({
            "batch": batch_size, "max_seqlen_q": max_seqlen_q, "heads": (num_heads_q, num_heads_kv, headdim),
            "dtype": qkv_dtype, "causal": causal, "window": window_size, "softcap": has_softcap, "splits": num_splits,
            "lengths": cache_seqlens.data_ptr(), "longest": max_seqlen_k,
        })  # fmt: skip
        return torch.tensor([len(self.plans) - 1], dtype=torch.int32)

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
        cu_seqlens_k: None = None, seqused_k: Tensor | None = None, q_v: None = None, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] | None = None,
        softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False, return_attn_probs: bool = False,
        block_table: Tensor | None = None, return_softmax_lse: bool = False, out: Tensor | None = None,
        scheduler_metadata: Tensor | None = None, q_descale: None = None, k_descale: None = None,
        v_descale: None = None, num_splits: int = 0, output_scale: None = None, fa_version: int = 2,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert fa_version == 3
        assert return_softmax_lse
        assert block_table is not None
        assert seqused_k is not None
        assert softmax_scale is not None
        assert window_size is not None
        assert scheduler_metadata is not None
        self.check(q, k, v, block_table, len(cu_seqlens_q) - 1)
        self.check_lengths(seqused_k, block_table, k.shape[1])
        self.check_bounds(cu_seqlens_q, len(q), max_seqlen_q)
        assert int(seqused_k.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
        assert self.plans[int(scheduler_metadata)] == {  # a plan for another call would split wrongly
            "batch": len(seqused_k), "max_seqlen_q": max_seqlen_q, "heads": (q.shape[1], k.shape[2], q.shape[2]),
            "dtype": q.dtype, "causal": causal, "window": window_size, "softcap": softcap > 0, "splits": num_splits,
            "lengths": seqused_k.data_ptr(), "longest": max_seqlen_k,
        }  # fmt: skip
        begins = cu_seqlens_q.tolist()
        found = [
            dense(
                q[begins[n] : begins[n + 1]], gathered(k, held, length), gathered(v, held, length),
                scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, nothing=-math.inf,
            )
            for n, (held, length) in enumerate(zip(block_table, seqused_k.tolist(), strict=True))
        ]  # fmt: skip
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, return_softmax_lse: bool, **keywords: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        found = self.flash_attn_varlen_func(
            q, k_cache, v_cache, max_seqlen_q, cu_seqlens_q, page_table.shape[1] * k_cache.shape[1],
            seqused_k=cache_seqlens, block_table=page_table, fa_version=3, return_softmax_lse=return_softmax_lse,
            **keywords,
        )  # fmt: skip
        return *found, None, None


class Version4(StandIn):
    def __init__(self, dtypes: Sequence[torch.dtype], splits: int) -> None:
        super().__init__(dtypes)
        self._splits = splits

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None, seqused_q: None = None, seqused_k: Tensor | None = None,
        gather_kv_indices: None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int | None, int | None] = (None, None), learnable_sink: None = None,
        softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table is not None
        assert seqused_k is not None
        assert softmax_scale is not None
        assert return_lse
        assert num_splits == self._splits
        back, ahead = (-1 if bound is None else bound for bound in window_size)
        assert all(bound is None or bound >= 0 for bound in window_size)
        ragged = cu_seqlens_q is not None
        self.check(q, k, v, page_table, len(page_table))
        self.check_lengths(seqused_k, page_table, k.shape[1])
        # the rest of a sequence's last page is loaded with it: 0 times NaN is NaN
        for held, length in zip(page_table, seqused_k.tolist(), strict=True):
            used = held[: -(-length // k.shape[1])].long()
            assert torch.isfinite(k[used]).all()
            assert torch.isfinite(v[used]).all()
        if cu_seqlens_q is not None:
            assert max_seqlen_q is not None
            self.check_bounds(cu_seqlens_q, len(q), max_seqlen_q)
            begins = cu_seqlens_q.tolist()
            queries = [q[a:b] for a, b in pairwise(begins)]
        else:
            assert q.dim() == 4
            queries = list(q)
        found = [
            dense(
                query, gathered(k, held, length), gathered(v, held, length),
                scale=softmax_scale, causal=causal, window=(back, ahead), softcap=softcap, nothing=-math.inf,
            )
            for query, held, length in zip(queries, page_table, seqused_k.tolist(), strict=True)
        ]  # fmt: skip
        if ragged:
            return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


EXACT = (torch.float32,)  # what no library takes: so that a wrong key shows, however many there are
HALVES = (torch.float16, torch.bfloat16)


def library(version: int, dtypes: Sequence[torch.dtype] = EXACT) -> FlashLibrary:
    if version == 2:
        two = Version2(dtypes)
        return FlashAttn2(two.with_kvcache, two.varlen)
    if version == 3:
        return FlashAttn3.of_vllm(Version3(dtypes))
    return FlashAttn4(Version4(dtypes, 0).varlen, 0)


SHORT = MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1)
SPACE = MadeUp(cached=250, num_chain=3, groups=[(0, 2), (1, 2), (2, 2)], seed=2)
PRUNED = MadeUp(cached=300, num_chain=4, groups=[(0, 3), (2, 1)], seed=3)
PLAIN = MadeUp(cached=256, num_chain=1, seed=4)
FRESH = MadeUp(cached=0, num_chain=40, groups=[(39, 3)], seed=5)  # the last chunk of a prompt, with group 0 behind it
CHUNK = MadeUp(cached=100, num_chain=60, seed=6)
ALL = [SHORT, SPACE, CHUNK, PRUNED, PLAIN, FRESH]


def expected(sequences: Sequence[MadeUp], *, heads: int, kv_heads: int, **options: object) -> Tensor:
    return run(made_up_step(sequences, heads=heads, kv_heads=kv_heads), reference, **options)


BLOCKS = {2: 256, 3: 16, 4: 16}
SPEC = AttentionSpec(SCALE)


@pytest.mark.parametrize("version", [2, 4, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (300, 2.0)])
def test_unequal_sequences_equal_the_reference(
    version: int, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    step = made_up_step(ALL, heads=heads, kv_heads=kv_heads, block_size=BLOCKS[version], garbage=0.0)
    found = run(step, space_attention, library=library(version), window=window, softcap=softcap)
    wanted = expected(ALL, heads=heads, kv_heads=kv_heads, window=window, softcap=softcap)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=0)


@pytest.mark.parametrize("version", [2, 4, 3])
@pytest.mark.parametrize("k", range(6))
def test_whole_layouts_equal_the_reference(version: int, k: int) -> None:
    sequences = [MadeUp(cached, k + 1, full_layout(k), seed=cached) for cached in (0, 30, 257)]
    step = made_up_step(sequences, heads=4, kv_heads=2, block_size=BLOCKS[version], garbage=0.0)
    found = run(step, space_attention, library=library(version))
    torch.testing.assert_close(found, expected(sequences, heads=4, kv_heads=2), atol=3e-6, rtol=0)


@pytest.mark.parametrize("version", [2, 4, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_as_near_as_its_rounding(version: int, dtype: torch.dtype) -> None:
    step = made_up_step(ALL, block_size=BLOCKS[version], dtype=dtype, garbage=0.0)
    found = run(step, space_attention, library=library(version, HALVES))
    assert found.dtype is dtype
    wanted = run(made_up_step(ALL, dtype=dtype), reference)
    torch.testing.assert_close(found.float(), wanted.float(), atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_what_lies_in_unwritten_slots_is_never_read_by_version_2() -> None:
    clean, dirty = (made_up_step(ALL, block_size=256, garbage=garbage) for garbage in (0.0, math.nan))
    assert torch.equal(run(dirty, space_attention, library=library(2)), run(clean, space_attention, library=library(2)))


def test_keys_and_values_are_stored_as_the_reference_stores_them() -> None:
    step, other = made_up_step(ALL, garbage=0.0), made_up_step(ALL, garbage=0.0)
    step.key[1] = other.key[1] = math.inf
    for one, options in ((step, {}), (other, {"library": library(4)})):
        attention = space_attention if options else reference
        attention(one.qkv, one.pages, one.rows, SPEC, **options)  # type: ignore[operator]
    assert torch.equal(step.pages.keys, other.pages.keys)
    assert torch.equal(step.pages.values, other.pages.values)


def test_our_part_may_be_the_kernels() -> None:
    pytest.importorskip("triton")
    sequences = [SHORT, MadeUp(cached=20, num_chain=2, groups=[(0, 1), (1, 2)], seed=9)]
    step = made_up_step(sequences, garbage=0.0)
    found = run(step, space_attention, library=library(4), own=OwnPart.kernels())
    torch.testing.assert_close(found, run(step, reference), atol=3e-6, rtol=0)


def test_pages_that_are_written_already_are_left_as_they_are() -> None:
    step = made_up_step(ALL, garbage=0.0)
    wanted = run(step, space_attention, library=library(4))
    OwnPart.on(torch.device("cpu")).store_kv(step.qkv, step.pages, StepTables.of(step.rows))
    before = step.pages.keys.clone()
    step.key[: step.rows.num_chain_rows] = math.nan
    found = space_attention(step.qkv, step.pages, step.rows, SPEC, library=library(4), is_stored=True)
    assert torch.equal(found[: step.num_rows], wanted)
    assert torch.equal(step.pages.keys, before)


def test_plain_decoding_is_one_call_and_masks_are_one_more() -> None:
    for sequences, calls in (([PLAIN, MadeUp(3, 1)], 1), ([SPACE, SHORT], 2), (ALL, 3)):
        stand_in = Version4(EXACT, 0)
        run(made_up_step(sequences, garbage=0.0), space_attention, library=FlashAttn4(stand_in.varlen, 0))
        assert stand_in.calls == calls


def test_version_3_is_planned_once_per_step_and_kind_of_call() -> None:
    stand_in = Version3(EXACT)
    step = made_up_step(ALL, garbage=0.0)
    for _layer in range(3):
        run(step, space_attention, library=FlashAttn3.of_vllm(stand_in))
    assert stand_in.calls == 9
    assert [(plan["max_seqlen_q"], plan["causal"]) for plan in stand_in.plans] == [(4, True), (60, True), (6, False)]


def test_version_3_of_its_own_package_equals_that_of_vllm() -> None:
    one, two = Version3(EXACT), Version3(EXACT)
    libraries = [FlashAttn3.of_vllm(one), FlashAttn3(two.with_kvcache, two.get_scheduler_metadata)]
    found = [run(made_up_step(ALL, garbage=0.0), space_attention, library=library) for library in libraries]
    assert torch.equal(*found)


def test_version_3_splits_a_lone_context_and_not_those_of_a_full_batch() -> None:
    for count, splits in ((1, 32), (16, 8), (200, 1)):
        stand_in = Version3(EXACT)
        run(made_up_step([MadeUp(3, 1)] * count, garbage=0.0), space_attention, library=FlashAttn3.of_vllm(stand_in))
        assert [plan["splits"] for plan in stand_in.plans] == [splits]


def test_a_build_of_vllm_without_version_3_says_so() -> None:
    stand_in = Version3(EXACT)
    stand_in.FA3_AVAILABLE, stand_in.FA3_UNAVAILABLE_REASON = False, "no Hopper"  # type: ignore[misc, assignment]
    with pytest.raises(ImportError, match="lacks flash-attn 3: no Hopper"):
        FlashAttn3.of_vllm(stand_in)


def test_a_sequence_that_is_dead_stores_nothing() -> None:
    step = made_up_step([PLAIN, SPACE, SHORT], garbage=0.0)
    live = StepTables.of(step.rows)
    written = live.num_written.clone()
    written[1] = 0
    step.rows.parts[StepTables, step.rows.device] = StepTables(
        live.pattern, live.starts, live.page_table, live.block_size, written
    )
    before, after = step.pages.keys.clone(), step.pages.keys
    space_attention(step.qkv, step.pages, step.rows, SPEC, library=library(4))
    changed = (before != after).flatten(3).any(3).any(1)  # [num_blocks, block_size]
    held = step.rows.pages
    assert sorted(map(tuple, changed.nonzero().tolist())) == sorted([(held[0][16], 0), (held[2][0], 5)])

    written.zero_()
    dead = made_up_step([PLAIN, SPACE, SHORT], garbage=0.0)
    dead.rows.parts[StepTables, dead.rows.device] = StepTables(
        live.pattern, live.starts, live.page_table, live.block_size, written
    )
    before = dead.pages.keys.clone()
    space_attention(dead.qkv, dead.pages, dead.rows, SPEC, library=library(4))
    assert torch.equal(dead.pages.keys, before)


def test_pages_that_version_2_does_not_take_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=f"these have 16. Use --block-size {PAGE_2}, or --attention triton"):
        run(made_up_step([PLAIN], garbage=0.0), space_attention, library=library(2))


def test_a_window_within_a_mask_group_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"window of 3 positions is not longer than a group of 3 masks; use"):
        run(made_up_step([PRUNED], garbage=0.0), space_attention, library=library(4), window=3)
