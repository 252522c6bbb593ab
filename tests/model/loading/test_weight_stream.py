"""Weights go from files to a device one by one; what is joined lies together from the start; nothing is lost."""

from __future__ import annotations

import logging
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from space_model.checkpoint import weight_files
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.checkpoint.weight_files import (
    JoinedRows,
    WeightFiles,
    WeightStream,
    let_go,
    mappings,
    one_below_the_other,
    send,
)
from space_model.loading import whole_model
from space_model.loading.load import load_model
from space_model.loading.whole_model import settle, stream_model
from space_model.model_error import UnsupportedModel
from space_model.networks import transformers_network
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")


def streamed(path: Path, dtype: torch.dtype = torch.float32, **how: bool) -> Any:
    checkpoint = Checkpoint.open(path)
    model, found = stream_model(checkpoint, read_config(checkpoint), dtype, CPU, **how)
    assert not found["missing_keys"]
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_copied_to_a_device_is_the_one_that_transformers_reads(
    family: str, dtype: torch.dtype, checkpoint_of: Callable[[str], Path]
) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=dtype)
    found = streamed(checkpoint_of(family), dtype, copies=True)
    assert type(found) is type(wanted)
    tensors = dict(found.named_parameters()) | dict(found.named_buffers())
    for name, tensor in (*wanted.named_parameters(), *wanted.named_buffers()):
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype is tensor.dtype


def test_a_tensor_of_many_pieces_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "PIECE", 64)
    for shape in ((37, 5), (3, 100), (1, 7), (200,), ()):
        found, place = torch.randn(shape), torch.zeros(shape, dtype=torch.bfloat16)
        send(found, place)
        assert torch.equal(place, found.bfloat16())


def test_what_is_multiplied_by_at_once_shares_a_room(checkpoint_of: Callable[[str], Path]) -> None:
    layer = streamed(checkpoint_of("llama"), copies=True).model.layers[1]
    for module, names in ((layer.self_attn, "qkv"), (layer.mlp, ("gate", "up"))):
        weights = [module.get_submodule(f"{name}_proj").weight.detach() for name in names]
        joined = one_below_the_other(weights)
        assert joined.data_ptr() == weights[0].data_ptr()
        assert torch.equal(joined, torch.cat(weights))


def test_weights_that_lie_elsewhere_or_in_another_order_are_copied() -> None:
    room = torch.randn(6, 4)
    first, second = room[:2], room[2:]
    assert one_below_the_other([first, second]).data_ptr() == room.data_ptr()
    for weights in ([second, first], [first, second.clone()], [first, room[3:]]):
        joined = one_below_the_other(weights)
        assert joined.data_ptr() != weights[0].data_ptr()
        assert torch.equal(joined, torch.cat(weights))


def test_a_room_is_for_known_heights_only() -> None:
    heights = {"a.q_proj.weight": 4, "a.k_proj.weight": 2, "a.v_proj.weight": 2, "b.q_proj.weight": 4}
    rooms = JoinedRows(heights.get)

    def place(name: str, *shape: int) -> Tensor | None:
        return rooms.place(name, torch.Size(shape), torch.float32, CPU)

    key, query = place("a.k_proj.weight", 2, 3), place("a.q_proj.weight", 4, 3)
    assert key is not None
    assert query is not None
    assert key.data_ptr() == query.data_ptr() + 4 * 3 * 4
    assert place("a.v_proj.weight", 3, 3) is None  # not as high as was said
    assert place("a.v_proj.weight", 2, 5) is None  # not as wide as the others
    assert place("b.q_proj.weight", 4, 3) is None  # has no neighbours
    assert place("a.o_proj.weight", 4, 3) is None
    assert place("a.q_proj.bias", 4) is None


def test_on_a_cpu_a_weight_of_the_files_own_dtype_is_not_copied(checkpoint_of: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(checkpoint_of("llama"))
    with WeightFiles.open(checkpoint) as files:
        name = "model.layers.0.mlp.down_proj.weight"
        here = files.whole(name)
        assert WeightStream(files, CPU).whole(name, torch.float32).data_ptr() == here.data_ptr()
        assert WeightStream(files, CPU, copies=True).whole(name, torch.float32).data_ptr() != here.data_ptr()
        kept = WeightStream(files, torch.device("cuda"), as_kept=True).whole(name, torch.bfloat16)
        assert (kept.data_ptr(), kept.dtype) == (here.data_ptr(), torch.float32)


def test_what_was_left_where_it_was_settles_later_and_ties_stay(checkpoint_of: Callable[[str], Path]) -> None:
    model = streamed(checkpoint_of("llama"), torch.bfloat16, as_kept=True)
    assert model.dtype is torch.float32
    settle(model, torch.bfloat16, torch.device("meta"))
    assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.bfloat16, "meta")}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_long_load_says_how_far_it_is(checkpoint_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with WeightFiles.open(Checkpoint.open(checkpoint_of("llama"))) as files, caplog.at_level(logging.INFO):
        stream = WeightStream(files, CPU, clock=lambda: now[0])
        for name in files.names[:12]:
            now[0] += 1.0
            stream.whole(name, None)
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" in ")[2] for line in said] == ["5 s", "10 s"]
    assert all(line.startswith("weights: 0.0 of 0.0 GB read") for line in said)


def test_a_weight_that_does_not_fit_is_an_error_with_its_name(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint_of("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has the shape .* config.json makes it"):
        load_model(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is mapped")
def test_only_views_of_files_are_let_go_of(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1024, 1024)}, file)
    with safe_open(file, framework="pt") as handle:
        weight, own = handle.get_tensor("weight"), torch.ones(1024, 1024)
        assert weight.sum() == own.sum() == 1 << 20
        let_go(own)
        let_go(weight)
        assert sum(here.resident for here in mappings([file])) < 64 << 10
        assert weight.sum() == own.sum() == 1 << 20


def test_the_class_is_the_one_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class First: ...

    class Second: ...

    class Config:
        architectures = ("Second",)

    monkeypatch.setattr(whole_model, "MODEL_FOR_CAUSAL_LM_MAPPING", {Config: (First, Second)})
    choose: Any = whole_model._class_of
    assert choose(Config()) is Second
    monkeypatch.setattr(Config, "architectures", None)
    assert choose(Config()) is First


def test_what_is_packed_is_gone_before_the_next_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def packed(weight: Tensor, bias: Tensor | None, *, int8: bool) -> nn.Module:
        assert not [one for one in seen if one() is not None]
        seen.append(weakref.ref(weight))
        return nn.Identity()

    monkeypatch.setattr(transformers_network, "cpu_linear", packed)
    base = nn.ModuleDict({"first": nn.Linear(2, 2), "inner": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    transformers_network.make_row_invariant(base, 1)
    assert len(seen) == 3
