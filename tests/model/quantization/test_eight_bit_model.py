"""Models whose linears are held in eight bits: the numbers they compute with, what they hold, who is refused them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from space_kernels.dispatch import ops_for, triton_ops
from space_kernels.fp8 import FORMAT, Fp8
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.group_weights import INT4, INT4_HEAD, GroupWeights
from space_kernels.linear.int8_linear import Int8Weights
from space_kernels.linear.packed_linear import PackedLinear
from space_kernels.linear.rounded_inputs import rounded
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading import load
from space_model.loading.load import load_model
from space_model.loading.whole_model import quantize_to_fp8
from space_model.model_error import InvalidSetting
from space_model.networks.llama_cuda_network import LlamaCudaNetwork
from space_model.networks.llama_parts import LlamaSource
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

IDS = [(7 * i + 1) % 128 for i in range(40)]


def logits_of(model: SpaceModel, ids: list[int]) -> Tensor:
    """[ids, V]"""
    batch = ForwardBatch.build([Segment(ids, 0, [0, 1, 2])], block_size=16, mask_ids=(), device=model.facts.device)
    kv = model.allocate_kv(3, 16)
    return model.logits(model.forward(batch, kv)[: batch.num_rows])


def check_logits(
    path: Path, weights: str, attention: str, held: Callable[[Tensor, bool], Tensor], tolerance: float
) -> None:
    """Compare the served logits with those of transformers in float32 on the weights that `held` gives for a weight and
    whether it is the head's. `tolerance`: of the greatest logit."""
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head = oracle.get_output_embeddings()
    for module in oracle.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(held(module.weight, module is head))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0].bfloat16().float()),))
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            for weight in (module.gate_up_proj, module.down_proj):
                weight.data = torch.stack([held(expert, False) for expert in weight.data])
    with torch.inference_mode():
        wanted = oracle(input_ids=torch.tensor([IDS])).logits[0]
    model = load_model(path, weights=weights, attention=attention)
    assert model.facts.number_format == f"bfloat16 with {weights} weights"
    off = (logits_of(model, IDS) - wanted).abs().amax(dim=1) > tolerance * wanted.abs().max()
    # near ties: other experts than in float32 are chosen
    assert int(off.sum()) <= (2 if oracle.config.model_type == "mixtral" else 0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_int4_weights_are_those_of_their_groups(
    family: str, attention: str, checkpoint_of: Callable[[str], Path]
) -> None:
    def held(weight: Tensor, is_head: bool) -> Tensor:
        return GroupWeights.of(weight.bfloat16(), INT4_HEAD if is_head else INT4).dense()

    check_logits(checkpoint_of(family), "int4", attention, held, tolerance=0.06)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_int8_weights_are_the_nearest_ones(family: str, attention: str, checkpoint_of: Callable[[str], Path]) -> None:
    def held(weight: Tensor, is_head: bool) -> Tensor:
        return Int8Weights.of(weight.bfloat16()).dense()

    check_logits(checkpoint_of(family), "int8", attention, held, tolerance=0.04)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_prompt_in_parts_has_the_same_bits(llama: Path, weights: str) -> None:
    for attention in ("auto", "torch"):
        model = load_model(llama, weights=weights, attention=attention)
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
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    held = [found for found in tensors if 112 in found.shape]
    wide = [tuple(tensor.shape) for tensor in held if tensor.dtype == torch.bfloat16 and tensor.dim() == 2]
    assert wide == [(1360, 112)]  # the embedding
    panels = [found for found in tensors if found.dtype == torch.uint8 and found.shape[1:] == (16 * 128,)]
    assert len(panels) > 2 * model.facts.num_layers  # sixteen outputs by 112 inputs, padded to groups of 32
    with pytest.raises(RuntimeError, match="there is no draft head to rescore with"):
        model.logits_of(torch.zeros(1, 112), torch.zeros(1, 1, dtype=torch.int64))


def test_an_adapter_drafts_beside_them(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, adapter_rank=4, dtype="bfloat16")
    for weights in ("int8", "int4"):
        model = load_model(path, weights=weights)
        assert model.facts.adapters
        assert logits_of(model, IDS).isfinite().all()


def test_what_they_cannot_be_had_with_is_said(llama: Path) -> None:
    path = llama
    with pytest.raises(InvalidSetting, match="multiplied in bfloat16; leave out --dtype float32"):
        load_model(path, weights="int8", dtype="float32")
    with pytest.raises(InvalidSetting, match="for CPUs, and the device is meta; leave out --weights int8"):
        load_model(path, weights="int8", device="meta")
    with pytest.raises(InvalidSetting, match="auto, plain, int8, int4, packed, gguf or fp8; got 'int3'"):
        load_model(path, weights="int3")


def rounded_by_hand(path: Path) -> Tensor:
    """[ids, V] float32: transformers' model with the nearest weights in all linears but the head."""
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for module in oracle.base_model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Fp8.of(module.weight.bfloat16()).dense())
    with torch.inference_mode():
        wanted: Tensor = oracle(input_ids=torch.tensor([IDS])).logits[0]
    return wanted


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_it_computes_with_the_nearest_numbers(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of(family)
    wanted = rounded_by_hand(path)
    model = load_model(path, weights="fp8")
    assert model.facts.number_format == "bfloat16 with fp8 weights"
    found = logits_of(model, IDS)
    assert (found - wanted).abs().max() < 0.04 * wanted.abs().max()
    plain = logits_of(load_model(path, dtype="bfloat16"), IDS)
    assert (found - plain).abs().max() > 0.02 * wanted.abs().max()


def as_on_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch, *, compact: bool) -> SpaceModel:
    """Loaded with linears as a GPU holds them, in the networks that a GPU has."""

    def held(base: nn.Module, device: torch.device, bring: Callable[[Tensor], Tensor]) -> None:
        quantize_to_fp8(base, torch.device("cuda"), bring)

    def network(base: Any, facts: Any, ops: Any, adapters: Any, prefix: str, ranks: Any = None) -> Any:
        if not compact:
            return None
        assert LlamaCudaNetwork.fits(base)
        sizes = facts.num_heads, facts.kv_heads, facts.head_dim
        return LlamaCudaNetwork(LlamaSource(base, *sizes, adapters, prefix, ranks), ops_for("cpu", attention="torch"))

    monkeypatch.setattr(load, "quantize_to_fp8", held)
    monkeypatch.setattr(load, "compact_network", network)
    return load_model(path, weights="fp8", attention="torch")


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gpus_networks_say_so_too(
    family: str, compact: bool, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rounded_by_hand(checkpoint_of(family))
    model = as_on_a_gpu(checkpoint_of(family), monkeypatch, compact=compact)
    network: Any = model._network
    layers = network._layers if compact else list(network.base.modules())
    linears = [layers[0].query_key_value, layers[0].down] if compact else layers
    assert any(isinstance(linear, Fp8Linear) for linear in linears)
    assert not any(type(linear) is nn.Linear for linear in linears)
    found = logits_of(model, IDS)
    assert (found - wanted).abs().max() < 0.04 * wanted.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_keys_and_values_may_be_such_numbers_too(family: str, dtype: str, checkpoint_of: Callable[[str], Path]) -> None:
    plain, small = (load_model(checkpoint_of(family), dtype=dtype, kv_dtype=held) for held in ("auto", "fp8"))
    assert small.facts.number_format == f"{dtype} with fp8 keys and values"
    assert small.facts.kv_bytes_per_token * torch.empty((), dtype=plain.facts.dtype).itemsize == (
        plain.facts.kv_bytes_per_token
    )
    kv = small.allocate_kv(3, 16)
    assert {page.dtype for page in (*kv.keys, *kv.values)} == {FORMAT}
    assert sum(page.nbytes for page in (*kv.keys, *kv.values)) == 48 * small.facts.kv_bytes_per_token
    wanted, found = logits_of(plain, IDS), logits_of(small, IDS)
    off = float((found - wanted).abs().max() / wanted.abs().max())
    assert 1e-3 < off < 0.15
    for length in (1, 2, 13, 39):
        assert torch.equal(logits_of(small, IDS[:length]), found[:length])


def test_both_at_once_are_said(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_model(checkpoint_of("qwen3"), weights="fp8", kv_dtype="fp8")
    assert model.facts.number_format == "bfloat16 with fp8 weights and fp8 keys and values"
    with pytest.raises(InvalidSetting, match="kv_dtype must be auto or fp8; got 'int8'"):
        load_model(checkpoint_of("qwen3"), kv_dtype="int8")


@pytest.mark.parametrize("ops", ["references", "kernels"])
def test_a_gpu_keeps_them_too(ops: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of("qwen3")
    wanted = logits_of(load_model(path, dtype="float32", kv_dtype="fp8"), IDS[:19])
    if ops == "kernels":
        pytest.importorskip("triton")

    def network(base: Any, facts: Any, _: Any, adapters: Any, prefix: str, ranks: Any = None) -> Any:
        sizes = facts.num_heads, facts.kv_heads, facts.head_dim
        taken = ops_for("cpu") if ops == "references" else triton_ops(PackedLinear)
        return LlamaCudaNetwork(LlamaSource(base, *sizes, adapters, prefix, ranks), taken)

    monkeypatch.setattr(load, "compact_network", network)
    found = logits_of(load_model(path, dtype="float32", kv_dtype="fp8"), IDS[:19])
    # a key within rounding of the middle between two numbers may become either
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_what_fp8_weights_cannot_be_had_with_is_said(checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of("llama")
    with pytest.raises(InvalidSetting, match="multiplied in bfloat16; leave out --dtype float32"):
        load_model(path, weights="fp8", dtype="float32")
    with pytest.raises(InvalidSetting, match=r"MixtralExperts|Mixtral\w+, a mixture of experts, has none"):
        load_model(checkpoint_of("mixtral"), weights="fp8")
    ranks: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(InvalidSetting, match="leave out --weights fp8, or --tensor-parallel 2"):
        load_model(path, weights="fp8", ranks=ranks)
    with pytest.raises(InvalidSetting, match="has none; leave out --weights fp8"):
        quantize_to_fp8(nn.ModuleList([nn.LayerNorm(4)]), torch.device("cpu"))
