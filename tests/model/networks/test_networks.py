"""The networks of the Llama family say the same, and unknown attention keywords are refused."""

from __future__ import annotations

from collections.abc import Callable
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
from space_model.networks.transformers_network import AttentionStep, TransformersNetwork, paged_attention


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
def test_an_id_that_has_no_embedding_is_an_error(dtype: str, wrong: int, checkpoint_of: Callable[[str], Path]) -> None:
    model = load_model(checkpoint_of("llama"), dtype=dtype)
    batch = ForwardBatch.build([Segment([1, wrong, 2], 0, [0])], block_size=16, mask_ids=())
    with pytest.raises(IndexError):
        model.forward(batch, model.allocate_kv(1, 16))


def test_an_unknown_attention_keyword_is_refused_by_name(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_model(checkpoint_of("llama"))
    batch = ForwardBatch.build([Segment([1], 0, [0])], block_size=16, mask_ids=())
    step = AttentionStep(batch, model.allocate_kv(1, 16))
    query, key = torch.zeros(1, 4, 4, 16), torch.zeros(1, 2, 4, 16)
    with pytest.raises(UnsupportedModel, match="asks for s_aux"):
        paged_attention(torch.nn.Identity(), query, key, key, None, space_step=step, s_aux=torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="asks for a mask of its own"):
        paged_attention(torch.nn.Identity(), query, key, key, torch.zeros(4), space_step=step)
