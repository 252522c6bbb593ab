"""Models whose linears are held in eight bits: the numbers they compute with, what they hold, who is refused them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from space_kernels.linear.int8_linear import Int8Weights
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

IDS = [(7 * i + 1) % 128 for i in range(40)]


def logits_of(model: SpaceModel, ids: list[int]) -> Tensor:
    """[ids, V]"""
    batch = ForwardBatch.build([Segment(ids, 0, [0, 1, 2])], block_size=16, mask_ids=(), device=model.facts.device)
    kv = model.allocate_kv(3, 16)
    return model.logits(model.forward(batch, kv)[: batch.num_rows])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_it_computes_with_the_nearest_whole_numbers(
    family: str, attention: str, checkpoint_of: Callable[[str], Path]
) -> None:
    path = checkpoint_of(family)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for module in oracle.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Weights.of(module.weight.bfloat16()).dense())
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            for weight in (module.gate_up_proj, module.down_proj):
                weight.data = torch.stack([Int8Weights.of(expert.bfloat16()).dense() for expert in weight.data])
    with torch.inference_mode():
        wanted = oracle(input_ids=torch.tensor([IDS])).logits[0]
    model = load_model(path, weights="int8", attention=attention)
    assert model.facts.number_format == "bfloat16 with int8 weights"
    found = logits_of(model, IDS)
    off = (found - wanted).abs().amax(dim=1) > 0.04 * wanted.abs().max()
    assert int(off.sum()) <= (2 if family == "mixtral" else 0)  # near ties, other experts than in float32 are chosen


def test_a_prompt_in_parts_has_the_same_bits(checkpoint_of: Callable[[str], Path]) -> None:
    for attention in ("auto", "torch"):
        model = load_model(checkpoint_of("llama"), weights="int8", attention=attention)
        whole = logits_of(model, IDS)
        for length in (1, 2, 5, 13, 39):
            assert torch.equal(logits_of(model, IDS[:length]), whole[:length])


def test_nothing_is_held_twice(tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path,
        vocab_size=1360,
        draft_head=False,
        dtype="bfloat16",
        hidden_size=112,
        num_heads=7,
        kv_heads=7,
        tie_word_embeddings=False,
    )
    model = load_model(path, weights="int8")
    gc.collect()
    held = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter) and 112 in found.shape]
    wide = [tuple(tensor.shape) for tensor in held if tensor.dtype == torch.bfloat16 and tensor.dim() == 2]
    assert wide == [(1360, 112)]  # the embedding
    assert sum(tensor.dtype == torch.uint8 for tensor in held) > 2 * model.facts.num_layers
    with pytest.raises(RuntimeError, match="there is no draft head to rescore with"):
        model.logits_of(torch.zeros(1, 112), torch.zeros(1, 1, dtype=torch.int64))


def test_an_adapter_drafts_beside_them(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, adapter_rank=4, dtype="bfloat16")
    model = load_model(path, weights="int8")
    assert model.facts.adapters
    assert logits_of(model, IDS).isfinite().all()


def test_what_they_cannot_be_had_with_is_said(checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of("llama")
    with pytest.raises(InvalidSetting, match="multiplied in bfloat16; leave out --dtype float32"):
        load_model(path, weights="int8", dtype="float32")
    with pytest.raises(InvalidSetting, match="for CPUs, and the device is meta; leave out --weights int8"):
        load_model(path, weights="int8", device="meta")
    with pytest.raises(InvalidSetting, match="weights must be plain, int8 or fp8; got 'int4'"):
        load_model(path, weights="int4")
