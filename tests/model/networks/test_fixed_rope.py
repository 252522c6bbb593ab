"""Angles that depend on a sequence's length, as transformers computes them for it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.networks import fixed_rope
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor": [1.0, 2.1, 3.3, 5.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
"""As Phi-4-mini's: three quarters of each head are rotated."""


def ids_of(count: int) -> list[int]:
    return [(7 * i + 3) % 100 + 16 for i in range(count)]


@torch.inference_mode()
def logits(model: SpaceModel, ids: list[int], *chunks: int, is_long: bool = False) -> Tensor:
    pages = list(range(-(-len(ids) // 16)))
    kv, parts, start = model.allocate_kv(len(pages), 16), [], 0
    for length in chunks or (len(ids),):
        segment = Segment(ids[start : start + length], start, pages, is_long=is_long)
        batch = ForwardBatch.build([segment], block_size=16, mask_ids=())
        parts.append(model.logits(model.forward(batch, kv)[:length]))
        start += length
    return torch.cat(parts)


@torch.inference_mode()
def dense(path: Path, ids: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    ],
    ids=["Qwen2.5", "Vicuna-16k"],
)
def test_a_factor_stretches_the_window_that_may_be_asked_for(rope: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2", window=64, rope_parameters=rope)
    assert load_model(path, dtype="float32").facts.window == 64
    model = load_model(path, dtype="float32", max_model_len=256)
    assert_equal(logits(model, ids_of(200)), dense(path, ids_of(200)))
    with pytest.raises(InvalidSetting, match=r"must lie in 1\.\.256"):
        load_model(path, max_model_len=257)


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, rope_parameters=DYNAMIC, window=64)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    own: dict[str, Any] = {"rope_parameters": LONG, "original_max_position_embeddings": 64}
    return tiny_checkpoint(tmp_path, "phi3", window=256, **own)


def test_a_dynamic_base_is_the_usual_one_in_the_trained_positions(dynamic: Path) -> None:
    model = load_model(dynamic, dtype="float32")
    assert model.facts.window == 64
    assert_equal(logits(model, ids_of(64)), dense(dynamic, ids_of(64)))


def test_beyond_them_it_is_that_of_the_window_asked_for_in_every_sequence(
    dynamic: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(dynamic, dtype="float32", max_model_len=200)
    assert "dynamic rotary positions (NTK) are served with the base of 200 positions in every sequence" in caplog.text
    ids = ids_of(200)
    whole = logits(model, ids)
    assert_equal(whole, dense(dynamic, ids))  # of 200 tokens transformers takes the base of 200
    assert torch.equal(logits(model, ids, 1, 5, 60, 134), whole)
    with pytest.raises(InvalidSetting, match=r"must lie in 1\.\.256"):
        load_model(dynamic, max_model_len=257)


def test_short_factors_serve_the_original_length(long: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(long, dtype="float32")
    assert model.facts.window == 64
    assert (
        "served with the short factors, for 64 positions; --max-model-len beyond 64 serves longer texts" in caplog.text
    )
    assert_equal(logits(model, ids_of(64)), dense(long, ids_of(64)))


def test_beyond_the_original_length_each_sequence_has_the_factors_of_its_length(
    long: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(long, dtype="float32", max_model_len=100)
    assert "served with the short factors up to 64 tokens, and with the long ones beyond" in caplog.text
    assert model.facts.rope_switch == 64
    ids = ids_of(100)
    whole, wanted = logits(model, ids, is_long=True), dense(long, ids)
    assert_equal(whole, wanted)
    assert torch.equal(logits(model, ids, 1, 5, 60, 34, is_long=True), whole)
    assert_equal(logits(model, ids[:64]), dense(long, ids[:64]))
    with pytest.raises(InvalidSetting, match=r"must lie in 1\.\.256"):
        load_model(long, max_model_len=257)


@torch.inference_mode()
def test_rows_of_both_in_a_step_have_the_bits_of_a_step_of_their_own(long: Path) -> None:
    model = load_model(long, dtype="float32", max_model_len=100)
    ids = ids_of(90)
    kv = model.allocate_kv(12, 16)
    both = [Segment(ids[:40], 0, range(3)), Segment(ids, 0, range(3, 9), is_long=True), Segment(ids[:9], 0, [9])]
    batch = ForwardBatch.build(both, block_size=16, mask_ids=())
    found = model.logits(model.forward(batch, kv))
    assert torch.equal(found[:40], logits(model, ids[:40]))
    assert torch.equal(found[40:130], logits(model, ids, is_long=True))
    assert torch.equal(found[130:139], logits(model, ids[:9]))


@pytest.mark.parametrize("name", ["su", "longrope"])
def test_configs_as_phi_3_was_published_with_are_read(name: str, long: Path) -> None:
    wanted = dense(long, ids_of(70))
    config = json.loads((long / "config.json").read_text())
    rope = config.pop("rope_parameters")
    factors = {kind: rope[kind] for kind in ("short_factor", "long_factor")}
    top = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rope_scaling": {"type": name, **factors}}
    (long / "config.json").write_text(json.dumps(config | top))
    model = load_model(long, dtype="float32", max_model_len=100)
    assert model.facts.rope_switch == 64
    assert_equal(logits(model, ids_of(70), is_long=True), wanted)


def test_phi_moe_has_the_factors_and_scales_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes Phi-MoE's long texts with the short factors; the published model file does not."""
    scales = {"short_mscale": 1.2, "long_mscale": 1.4}
    rope = {**LONG, **scales, "long_factor": [1.0, 1.4, 2.1, 3.3, 4.0, 5.0, 6.0, 8.0], "short_factor": [1.1] * 8}
    del rope["partial_rotary_factor"]
    own: dict[str, Any] = {"original_max_position_embeddings": 64}
    path = tiny_checkpoint(tmp_path, "mixtral", model_type="phimoe", window=256, rope_parameters=rope, **own)

    def published(_: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        kind = "long" if int(position_ids.max()) + 1 > 64 else "short"
        exponents = torch.arange(0, 16, 2).float() / 16
        turns = position_ids[..., None].float() / (torch.tensor(rope[f"{kind}_factor"]) * 10000.0**exponents)
        turns = torch.cat([turns, turns], dim=-1)
        return turns.cos() * rope[f"{kind}_mscale"], turns.sin() * rope[f"{kind}_mscale"]

    model = load_model(path, dtype="float32", max_model_len=100)
    assert model.facts.rope_switch == 64
    monkeypatch.setattr(PhimoeRotaryEmbedding, "forward", published)
    ids = ids_of(100)
    assert_equal(logits(model, ids, is_long=True), dense(path, ids))
    assert_equal(logits(model, ids[:64]), dense(path, ids[:64]))


def test_angles_by_layer_type_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    ropes = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    path = tiny_checkpoint(tmp_path, "gemma3", rope_parameters=ropes)
    with pytest.raises(UnsupportedModel, match="by 'dynamic'"):
        load_model(path)


def test_workers_with_bases_of_their_windows_are_told_apart(dynamic: Path) -> None:
    usual, whole, wide, wider = (load_model(dynamic, max_model_len=window).facts for window in (40, 64, 100, 200))
    assert usual.served_hash == whole.served_hash == whole.model_hash
    assert len({facts.served_hash for facts in (usual, wide, wider)}) == 3


def test_workers_that_all_switch_factors_are_alike_and_others_are_told_apart(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, both = (load_model(long, max_model_len=window).facts for window in (64, 100))
    assert short.served_hash == both.served_hash == short.model_hash  # up to the original length they are the same
    monkeypatch.setattr(fixed_rope, "_long_rope", lambda _: None)
    assert load_model(long, max_model_len=100).facts.served_hash != both.served_hash
