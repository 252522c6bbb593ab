"""`--weights packed`: linears of AWQ, GPTQ and compressed-tensors stay at four or eight bits, and the model computes
with the file's own numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_testing import check_needs_a_cpu_worker_alone, write_mxfp4_experts, write_quantized
from safetensors.torch import load_file, save_file
from space_kernels.linear.compiled_experts import CompiledExperts
from space_kernels.linear.experts import RowInvariantExperts
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.precision import choose_weights
from space_model.space_model import SpaceModel
from space_server.config import parse
from space_server.startup.doctor import examine
from space_server.startup.model_need import ModelNeed
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor

Pair = Callable[..., tuple[Path, Path]]

IDS = [(7 * i + 1) % 128 for i in range(40)]
WORDS = ["--listen", "unix:/nowhere", "--device", "cpu", "--model"]
AS_THEY_COME, ONE_ORDER = "gptq 4 bits, inputs as they come", "gptq 4 bits, one order for all linears"


@pytest.fixture
def pair(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Pair:
    """A quantised checkpoint, and the same numbers in a dense one."""

    def make(kind: str, family: str = "llama", **more: Any) -> tuple[Path, Path]:
        packed, plain = tmp_path / "packed", tmp_path / "plain"
        write_quantized(checkpoint_of(family), packed, plain, kind, **more)
        return packed, plain

    return make


def logits_of(model: SpaceModel, ids: list[int], layout: DraftLayout | None = None) -> Tensor:
    """[rows, V]"""
    gated = 0 if model.drafting.adapters and layout is not None else None
    segment = Segment(ids, 0, [0, 1, 2], layout or DraftLayout.plain(), adapter=gated)
    masks = [5] * len(model.drafting.adapters)
    batch = ForwardBatch.build([segment], block_size=16, mask_ids=(), device=model.facts.device, adapter_masks=masks)
    return model.logits(model.forward(batch, model.allocate_kv(3, 16))[: batch.num_rows])


def check_near(found: Tensor, rounded: Tensor, exact: Tensor) -> None:
    """The logits are nearer to those of float32 than `rounded`, of the same numbers with `--weights int8`: it rounds
    inputs likewise, and the weights, too."""
    off, usual = ((one - exact).norm(dim=1) for one in (found, rounded))
    assert off.norm() < usual.norm()


def check_routed(model: SpaceModel, plain: Path) -> None:
    """As `check_near`, for a mixture, with each id as a text of its own: nine of ten are nearer. Rounding decides which
    of two experts with nearly the same score is taken, and in one text all rows behind would see that one's values."""

    def each_alone(model: SpaceModel) -> Tensor:
        return torch.cat([logits_of(model, [id_]) for id_ in IDS])

    found, rounded = each_alone(model), each_alone(load_model(plain, weights="int8"))
    exact = each_alone(load_model(plain, dtype="float32"))
    off, usual = ((one - exact).norm(dim=1).quantile(0.9) for one in (found, rounded))
    assert off < usual


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("awq", "llama"),
        ("awq", "gemma3"),
        (AS_THEY_COME, "qwen2"),
        (AS_THEY_COME, "phi3"),
        (ONE_ORDER, "llama"),
        (ONE_ORDER, "starcoder2"),
        ("int4 in groups", "qwen3"),
        ("int4 with zero points", "llama"),
    ],
)
def test_it_computes_with_the_files_numbers(kind: str, family: str, attention: str, pair: Pair) -> None:
    packed, plain = pair(kind, family)
    wanted = logits_of(load_model(plain, dtype="float32"), IDS)
    model = load_model(packed, weights="packed", attention=attention)
    assert model.facts.number_format == "bfloat16 with packed weights"
    found = logits_of(model, IDS)
    check_near(found, logits_of(load_model(plain, weights="int8", attention=attention), IDS), wanted)
    for length in (1, 2, 13, 39):
        assert torch.equal(logits_of(model, IDS[:length]), found[:length])


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["awq", ONE_ORDER])
def test_gated_adapters_take_the_inputs_in_the_order_of_the_linears(
    kind: str, attention: str, pair: Pair, tmp_path: Path
) -> None:
    packed, plain = pair(kind)
    adapters = {"code": tiny_adapter(tmp_path / "adapter", plain)}
    layout = DraftLayout.full(2, 3)
    rounded, wanted = (
        logits_of(load_model(plain, attention=attention, adapters=adapters, **how), IDS[:20], layout)
        for how in ({"weights": "int8"}, {"dtype": "float32"})
    )
    found = logits_of(load_model(packed, weights="packed", attention=attention, adapters=adapters), IDS[:20], layout)
    check_near(found[20:], rounded[20:], wanted[20:])
    bare = load_model(packed, weights="packed", attention=attention)
    assert torch.equal(found[:20], logits_of(bare, IDS[:20]))


def test_linears_are_held_in_four_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny_checkpoint(
        tmp_path / "source", vocab_size=1360, num_masks=0, hidden_size=128, num_heads=8, tie_word_embeddings=False
    )
    packed = tmp_path / "packed"
    write_quantized(source, packed, tmp_path / "plain", "awq")
    with caplog.at_level(logging.INFO):
        model = load_model(packed, weights="auto")
    assert "14 weights stay as the file has them (AWQ in groups of 32); no other is quantised" in caplog.text
    linears = 2 * (2 * 128 * 128 + 2 * 2 * 16 * 128 + 3 * 128 * 256)  # their weights
    network: Any = model._network
    names = ("query_key_value", "output", "gate_up", "down")
    held = sum(getattr(layer, name).weight.nbytes for layer in network._layers for name in names)
    assert held == linears * 4.75 / 8
    need = ModelNeed.asked(parse([*WORDS, str(packed)]), Checkpoint.open(packed))
    plain = ModelNeed.asked(
        parse([*WORDS, str(packed), "--weights", "plain", "--dtype", "bfloat16"]), Checkpoint.open(packed)
    )
    assert need.held == "packed"
    assert plain.weights - need.weights == linears * 2 - linears * 4.75 / 8
    assert need.head == plain.head == 2 * 1360 * 128


def test_linears_that_are_fused_and_have_inputs_in_several_orders_are_plain(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    packed, plain = pair("gptq 4 bits")
    with caplog.at_level(logging.INFO):
        found = logits_of(load_model(packed, weights="packed"), IDS)
    assert "4 weights stay as the file has them (GPTQ in groups of 32); 10 others are held as plain" in caplog.text
    rounded, wanted = (logits_of(load_model(plain, **how), IDS) for how in ({"weights": "int8"}, {"dtype": "float32"}))
    check_near(found, rounded, wanted)


def test_a_quantised_head_stays_so_too(pair: Pair) -> None:
    packed, plain = pair(AS_THEY_COME, head=True)
    rounded, wanted = (logits_of(load_model(plain, **how), IDS) for how in ({"weights": "int8"}, {"dtype": "float32"}))
    check_near(logits_of(load_model(packed, weights="packed"), IDS), rounded, wanted)


def test_it_is_the_default_on_a_cpu(pair: Pair, tmp_path: Path) -> None:
    packed, _ = pair("awq")
    for weights, held in (("auto", "bfloat16 with packed weights"), ("plain", "float32")):
        assert load_model(packed, weights=weights).facts.number_format == held
        (model,) = _models([str(packed), "--weights", weights])
        assert f"held in {held} (" in model
        assert "quantised (AWQ)" in model
    for more, held in ((["--dtype", "float32"], "float32"), (["--tensor-parallel", "2"], "float32")):
        (model,) = _models([str(packed), *more])
        assert f"held in {held} (" in model


def _models(words: list[str]) -> list[str]:
    return [finding.fact for finding in examine(parse([*WORDS, *words])) if finding.part == "model"]


@pytest.mark.parametrize("kind", ["gptq 8 bits, version 2", "fp8 per tensor", "bitsandbytes nf4"])
def test_other_formats_are_plain_by_default_and_refused_else(kind: str, pair: Pair) -> None:
    packed, _ = pair(kind)
    assert load_model(packed, weights="auto").facts.weights == "plain"
    with pytest.raises(InvalidSetting, match="The checkpoint is none; take --weights int4"):
        load_model(packed, weights="packed")


def check_logits(model: SpaceModel, plain: Path) -> None:
    """Fail unless the logits are near those of the plain weights, and rows do not depend on each other."""
    check_routed(model, plain)
    found = logits_of(model, IDS)
    for length in (1, 3, 17):
        assert torch.equal(logits_of(model, IDS[:length]), found[:length])


def saved_bytes(packed: Path) -> float:
    """Return what packed weights save by the estimate before loading."""
    need = ModelNeed.asked(parse([*WORDS, str(packed)]), Checkpoint.open(packed))
    plain = [*WORDS, str(packed), "--weights", "plain", "--dtype", "bfloat16"]
    return ModelNeed.asked(parse(plain), Checkpoint.open(packed)).weights - need.weights


@pytest.mark.parametrize(
    ("kind", "family"), [("awq", "qwen3_moe"), (ONE_ORDER, "mixtral"), ("int4 with zero points", "qwen3_moe")]
)
def test_experts_are_kept_in_their_bits(kind: str, family: str, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = pair(kind, family)
    with caplog.at_level(logging.INFO):
        model = load_model(packed, weights="auto")
    assert model.facts.weights == "packed"
    assert "32 weights stay as the file has them" in caplog.text  # 2 layers of 4 experts of 3, and of 4 in attention
    experts = [module for module in model._network.base.modules() if isinstance(module, CompiledExperts)]  # type: ignore[attr-defined]
    assert [len(each.down) for each in experts] == [4, 4]
    held = sum(linear.weight.nbytes for each in experts for linear in (*each.gate_up, *each.down))
    assert held <= 0.31 * 2 * sum(3 * 4 * each.width * each.hidden_size for each in experts)
    check_logits(model, plain)
    linears = 32 * 64 * 64 if family == "qwen3_moe" else 2 * (4 * 3 * 64 * 128 + 2 * 64 * 64 + 2 * 32 * 64)
    assert saved_bytes(packed) > 1.3 * linears


def test_experts_of_gpt_oss_are_kept_as_published(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_mxfp4_experts(checkpoint_of("gpt_oss"), packed, plain)
    with caplog.at_level(logging.INFO):
        model = load_model(packed, weights="auto")
    assert model.facts.weights == "packed"
    mixtures = [module for module in model._network.base.modules() if isinstance(module, RowInvariantExperts)]  # type: ignore[attr-defined]
    linears = [linear for each in mixtures for linear in (*each.gate_up, *each.down)]
    num_experts = sum(len(each.down) for each in mixtures)
    assert f"{3 * num_experts} weights stay as the file has them (MXFP4); no other is quantised" in caplog.text
    assert sum(linear.weight.nbytes for linear in linears) == sum(  # type: ignore[arg-type,misc]
        linear.in_features * linear.out_features * 4.5 / 8
        for linear in linears  # type: ignore[operator]
    )
    check_logits(model, plain)
    numbers = sum(linear.in_features * linear.out_features for linear in linears)  # type: ignore[operator,misc]
    assert saved_bytes(packed) == numbers * (2 - 4.5 / 8)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("int8 in groups", "qwen3_moe"),
        ("int8 per row", "qwen3_moe"),
        ("int8 per row", "mixtral"),
        ("gptq 8 bits, symmetric", "mixtral"),
    ],
)
def test_experts_are_kept_in_eight_bits(kind: str, family: str, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = pair(kind, family)
    with caplog.at_level(logging.INFO):
        model = load_model(packed, weights="auto")
    assert model.facts.number_format == "bfloat16 with packed weights"
    assert "32 weights stay as the file has them" in caplog.text
    assert "of eight bits); no other is quantised" in caplog.text
    experts = [module for module in model._network.base.modules() if isinstance(module, CompiledExperts)]  # type: ignore[attr-defined]
    assert [len(each.down) for each in experts] == [4, 4]
    linears = [linear for each in experts for linear in (*each.gate_up, *each.down)]
    held = sum(linear.weight.nbytes for linear in linears)
    numbers = sum(3 * 4 * each.width * each.hidden_size for each in experts)
    assert held == numbers * (1 if kind == "int8 per row" else 8.5 / 8)
    check_as_exact(model, plain)
    assert saved_bytes(packed) > 0.9 * numbers


@pytest.mark.parametrize(
    ("kind", "family"), [("int8 in groups", "qwen3"), ("int8 per row", "llama"), ("gptq 8 bits, symmetric", "phi3")]
)
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_linears_are_kept_in_eight_bits(kind: str, family: str, attention: str, pair: Pair) -> None:
    packed, plain = pair(kind, family)
    model = load_model(packed, weights="auto", attention=attention)
    assert model.facts.number_format == "bfloat16 with packed weights"
    check_as_exact(model, plain)


def check_as_exact(model: SpaceModel, plain: Path) -> None:
    """Fail unless the logits are off those of float32 by no more than those of the same numbers quantised anew, which
    changes numbers of eight bits little, and rows do not depend on each other."""
    found, rounded = logits_of(model, IDS), logits_of(load_model(plain, weights="int8"), IDS)
    wanted = logits_of(load_model(plain, dtype="float32"), IDS)
    off, usual = ((one - wanted).norm(dim=1).median() for one in (found, rounded))  # a row may choose another expert
    assert off < 1.1 * usual
    assert off < 0.05 * wanted.norm(dim=1).median()
    for length in (1, 3, 17):
        assert torch.equal(logits_of(model, IDS[:length]), found[:length])


def test_eight_bits_with_a_zero_point_are_plain(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = pair("gptq 8 bits, symmetric", "qwen3_moe")
    name = "model.layers.1.mlp.experts.2.up_proj.qzeros"
    tensors = load_file(packed / "model.safetensors")
    tensors[name][0, 0] += 1
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        load_model(packed, weights="packed")
    assert "20 weights stay as the file has them (GPTQ of eight bits); 12 others are held as plain" in caplog.text


def test_linears_in_mxfp4_are_kept_too(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = pair("mxfp4")
    with caplog.at_level(logging.INFO):
        found = logits_of(load_model(packed, weights="auto"), IDS)
    assert "14 weights stay as the file has them (MXFP4); no other is quantised" in caplog.text
    rounded, wanted = (logits_of(load_model(plain, **how), IDS) for how in ({"weights": "int8"}, {"dtype": "float32"}))
    check_near(found, rounded, wanted)


def test_experts_with_inputs_in_several_orders_are_plain(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = pair("gptq 4 bits", "qwen3_moe")
    with caplog.at_level(logging.INFO):
        model = load_model(packed, weights="packed")
    assert "24 others are held as plain numbers: model.layers.0.mlp.experts.0.down_proj.weight" in caplog.text
    check_routed(model, plain)


@pytest.mark.parametrize("size", [-1, 16])
def test_groups_of_any_multiple_of_32_or_one_for_all_inputs_are_kept(size: int, pair: Pair) -> None:
    packed, _ = pair(AS_THEY_COME)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["group_size"] = size
    (packed / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(packed).kept_as == ("GPTQ" if size == -1 else None)


def test_weights_of_eight_bits_are_made_of_the_dequantised_ones(pair: Pair) -> None:
    packed, plain = pair("awq")
    for weights in ("int8", "int4"):
        found, wanted = (load_model(path, weights=weights) for path in (packed, plain))
        assert found.facts.number_format == f"bfloat16 with {weights} weights"
        assert torch.equal(logits_of(found, IDS), logits_of(wanted, IDS))


def test_what_it_cannot_be_had_with_is_said(pair: Pair, llama: Path) -> None:
    packed, _ = pair("awq")
    with pytest.raises(InvalidSetting, match="The checkpoint is none; take --weights int4"):
        load_model(llama, weights="packed")
    with pytest.raises(InvalidSetting, match="GGUF file, and the checkpoint is none; take --weights packed"):
        load_model(packed, weights="gguf")
    check_needs_a_cpu_worker_alone(packed, "packed")


@pytest.mark.parametrize("weights", ["packed", "plain"])
def test_a_scale_that_is_not_finite_is_named(weights: str, pair: Pair) -> None:
    packed, _ = pair("awq")
    name = "model.layers.1.mlp.up_proj.scales"
    tensors = load_file(packed / "model.safetensors")
    tensors[name][0, 3] = torch.inf
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj.* not finite"):
        load_model(packed, weights=weights)


def test_a_weight_that_is_not_what_the_format_says_is_named(pair: Pair) -> None:
    packed, _ = pair("awq")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    save_file(tensors | {name: tensors[name][:, :-8].contiguous()}, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj of .* is no AWQ weight: its words"):
        load_model(packed, weights="packed")


@pytest.mark.parametrize("kept", ["AWQ", "GPTQ", "compressed-tensors"])
def test_where_four_bits_cannot_be_multiplied_the_default_is_plain(kept: str) -> None:
    cpu = torch.device("cpu")
    assert choose_weights("auto", "auto", cpu, kept=kept) == "packed"
    assert choose_weights("auto", "bfloat16", cpu, kept=kept) == "packed"
    assert choose_weights("auto", "float32", cpu, kept=kept) == "plain"
    assert choose_weights("auto", "auto", torch.device("cuda"), kept=kept) == "plain"
    assert choose_weights("auto", "auto", cpu, kept=kept, num_ranks=2) == "plain"
    assert choose_weights("auto", "auto", cpu, kept=kept, cpu_kernels="torch") == "plain"
    assert choose_weights("packed", "auto", cpu, kept=kept) == "packed"
    assert choose_weights("packed", "auto", cpu, kept="Q4_K") == "gguf"
