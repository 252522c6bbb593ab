"""The flashinfer adapter against the reference: by a stand-in with the library's signature, for real on a GPU."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles.kernels import MadeUp, MadeUpStep, full_layout, made_up_step, run
from space_kernels.attention.flashinfer_backend import FlashInfer, space_attention
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.paging.step_rows import StepRows
from torch import Tensor

SHORT = MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1)
SPACE = MadeUp(cached=250, num_chain=3, groups=[(0, 2), (1, 2), (2, 2)], seed=2)
PRUNED = MadeUp(cached=300, num_chain=4, groups=[(0, 3), (2, 1)], seed=3)
PLAIN = MadeUp(cached=256, num_chain=1, seed=4)
FRESH = MadeUp(cached=0, num_chain=40, groups=[(39, 3)], seed=5)
CHUNK = MadeUp(cached=100, num_chain=60, seed=6)
ALL = [SHORT, SPACE, CHUNK, PRUNED, PLAIN, FRESH]


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper of flashinfer 0.7.2 (flashinfer/prefill.py), in torch."""

    dtypes: Sequence[torch.dtype] = (torch.float32,)  # what the library does not take: so that a wrong key shows
    num_plans = 0
    num_runs = 0

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype is torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "HND"
        self.buffers = None
        if use_cuda_graph:
            given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            assert all(buffer is not None and buffer.dtype is torch.int32 for buffer in given)
            self.buffers: Any = given
            self.batch = len(given[3])  # type: ignore[arg-type]

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        type(self).num_plans += 1
        batch = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == batch + 1
        assert len(paged_kv_last_page_len) == batch
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype is torch.int32
            assert tensor.is_contiguous()
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type is kv_data_type
        assert q_data_type in self.dtypes
        assert window_left >= -1
        assert sm_scale is not None
        if self.buffers is not None:
            assert batch == self.batch, "The batch size should be fixed during the lifecycle of the wrapper"
            assert len(paged_kv_indices) <= len(self.buffers[2])
            given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            for buffer, tensor in zip(self.buffers, given, strict=True):
                buffer[: len(tensor)] = tensor
            self.state = self.buffers
        else:
            self.state = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type
        self.how = causal, sm_scale, window_left, logits_soft_cap or 0.0

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        type(self).num_runs += 1
        assert return_lse
        keys, values = paged_kv_cache
        heads, kv_heads, head_dim, size, dtype = self.sizes
        assert keys.shape == values.shape == (len(keys), kv_heads, size, head_dim)
        assert keys.dtype is values.dtype is q.dtype is dtype
        rows, page_bounds, pages, last = (tensor.tolist() for tensor in self.state)
        assert q.shape == (rows[-1], heads, head_dim)
        out, lses = [], []
        for n in range(len(last)):
            held = pages[page_bounds[n] : page_bounds[n + 1]]
            length = (len(held) - 1) * size + last[n]
            k, v = (part[held].transpose(1, 2).flatten(0, 1)[:length] for part in (keys, values))
            found, lse = self._one(q[rows[n] : rows[n + 1]], k, v)
            out.append(found)
            lses.append(lse)
        return torch.cat(out), torch.cat(lses)

    def _one(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        causal, scale, window_left, softcap = self.how
        sq, sk, group = len(query), len(keys), query.shape[1] // keys.shape[1]
        ends, at = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
        seen = torch.ones(sq, sk, dtype=torch.bool)
        if causal:
            seen &= at <= ends
        if window_left >= 0:
            seen &= at >= ends - window_left
        scores = torch.einsum("qhd,khd->qhk", query.double(), keys.double().repeat_interleave(group, 1)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        weights = torch.nan_to_num(torch.softmax(scores, -1), 0.0)
        out = torch.einsum("qhk,khd->qhd", weights, values.double().repeat_interleave(group, 1))
        return out.to(query.dtype), (torch.logsumexp(scores, -1) / math.log(2)).float()


class HalfWrapper(Wrapper):
    dtypes = (torch.float16, torch.bfloat16)


def library(wrapper: type[Wrapper] = Wrapper, **options: Any) -> FlashInfer:
    return FlashInfer(wrapper, torch.empty(64, dtype=torch.uint8), **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (300, 2.0)])
def test_unequal_sequences_equal_the_reference(
    heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    step = made_up_step(ALL, heads=heads, kv_heads=kv_heads)
    wanted = run(step, reference, window=window, softcap=softcap)
    found = run(step, space_attention, library=library(), window=window, softcap=softcap)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=0)


@pytest.mark.parametrize("k", range(6))
def test_whole_layouts_equal_the_reference(k: int) -> None:
    step = made_up_step([MadeUp(cached, k + 1, full_layout(k), seed=cached) for cached in (0, 30, 257)], block_size=32)
    found = run(step, space_attention, library=library())
    torch.testing.assert_close(found, run(step, reference), atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", HalfWrapper.dtypes)
def test_half_precision_is_as_near_as_its_rounding(dtype: torch.dtype) -> None:
    step = made_up_step(ALL, dtype=dtype)
    found = run(step, space_attention, library=library(HalfWrapper))
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), run(step, reference).float(), atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_a_step_is_planned_once_for_all_its_layers() -> None:
    class Counting(Wrapper):
        num_plans = num_runs = 0

    step, flashinfer = made_up_step(ALL), library(Counting)
    for _ in range(3):
        run(step, space_attention, library=flashinfer)
    assert (Counting.num_plans, Counting.num_runs) == (2, 6)  # chains and masks
    run(step, space_attention, library=flashinfer, window=40)
    assert Counting.num_plans == 4


def moved_on(step: MadeUpStep, by: int) -> StepRows:
    rows = step.rows
    return StepRows(rows.pattern, rows.starts + by, rows.pages, rows.block_size, rows.device)


def test_two_steps_in_turn_are_each_planned_for() -> None:
    """The plan of another step is never used."""
    step, flashinfer = made_up_step([MadeUp(40, 3, [(1, 2)], seed=1)]), library()
    first = run(step, space_attention, library=flashinfer)
    shorter = dataclasses.replace(step, rows=moved_on(step, -20))
    assert not torch.allclose(run(shorter, space_attention, library=flashinfer), first)
    assert torch.equal(run(step, space_attention, library=flashinfer), first)


def test_a_graph_s_wrapper_takes_a_new_plan_at_the_same_addresses() -> None:
    step = made_up_step([MadeUp(40, 3, [(1, 2)], seed=1), MadeUp(9, 3, [(1, 2)], seed=2)])
    flashinfer = library(graphs=True, most_pages=32)
    run(step, space_attention, library=flashinfer)
    wrappers = [slot.wrapper for slot in flashinfer._slots.values()]
    addresses = [[buffer.data_ptr() for buffer in wrapper.state] for wrapper in wrappers]
    plans = Wrapper.num_plans
    shorter = moved_on(step, -4)
    flashinfer.plan(shorter)
    assert Wrapper.num_plans == plans + 2
    assert [[buffer.data_ptr() for buffer in wrapper.state] for wrapper in wrappers] == addresses
    moved = dataclasses.replace(step, rows=shorter)
    found = run(moved, space_attention, library=flashinfer)
    assert Wrapper.num_plans == plans + 2
    torch.testing.assert_close(found, run(moved, reference), atol=3e-6, rtol=0)


def test_a_window_within_a_mask_group_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"window of 3 positions is not longer than a group of 3 masks; use"):
        run(made_up_step([PRUNED]), space_attention, library=library(), window=3)
