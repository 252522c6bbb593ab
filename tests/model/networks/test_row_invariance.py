"""Whole prefill, chunked prefill, decoding and verification give a position the same bits, in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.networks.transformers_network import make_row_invariant
from space_model.space_model import SpaceModel
from torch import Tensor
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.pytorch_utils import Conv1D

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "mixtral", "cohere2"]
LENGTH = 280  # beyond one key block
BLOCK = 16


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(16, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(model: SpaceModel, kv: PagedKV, *segments: Segment) -> list[Tensor]:
    """The hidden rows of each segment's chain."""
    batch = ForwardBatch.build(segments, block_size=BLOCK, mask_ids=model.facts.mask_ids)
    hidden = model.forward(batch, kv)
    return [hidden[rows.start : rows.stop] for rows in batch.chain_rows]


def pages_of(number: int) -> list[int]:
    return list(range(number * 20, number * 20 + 20))


def spoil(kv: PagedKV, computed: Sequence[tuple[Sequence[int], int]]) -> None:
    """NaN in every slot that no sequence has computed."""
    keep = torch.zeros(kv.num_blocks * kv.block_size, dtype=torch.bool)
    for pages, length in computed:
        for position in range(length):
            keep[pages[position // BLOCK] * BLOCK + position % BLOCK] = True
    for pages in (*kv.keys, *kv.values):
        pages.masked_fill_(~keep.view(kv.num_blocks, 1, kv.block_size, 1), float("nan"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_position_has_the_same_bits_on_every_path(
    family: str, dtype: str, checkpoint_of: Callable[[str], Path]
) -> None:
    model = load_model(checkpoint_of(family), dtype=dtype)
    ids, other = ids_of(0), ids_of(1)
    kv = model.allocate_kv(40, BLOCK)
    (whole,) = forward(model, kv, Segment(ids, 0, pages_of(0)))

    # in chunks, beside another sequence that prefills in other chunks
    kv = model.allocate_kv(40, BLOCK)
    bounds = [0, 1, 6, 37, 101, 250, 251, 258]
    for start, end in itertools.pairwise(bounds):
        spoil(kv, [(pages_of(0), start), (pages_of(1), start // 2)])
        beside = Segment(other[start // 2 : end // 2 + 1], start // 2, pages_of(1))
        found, _ = forward(model, kv, Segment(ids[start:end], start, pages_of(0)), beside)
        assert torch.equal(found, whole[start:end]), (start, end)

    # one by one, and as verification rows of every k and of pruned layouts, right drafts and wrong ones
    computed = bounds[-1]
    for k in (0, 1, 0, 2, 3, 5):
        for layout in (DraftLayout.full(k, min(k, 5)), DraftLayout(k, (3, *[0] * k))):
            spoil(kv, [(pages_of(0), computed), (pages_of(1), 20)])
            wrong = [ids[computed], *(id ^ 1 for id in ids[computed + 1 : computed + 1 + k])]
            forward(model, kv, Segment(wrong, computed, pages_of(0), layout))
            spoil(kv, [(pages_of(0), computed), (pages_of(1), 20)])
            chain = ids[computed : computed + 1 + k]
            beside = Segment([other[20]], 20, pages_of(1), DraftLayout.full(0, 5))
            _, found = forward(model, kv, beside, Segment(chain, computed, pages_of(0), layout))
            assert torch.equal(found, whole[computed : computed + 1 + k]), (k, layout)
            computed += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_number_of_threads_and_rows_changes_no_bit(
    family: str, dtype: str, num_threads: int, checkpoint_of: Callable[[str], Path]
) -> None:
    model = load_model(checkpoint_of(family), dtype=dtype, num_threads=num_threads)
    ids = ids_of(2, 64)
    kv = model.allocate_kv(20, BLOCK)
    (whole,) = forward(model, kv, Segment(ids, 0, pages_of(0)))
    logits = model.logits(whole)
    for rows in (*range(1, 14), 31, 32, 33, 47, 63):
        (found,) = forward(model, kv, Segment(ids[:rows], 0, pages_of(0)))
        assert torch.equal(found, whole[:rows]), rows
        assert torch.equal(model.logits(found), logits[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_linears_of_gpt2_give_a_row_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """GPT-2's keep their weight the other way round, and as they are depend on the number of rows."""
    torch.manual_seed(0)
    theirs = Conv1D(2304, 768).to(dtype)
    block = torch.nn.ModuleDict({"c_attn": theirs})
    make_row_invariant(block, 1)
    rows = torch.randn(64, 768).to(dtype)
    whole = block["c_attn"](rows)
    torch.testing.assert_close(whole, theirs(rows), atol=1e-4 if dtype is torch.float32 else 0.02, rtol=2e-2)
    for count in range(1, 64):
        assert torch.equal(block["c_attn"](rows[:count]), whole[:count]), count


def test_drafts_never_leave_the_step(checkpoint_of: Callable[[str], Path]) -> None:
    """Mask rows write no page: a step with every group leaves exactly what the chain alone leaves."""
    model = load_model(checkpoint_of("llama"), dtype="float32")
    ids = ids_of(3, 40)
    kept = []
    for layout in (DraftLayout(4, (0,) * 5), DraftLayout.full(4, 5)):
        kv = model.allocate_kv(20, BLOCK)
        forward(model, kv, Segment(ids, 0, pages_of(0), layout))
        kept.append(kv)
    for plain, space in zip((*kept[0].keys, *kept[0].values), (*kept[1].keys, *kept[1].values), strict=True):
        assert torch.equal(plain, space)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_experts", [8, 128])
def test_a_router_of_real_width_chooses_alike_in_any_company(num_experts: int, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(hidden_size=2048, num_experts=num_experts, num_experts_per_tok=2, norm_topk_prob=True)
    base = torch.nn.ModuleDict({"gate": Qwen3MoeTopKRouter(config).to(dtype)})
    generator = torch.Generator().manual_seed(3)
    weight = base.get_submodule("gate").get_parameter("weight")
    weight.data = torch.randn(num_experts, 2048, generator=generator).to(dtype)
    rows = torch.randn(64, 2048, generator=generator).to(dtype)
    expected = base["gate"](rows)[0]
    with torch.inference_mode():
        make_row_invariant(base, torch.get_num_threads())
        whole = base["gate"](rows)
        assert torch.allclose(whole[0].float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))
        for count in range(1, 64):
            for part, of_all in zip(base["gate"](rows[:count]), whole, strict=True):
                assert torch.equal(part, of_all[:count]), count
