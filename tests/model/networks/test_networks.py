"""Networks compute what transformers computes; a position has the same bits on every path and in any company."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from space_kernels.linear.packed_linear import can_pack
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import UnsupportedModel
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.network import PagedKV
from space_model.networks.transformers_network import (
    AttentionStep,
    TransformersNetwork,
    make_row_invariant,
    paged_attention,
)
from space_model.space_model import SpaceModel
from tiny_checkpoints import FAMILIES, MORE_FAMILIES, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.pytorch_utils import Conv1D


@pytest.mark.parametrize(
    ("network", "dtype", "attention"),
    [(LlamaNetwork, "float32", "auto"), (LlamaNetwork, "bfloat16", "torch"), (CompiledLlama, "bfloat16", "auto")],
)
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_a_compact_network_equals_the_transformers_one(
    family: str,
    network: type,
    dtype: str,
    attention: str,
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if network is LlamaNetwork and not can_pack(getattr(torch, dtype)):
        pytest.skip(f"this processor packs no {dtype}")
    compact = load_model(checkpoint_of(family), dtype=dtype, attention=attention)
    assert isinstance(compact._network, network)
    monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
    other = load_model(checkpoint_of(family), dtype=dtype, attention="torch")
    assert isinstance(other._network, TransformersNetwork)
    ids = torch.randint(16, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    segment = Segment(ids, 0, range(3), DraftLayout.full(2, 3))
    batch = ForwardBatch.build([segment], block_size=16, mask_ids=compact.facts.mask_ids)
    found, wanted = (m.forward(batch, m.allocate_kv(3, 16))[: batch.num_rows] for m in (compact, other))
    torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == "float32" else 0.1, rtol=0)
    assert torch.equal(compact.embed(batch.ids), other.embed(batch.ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [-1, 1 << 40])
def test_an_id_that_has_no_embedding_is_an_error(dtype: str, wrong: int, llama: Path) -> None:
    model = load_model(llama, dtype=dtype)
    batch = ForwardBatch.build([Segment([1, wrong, 2], 0, [0])], block_size=16, mask_ids=())
    with pytest.raises(IndexError):
        model.forward(batch, model.allocate_kv(1, 16))


def test_an_unknown_attention_keyword_is_refused_by_name(llama: Path) -> None:
    model = load_model(llama)
    batch = ForwardBatch.build([Segment([1], 0, [0])], block_size=16, mask_ids=())
    step = AttentionStep(batch, model.allocate_kv(1, 16))
    query, key = torch.zeros(1, 4, 4, 16), torch.zeros(1, 2, 4, 16)
    with pytest.raises(UnsupportedModel, match="asks for bias"):
        paged_attention(torch.nn.Identity(), query, key, key, None, space_step=step, bias=torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="asks for a mask of its own"):
        paged_attention(torch.nn.Identity(), query, key, key, torch.zeros(4), space_step=step)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@torch.inference_mode()
def test_a_step_over_unequal_sequences_equals_the_dense_model(family: str, tmp_path: Path) -> None:
    """Prefill in chunks, then SPACE rows of one sequence beside plain rows of another; chain and mask rows both."""
    path = tiny_checkpoint(tmp_path, family)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = load_model(path, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(16, 128, (60,), generator=generator).tolist()
    short = torch.randint(16, 128, (9,), generator=generator).tolist()
    pages_long, pages_short = [5, 2, 7, 0], [3]
    kv = model.allocate_kv(8, 16)

    def run(*segments: Segment) -> tuple[ForwardBatch, torch.Tensor]:
        batch = ForwardBatch.build(segments, block_size=16, mask_ids=model.facts.mask_ids)
        return batch, model.forward(batch, kv)

    run(Segment(long[:37], 0, pages_long), Segment(short[:8], 0, pages_short, state=1))
    batch, hidden = run(
        Segment(long[37:52], 37, pages_long, DraftLayout(3, (5, 0, 2, 4))),
        Segment(short[8:], 8, pages_short, state=1),
    )

    def expect(ids: list[int]) -> torch.Tensor:
        return dense(torch.tensor([ids]), use_cache=False).logits[0].float()

    found = model.logits(hidden[list(batch.chain_rows[0])])
    torch.testing.assert_close(found, expect(long[:52])[37:], atol=2e-4, rtol=0)
    found = model.logits(hidden[list(batch.chain_rows[1])])
    torch.testing.assert_close(found, expect(short)[8:], atol=2e-4, rtol=0)
    for g, rows in enumerate(batch.mask_rows[0]):
        found = model.logits(hidden[list(rows)])
        masks = list(model.facts.mask_ids[: len(rows)])
        torch.testing.assert_close(found, expect(long[: 49 + g] + masks)[49 + g :], atol=2e-4, rtol=0)


INVARIANT_FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "mixtral", "cohere2", "glm4_moe", "gpt_oss", "deepseek_v2"]
INVARIANT_FAMILIES += ["gemma4", "llama4", "gemma3n"]
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
@pytest.mark.parametrize("family", INVARIANT_FAMILIES)
def test_a_position_has_its_bits_on_every_path(family: str, dtype: str, checkpoint_of: Callable[[str], Path]) -> None:
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


def test_drafts_never_leave_the_step(llama: Path) -> None:
    """Mask rows write no page: a step with every group leaves exactly what the chain alone leaves."""
    model = load_model(llama, dtype="float32")
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
