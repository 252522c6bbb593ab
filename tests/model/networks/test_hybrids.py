"""Hybrids of attention and recurrent layers give what transformers gives, and the same bits in chunks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sweep import paged_logits
from safetensors.torch import load_file, save_file
from space_model.checkpoint.recurrent_layers import HYBRIDS
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import UnsupportedModel
from space_model.networks.network import StateRoom
from space_model.networks.recurrent import mixers
from space_model.space_model import SpaceModel
from space_server.machine.memory import choose_num_blocks
from tiny_checkpoints import MORE_FAMILIES, tiny_checkpoint, tiny_lora
from torch import Tensor
from transformers import AutoModelForCausalLM

IDS = [(7 * i + 3) % 100 + 16 for i in range(40)]
CHUNKS = (1, 1, 2, 3, 7, 26)
FAMILIES = [name for name, fields in MORE_FAMILIES.items() if fields["model_type"] in HYBRIDS]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "as many key heads as value heads": ("qwen3_next", {"linear_num_key_heads": 4}),
    "a convolution of two rows": ("qwen3_5", {"linear_conv_kernel_dim": 2}),
    "betas up to one": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "convolutions with biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5}),
    "no convolution biases": ("bamba", {"mamba_conv_bias": False, "mamba_proj_bias": True}),
    "no norm": ("falcon_h1", {"mamba_rms_norm": False}),
    "the norm before the gate": ("falcon_h1", {"mamba_norm_before_gate": True}),
    "no experts, and rotary positions": ("granite4", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "a least step": ("nemotron_h", {"time_step_min": 0.05, "use_conv_bias": False}),
    "one bias less, one more": ("jamba", {"mamba_conv_bias": False, "mamba_proj_bias": True, "num_experts": 1}),
    "neither gates nor norms": ("lfm3", {"use_attention_gate": False, "use_sandwich_norm": False}),
    "no biases but of linears": ("mamba", {"use_conv_bias": False, "use_bias": True, "tie_word_embeddings": False}),
    "residuals as weights, and one group": ("mamba2", {"residual_in_fp32": False, "n_groups": 1, "use_bias": True}),
}


@torch.inference_mode()
def dense(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return found


def check(folder: Path) -> SpaceModel:
    model = load_model(folder, dtype="float32")
    whole, wanted = paged_logits(model, IDS, (len(IDS),)), dense(folder)
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert torch.equal(paged_logits(model, IDS, CHUNKS), whole)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_transformers_and_chunks_have_the_same_bits(family: str, tmp_path: Path) -> None:
    check(tiny_checkpoint(tmp_path, family, num_masks=0))


@pytest.mark.parametrize("name", VARIANTS)
def test_so_are_those_of_what_configs_may_say(name: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[name]
    check(tiny_checkpoint(tmp_path, family, num_masks=0, **fields))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2", "jamba", "mamba2"])
@pytest.mark.parametrize("how", [{}, {"weights": "int8"}, {"attention": "torch"}], ids=str)
def test_in_bfloat16_chunks_have_the_same_bits(family: str, how: dict[str, str], tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, family, num_masks=0), dtype="bfloat16", **how)
    assert torch.equal(paged_logits(model, IDS, CHUNKS), paged_logits(model, IDS, (len(IDS),)))


def test_recurrent_layers_have_no_pages_and_states_are_counted(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, "qwen3_next", num_masks=0), dtype="float32")
    facts = model.facts
    kv = model.allocate_kv(5, 16, StateRoom(3, 4))
    assert [kv.attends(number) for number in range(3)] == [False, True, False]
    assert sum(tensor.nbytes for tensor in (*kv.keys, *kv.values)) == 5 * 16 * facts.kv_bytes_per_token
    assert facts.kv_bytes_per_token == 4 * 2 * 2 * 16  # one layer
    assert kv.states is not None
    assert kv.states.num_bytes == 3 * facts.state_bytes(4)
    of_a_layer = 4 * 16 * 24 + (4 + 3) * (2 * 2 * 16 + 4 * 24) + 4 * 2 * 4
    assert facts.state_bytes(4) == 2 * 2 * 4 * of_a_layer  # layers, versions, bytes


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_a_model_without_attention_has_pages_that_take_no_memory_and_any_window(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, num_masks=0)
    facts = load_model(path, dtype="float32").facts
    assert facts.window == 8192
    assert facts.kv_bytes_per_token == 0
    assert all(facts.states)
    num_blocks = choose_num_blocks(facts, block_size=16, amount=None, available=1)
    assert num_blocks == 64 * 8192 // 16
    model = load_model(path, dtype="float32", max_model_len=100_000)
    kv = model.allocate_kv(num_blocks, 16, StateRoom(3, 4))
    assert sum(tensor.nbytes for tensor in (*kv.keys, *kv.values)) == 0
    assert kv.states is not None
    assert kv.states.num_bytes == 3 * facts.state_bytes(4)
    assert model.facts.window == 100_000


def test_a_lora_acts_on_the_linears_of_recurrent_layers(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "base", "granite4", num_masks=0)
    lora = tiny_lora(tmp_path / "lora", path, linears=("in_proj", "out_proj"))
    model = load_model(path, dtype="float32", loras={"mine": lora})
    assert model.loras is not None
    (number,) = (one.number for one in model.loras.loaded.values())

    def logits(lora: int | None) -> Tensor:
        batch = ForwardBatch.build([Segment(IDS, 0, (0, 1, 2), lora=lora)], block_size=16, mask_ids=())
        return model.logits(model.forward(batch, model.allocate_kv(3, 16))[: len(IDS)])

    assert torch.equal(logits(None), paged_logits(model, IDS, (len(IDS),)))
    assert not torch.allclose(logits(number), logits(None), atol=1e-2)


def test_a_lora_on_every_linear_of_jamba_acts_as_merged_weights(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "base", "jamba", num_masks=0)
    lora = tiny_lora(tmp_path / "lora", path, linears=("in_proj", "x_proj", "dt_proj", "out_proj"))
    config = json.loads((lora / "adapter_config.json").read_text())
    pairs = load_file(lora / "adapter_model.safetensors")
    weights = load_file(path / "model.safetensors")
    for name in [name for name in pairs if name.endswith("lora_A.weight")]:
        merged = pairs[name.replace("lora_A", "lora_B")] @ pairs[name] * (config["lora_alpha"] / config["r"])
        weights[name.removeprefix("base_model.model.").replace("lora_A.", "")] += merged
    shutil.copytree(path, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    model = load_model(path, dtype="float32", loras={"mine": lora})
    assert model.loras is not None
    (number,) = (one.number for one in model.loras.loaded.values())
    batch = ForwardBatch.build([Segment(IDS, 0, (0, 1, 2), lora=number)], block_size=16, mask_ids=())
    found = model.logits(model.forward(batch, model.allocate_kv(3, 16))[: len(IDS)])
    wanted = dense(tmp_path / "merged")
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("family", "name", "wrong"),
    [
        ("qwen3_next", "_unit", lambda x: x),
        ("qwen3_5", "sigmoid", lambda x: x.sigmoid() * 1.01),
        ("bamba", "softplus", lambda x: torch.nn.functional.softplus(x) * 1.01),
        ("lfm2", "convolve", lambda x, weight, *rest: CONVOLVE(x, weight.flip(1), *rest)),
        ("falcon_h1", "selective_scan", lambda x, b, c, *rest: SCAN(x, c, b, *rest)),
        ("jamba", "channel_scan", lambda x, b, c, *rest: CHANNELS(x, c, b, *rest)),
    ],
)
def test_a_layer_that_computes_something_else_is_refused_at_the_start(
    family: str, name: str, wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path, family, num_masks=0)
    monkeypatch.setattr(mixers, name, wrong)
    with pytest.raises(UnsupportedModel, match="would be served wrong: layer 0"):
        load_model(path, dtype="float32")


CONVOLVE, SCAN, CHANNELS = mixers.convolve, mixers.selective_scan, mixers.channel_scan


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "falcon_h1", num_masks=0)
    written = (path / "config.json").read_text()
    (path / "config.json").write_text(written.replace('"mamba_d_ssm": 128', '"mamba_d_ssm": 96'))
    with pytest.raises(UnsupportedModel):
        load_model(path, dtype="float32")
