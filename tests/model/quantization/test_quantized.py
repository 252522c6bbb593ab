"""Quantised checkpoints say what the same numbers say in a dense one; others are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_testing import GROUP, KINDS, write_mxfp4_experts, write_quantized
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.quantized_formats import Bitsandbytes, Mxfp4Experts
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading import load, whole_model
from space_model.loading.load import load_model
from space_model.loading.whole_model import QuantizedWeights, open_weights, stays_packed
from space_model.model_error import UnsupportedModel
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Pair = Callable[..., tuple[Path, Path]]


@pytest.fixture
def pair(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Pair:
    """A quantised checkpoint, and the same numbers in a dense one."""

    def make(kind: str, family: str = "llama") -> tuple[Path, Path]:
        packed, plain = tmp_path / "packed", tmp_path / "plain"
        write_quantized(checkpoint_of(family), packed, plain, kind)
        return packed, plain

    return make


def logits(model: SpaceModel) -> Tensor:
    ids = torch.randint(16, 128, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    segment = Segment(ids, 0, range(3), DraftLayout.full(2, 3), adapter=0 if model.drafting.adapters else None)
    batch = ForwardBatch.build(
        [segment], block_size=16, mask_ids=model.facts.mask_ids, adapter_masks=[5] * len(model.drafting.adapters)
    )
    return model.logits(model.forward(batch, model.allocate_kv(3, 16))[: batch.num_rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_says_what_the_same_numbers_say(kind: str, pair: Pair) -> None:
    packed, plain = pair(kind)
    found, wanted = load_model(packed, dtype="float32"), load_model(plain, dtype="float32")
    assert torch.equal(logits(found), logits(wanted))


def test_the_numbers_are_near_the_original_ones(pair: Pair, llama: Path) -> None:
    original = load_file(llama / "model.safetensors")
    packed, _ = pair("int8 in groups")
    with open_weights(Checkpoint.open(packed)) as weights:
        assert set(weights.names) == set(original)
        for name, tensor in original.items():
            assert weights.shape(name) == tuple(tensor.shape)
            assert float((weights.whole(name) - tensor).abs().max()) < 0.01


def test_experts_kept_one_by_one_are_joined_as_dense_ones_are(pair: Pair) -> None:
    packed, plain = pair("awq", "qwen3_moe")
    assert torch.equal(logits(load_model(packed, dtype="float32")), logits(load_model(plain, dtype="float32")))


def test_gated_adapters_draft_on_a_quantised_base(pair: Pair, tmp_path: Path) -> None:
    packed, plain = pair("bitsandbytes nf4")
    adapters = {"code": tiny_adapter(tmp_path / "adapter", plain)}
    found, wanted = (load_model(path, dtype="float32", adapters=adapters) for path in (packed, plain))
    assert torch.equal(logits(found), logits(wanted))


def test_what_plain_numbers_cost_is_said(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = pair("awq")
    with caplog.at_level(logging.WARNING):
        load_model(packed, dtype="bfloat16")
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("space_model")]
    assert "14 AWQ weights are held as plain bfloat16" in said
    assert "MiB in memory for" in said
    assert "They stay packed on a GPU with gptqmodel installed, and on a CPU with --weights packed" in said


def test_a_rank_has_its_part_of_the_same_numbers(pair: Pair) -> None:
    packed, plain = pair("gptq 4 bits")
    name = "model.layers.0.self_attn.o_proj.weight"
    dense = load_file(plain / "model.safetensors")[name]
    with open_weights(Checkpoint.open(packed)) as weights:
        assert isinstance(weights, QuantizedWeights)
        assert name in weights
        assert torch.equal(weights.rows(name, slice(8, 24)), dense[8:24])
        assert torch.equal(weights.columns(name, slice(8, 24)), dense[:, 8:24])
        assert weights.rows("model.embed_tokens.weight", slice(2, 5)).shape == (3, 64)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "aqlm"}, "quantised as aqlm, which is not read. Use the checkpoint it was made from"),
        ({"quant_method": "", "bits": 4}, "quantised as .*'bits': 4.*, which is not read"),
        ({"quant_method": "awq", "version": "gemv", "bits": 4}, "AWQ gemv with 4 bits; gemm with 4 is read"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ gptq with 3 bits; gptq and gptq_v2 with 2, 4 or 8 are read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ marlin with 4 bits"),
        ({"quant_method": "gptq"}, "cannot be read as gptq: KeyError"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt as W4A8_AWQ; FP8 and NVFP4 are read. Use"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized, which is"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "keeps its weights sparse",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
            "packed as 'auto_round:exllamav2'; auto_round:auto_gptq and auto_round:auto_awq are read",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}, "x": {"bits": 8}}},
            "quantised by AutoRound with 4, 8 bits; one number",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*head.*": {}, "+:.*mlp.*": {"bits": 8}}},
            r"GPTQ with 4, 8 bits \(dynamic\); one number of bits for all is read. Use",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
            },
            r"turns its weights and activations \(transform_config, .*is not done here. Use the checkpoint",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}},
            "cannot be read as compressed-tensors: AttributeError.* Fetch the config.json of the original checkpoint",
        ),
    ],
)
def test_an_unread_format_is_refused_with_a_cure(section: Any, message: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "said", "kind"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "ModelOpt fp8",
        ),
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}, "gptq 4 bits"),
    ],
)
def test_quantisation_may_be_declared_in_another_file(file: str, said: Any, kind: str, pair: Pair) -> None:
    packed, plain = pair(kind)
    config = json.loads((packed / "config.json").read_text())
    section = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    assert section.get("group_size", GROUP) == GROUP
    (packed / file).write_text(json.dumps(said))
    found, wanted = load_model(packed, dtype="float32"), load_model(plain, dtype="float32")
    assert torch.equal(logits(found), logits(wanted))


def test_compressed_tensors_of_before_quantization_config_say_what_the_same_numbers_say(pair: Pair) -> None:
    packed, plain = pair("int4 in groups")
    config = json.loads((packed / "config.json").read_text())
    section = config.pop("quantization_config")
    del section["quant_method"]
    (packed / "config.json").write_text(json.dumps(config | {"compression_config": section}))
    found, wanted = load_model(packed, dtype="float32"), load_model(plain, dtype="float32")
    assert torch.equal(logits(found), logits(wanted))


@pytest.mark.parametrize("kind", ["awq", "gptq 4 bits", "int8 per row", "ModelOpt fp8", "bitsandbytes int8"])
def test_quantised_weights_of_which_no_file_says_how_are_refused(kind: str, pair: Pair) -> None:
    packed, _ = pair(kind)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.down_proj\..*quantised.*\(quantization_config\)"):
        load_model(packed)


def test_a_scale_of_which_no_weight_was_made_is_named(pair: Pair) -> None:
    packed, _ = pair("fp8 per tensor")
    tensors = load_file(packed / "model.safetensors")
    odd = {"model.layers.1.mlp.up_proj.weight_global_scale": torch.ones(1)}
    save_file(tensors | odd, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.1\.mlp\.up_proj\.weight_global_scale in model"):
        load_model(packed)
    odd = {"model.layers.1.self_attn.k_scale": torch.ones(1), "model.layers.1.mlp.up_proj.output_scale": torch.ones(1)}
    save_file(tensors | odd, packed / "model.safetensors", {"format": "pt"})
    load_model(packed)  # they say nothing of weights


def test_numbers_that_are_not_of_the_formats_kind_are_named(pair: Pair) -> None:
    packed, _ = pair("ModelOpt fp8")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(128, 32, dtype=torch.uint8)}, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"up_proj of .* is no ModelOpt FP8 weight: its numbers are torch.uint8"):
        load_model(packed)


def test_a_weight_that_is_not_what_the_format_says_is_named(pair: Pair) -> None:
    packed, _ = pair("awq")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj of .* is no AWQ weight"):
        load_model(packed)


@pytest.mark.parametrize("weights", ["plain", "packed"])
@pytest.mark.parametrize(
    ("kind", "said", "without", "message"),
    [
        ("awq", {"group_size": -1}, "none", r"AWQ weight: it has \d scales for \d+ inputs in groups of \d+"),
        (
            "gptq 4 bits",
            {"group_size": 64, "desc_act": False},
            "g_idx",
            r"GPTQ weight: it has \d scales for \d+ inputs",
        ),
        ("gptq 4 bits", {}, "g_idx", "GPTQ weight: it has no g_idx, which says in which group an input is"),
        ("gptq 8 bits, symmetric", {}, "g_idx", "GPTQ weight: it has no g_idx"),
        ("int4 in groups", {"actorder": "group"}, "none", "compressed-tensors weight: it has no weight_g_idx"),
        ("int8 in groups", {"actorder": "dynamic"}, "none", "compressed-tensors weight: it has no weight_g_idx"),
    ],
)
def test_inputs_of_unknown_groups_are_refused(
    kind: str, said: dict[str, Any], without: str, message: str, weights: str, pair: Pair
) -> None:
    packed, _ = pair(kind)
    config = json.loads((packed / "config.json").read_text())
    section = config["quantization_config"]
    (section["config_groups"]["group_0"]["weights"] if "config_groups" in section else section).update(said)
    (packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(packed / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}
    save_file(kept, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        load_model(packed, dtype="bfloat16", weights=weights)


def test_weights_stay_packed_on_a_gpu_whose_library_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    form, gpu = Bitsandbytes(), torch.device("cuda")
    for installed in (True, False):
        monkeypatch.setattr(whole_model, "has_kernels", lambda form, installed=installed: installed)
        assert stays_packed(form, gpu) is installed
        assert not stays_packed(form, torch.device("cpu"))


class Stand:
    """Stands in for a model class whose quantizer keeps weights packed: here, by ignoring that they were."""

    plain: Path
    error: Exception | None = None

    @classmethod
    def from_pretrained(cls, path: str, **keywords: Any) -> Any:
        assert keywords["config"].quantization_config["quant_method"] == "bitsandbytes"
        assert keywords["device_map"] == {"": torch.device("cpu")}
        if cls.error is not None:
            raise cls.error
        return AutoModelForCausalLM.from_pretrained(cls.plain, dtype=keywords["dtype"], output_loading_info=True)


@pytest.mark.parametrize("error", [None, ImportError("needs another library, too")])
def test_packed_weights_are_transformers_own_and_dense_where_it_cannot(
    error: Exception | None, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed, plain = pair("bitsandbytes int8")
    wanted = logits(load_model(plain, dtype="float32"))
    monkeypatch.setattr(Stand, "plain", plain, raising=False)
    monkeypatch.setattr(Stand, "error", error)
    monkeypatch.setattr(whole_model, "packed_class", lambda config: Stand)
    monkeypatch.setattr(load, "stays_packed", lambda form, device: True)
    with caplog.at_level(logging.INFO):
        found = load_model(packed, dtype="float32")
    assert torch.equal(logits(found), wanted)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("stay packed; bitsandbytes multiplies by them" in said) == (error is None)
    assert ("needs another library, too" in said) == (error is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_gpt_oss_are_dequantised_to_the_bits_of_transformers(dtype: torch.dtype) -> None:
    experts, outputs, groups = 2, 8, 16
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.arange(256, dtype=torch.uint8).view(experts, outputs, groups)  # every exponent
    found = torch.empty(experts, 32 * groups, outputs, dtype=dtype)
    Mxfp4Experts().write({"blocks": blocks, "scales": scales}.__getitem__, found)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.fixture
def experts_pair(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A gpt-oss as it is published, and the same numbers in a dense checkpoint."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_mxfp4_experts(checkpoint_of("gpt_oss"), packed, plain)
    return packed, plain


@torch.inference_mode()
def test_gpt_oss_as_published_says_what_transformers_says(experts_pair: tuple[Path, Path]) -> None:
    packed, plain = experts_pair
    found = load_model(packed, dtype="float32")
    assert torch.equal(logits(found), logits(load_model(plain, dtype="float32")))
    form = Mxfp4Config(dequantize=True)
    dense = AutoModelForCausalLM.from_pretrained(packed, quantization_config=form, dtype=torch.float32)
    ids = torch.randint(16, 128, (40,), generator=torch.Generator().manual_seed(0))
    batch = ForwardBatch.build([Segment(ids.tolist(), 0, range(3))], block_size=16, mask_ids=())
    given = found.logits(found.forward(batch, found.allocate_kv(3, 16))[:40])
    torch.testing.assert_close(given, dense(ids[None], use_cache=False).logits[0], atol=1e-4, rtol=0)


def test_the_shape_of_experts_is_known_without_their_numbers(experts_pair: tuple[Path, Path]) -> None:
    packed, plain = experts_pair
    name = "model.layers.1.mlp.experts.gate_up_proj"
    wanted = load_file(plain / "model.safetensors")[name]
    with open_weights(Checkpoint.open(packed)) as weights:
        assert weights.shape(name) == tuple(wanted.shape)
        assert weights.num_bytes == 0
        assert torch.equal(weights.whole(name), wanted)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("scales", "is no MXFP4 weight: it has .* scales for blocks of"),
        ("", "says that its weights .* MXFP4, and none"),
    ],
)
def test_experts_of_other_shapes_are_named(part: str, message: str, experts_pair: tuple[Path, Path]) -> None:
    packed, _ = experts_pair
    file = packed / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    if part:
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        tensors = {path: tensor for path, tensor in tensors.items() if not path.endswith(("_blocks", "_scales"))}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        load_model(packed)
