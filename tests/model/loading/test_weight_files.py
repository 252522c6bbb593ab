"""Weights go from mapped files to a device one by one, none is lost, and none is without a place."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

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
    give_back,
    let_go,
    mappings,
    one_below_the_other,
    send,
)
from space_model.loading import whole_model
from space_model.loading.load import load_model
from space_model.loading.sharded_model import read_part
from space_model.loading.whole_model import settle, stream_model
from space_model.model_error import CheckpointNotFound, UnsupportedModel
from space_model.networks import transformers_network
from space_model.networks.tensor_parallel import Share
from space_model.space_model import SpaceModel
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is mapped")

COUNT = 1 << 18


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights of a model.safetensors"
    path.write_bytes(torch.arange(COUNT, dtype=torch.int32).numpy().tobytes())
    return path


def mapped(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=COUNT, dtype=torch.int32)


@on_linux
def test_pages_that_were_read_go_back_and_can_be_read_again(file: Path) -> None:
    tensor = mapped(file)
    total = int(tensor.sum())
    assert sum(here.resident for here in mappings([file])) >= COUNT * 4
    assert give_back([file]) >= COUNT * 4
    assert sum(here.resident for here in mappings([file])) == 0
    assert int(tensor.sum()) == total


@on_linux
def test_what_was_written_stays(file: Path) -> None:
    tensor = mapped(file)
    tensor[0] = 7
    assert give_back([file]) == 0
    assert int(tensor[0]) == 7


@on_linux
def test_other_files_are_left_alone(file: Path, tmp_path: Path) -> None:
    tensor = mapped(file)
    assert int(tensor[1]) == 1
    assert give_back([tmp_path / "another"]) == 0
    assert sum(here.resident for here in mappings([file])) > 0


WAIT = 30.0


class SlowFile:
    """A file of one tensor, which is read when the test says so; it notes what it was asked in which order."""

    def __init__(self) -> None:
        self.asked, self.may_go_on = threading.Event(), threading.Event()
        self.story: list[str] = []

    def __call__(self, file: Path, framework: str) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.story.append("closed")

    def keys(self) -> list[str]:
        return ["weight"]

    def get_tensor(self, name: str) -> Tensor:
        self.asked.set()
        assert self.may_go_on.wait(WAIT)
        self.story.append("read")
        return torch.ones(2)


def test_a_file_is_closed_when_the_last_thread_has_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SlowFile()
    monkeypatch.setattr(weight_files, "safe_open", file)
    opened: list[WeightFiles] = []

    def fail() -> None:
        with WeightFiles.open(Checkpoint.open(llama)) as files:
            opened.append(files)
            reading.append(threads.submit(files.whole, "weight"))
            assert file.asked.wait(WAIT)
            raise UnsupportedModel("what another thread found")

    reading: list[Any] = []
    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(fail)
        assert file.asked.wait(WAIT)
        with pytest.raises(TimeoutError):
            failing.result(0.1)
        assert file.story == []
        file.may_go_on.set()
        with pytest.raises(UnsupportedModel, match="what another thread found"):
            failing.result(WAIT)
        assert torch.equal(reading[0].result(WAIT), torch.ones(2))
    assert file.story == ["read", "closed"]
    with pytest.raises(CheckpointNotFound, match="are closed; weight comes too late"):
        opened[0].whole("weight")


def test_a_tensor_that_no_file_has_is_named(llama: Path) -> None:
    with (
        WeightFiles.open(Checkpoint.open(llama)) as files,
        pytest.raises(UnsupportedModel, match=r"lack model\.nothing\.weight"),
    ):
        files.rows("model.nothing.weight", slice(0, 1))


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


def test_what_is_multiplied_by_at_once_shares_a_room(llama: Path) -> None:
    layer = streamed(llama, copies=True).model.layers[1]
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
    assert key.data_ptr() == query.data_ptr() + 4 * 3 * 4
    assert place("a.v_proj.weight", 3, 3) is None  # not as high as was said
    assert place("a.v_proj.weight", 2, 5) is None  # not as wide as the others
    assert place("b.q_proj.weight", 4, 3) is None  # has no neighbours
    assert place("a.o_proj.weight", 4, 3) is None
    assert place("a.q_proj.bias", 4) is None


def test_on_a_cpu_a_weight_of_the_files_own_dtype_is_not_copied(llama: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    with WeightFiles.open(checkpoint) as files:
        name = "model.layers.0.mlp.down_proj.weight"
        here = files.whole(name)
        assert WeightStream(files, CPU).whole(name, torch.float32).data_ptr() == here.data_ptr()
        assert WeightStream(files, CPU, copies=True).whole(name, torch.float32).data_ptr() != here.data_ptr()
        kept = WeightStream(files, torch.device("cuda"), as_kept=True).whole(name, torch.bfloat16)
        assert (kept.data_ptr(), kept.dtype) == (here.data_ptr(), torch.float32)


def test_what_was_left_where_it_was_settles_later_and_ties_stay(llama: Path) -> None:
    model = streamed(llama, torch.bfloat16, as_kept=True)
    assert model.dtype is torch.float32
    settle(model, torch.bfloat16, torch.device("meta"))
    assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.bfloat16, "meta")}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_long_load_says_how_far_it_is(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with WeightFiles.open(Checkpoint.open(llama)) as files, caplog.at_level(logging.INFO):
        stream = WeightStream(files, CPU, clock=lambda: now[0])
        for name in files.names[:12]:
            now[0] += 1.0
            stream.whole(name, None)
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" in ")[2] for line in said] == ["5 s", "10 s"]
    assert all(line.startswith("weights: 0.0 of 0.0 GB read") for line in said)


def test_a_weight_that_does_not_fit_is_an_error_with_its_name(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has the shape .* config.json makes it"):
        load_model(tmp_path)


@on_linux
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

    def packed(weight: Tensor, bias: Tensor | None, *, weights: str) -> nn.Module:
        assert not [one for one in seen if one() is not None]
        seen.append(weakref.ref(weight))
        return nn.Identity()

    monkeypatch.setattr(transformers_network, "cpu_linear", packed)
    base = nn.ModuleDict({"first": nn.Linear(2, 2), "inner": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    transformers_network.make_row_invariant(base, 1)
    assert len(seen) == 3


LAYER = "model.layers.1"


def with_tensors(path: Path, more: dict[str, Tensor]) -> Path:
    """The same folder, whose file has these tensors besides (or instead)."""
    file = path / "model.safetensors"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return path


def logits(model: SpaceModel) -> Tensor:
    rows = torch.randn(4, model.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    return model.logits(rows)


REFUSED = [
    (f"{LAYER}.mlp.down_proj.weight_scale", "quantised weights, and neither config.json nor a file beside it says how"),
    (f"{LAYER}.mlp.down_proj.qweight", "quantised weights"),
    (f"{LAYER}.self_attn.q_proj.lora_A.weight", "an adapter that is not merged .* merge_and_unload"),
    (f"{LAYER}.self_attn.q_proj.lora_B.default.weight", "an adapter that is not merged"),
    (f"{LAYER}.self_attn.q_proj.bias", "no such bias: fetch the config.json .*attention_bias"),
    ("lm_head.bias", "no such bias"),
    ("model.layers.2.mlp.up_proj.weight", "layer 2, and num_hidden_layers is 2"),
    ("score.weight", "scores or classifies"),
    (f"{LAYER}.self_attn.q_norm.weight", "of another architecture than config.json says"),
    ("encoder.weight", "of another architecture"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_tensor_without_a_place_is_named_with_the_cure(name: str, message: str, copy_of: Callable[..., Path]) -> None:
    path = with_tensors(copy_of(), {name: torch.zeros(3)})
    with pytest.raises(UnsupportedModel, match=rf"has {name} in model\.safetensors, for which .* no place.*{message}"):
        load_model(path)


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_rank_refuses_the_same(name: str, message: str, copy_of: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(with_tensors(copy_of(), {name: torch.zeros(3)}))
    with pytest.raises(UnsupportedModel, match=f"has {name} in .*{message}"):
        read_part(checkpoint, read_config(checkpoint), Share(1, 2), torch.float32, torch.device("cpu"))


LEFT_OUT = [
    f"{LAYER}.self_attn.rotary_emb.inv_freq",
    "rope_freqs",
    f"{LAYER}.attn.masked_bias",
    "model.position_ids",
    "model.vision_tower.layers.0.fc1.weight",
    "visual.blocks.0.attn.qkv.weight",
    "multi_modal_projector.linear.bias",
    "model.audio_tower.conv.weight",
    "mtp.layers.0.mlp.up_proj.weight",
]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_may_be_left_out_changes_nothing(name: str, copy_of: Callable[..., Path], llama: Path) -> None:
    path = with_tensors(copy_of(), {name: torch.randn(3)})
    assert torch.equal(logits(load_model(path)), logits(load_model(llama)))
    checkpoint = Checkpoint.open(path)
    read_part(checkpoint, read_config(checkpoint), Share(0, 2), torch.float32, torch.device("cpu"))


def test_as_many_mtp_layers_are_left_out_as_the_config_names(copy_of: Callable[..., Path]) -> None:
    path = with_tensors(copy_of(num_nextn_predict_layers=1), {"model.layers.2.eh_proj.weight": torch.zeros(3)})
    load_model(path)
    with_tensors(path, {"model.layers.3.eh_proj.weight": torch.zeros(3)})
    with pytest.raises(UnsupportedModel, match="layer 3, and num_hidden_layers is 2"):
        load_model(path)


def test_a_head_beside_a_tied_embedding_is_that_of_transformers(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", num_masks=0)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    tied = logits(load_model(path))
    with_tensors(path, {"lm_head.weight": embedding.clone()})
    assert torch.equal(logits(load_model(path)), tied)
    with_tensors(path, {"lm_head.weight": embedding.flip(0)})
    assert torch.equal(logits(load_model(path)), tied.flip(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{LAYER}.mlp.down_proj.weight", "model.norm.weight"])
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, value: float, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    tensor = load_file(path / "model.safetensors")[name]
    tensor.view(-1)[7] = value
    with_tensors(path, {name: tensor})
    with pytest.raises(UnsupportedModel, match=rf"{name} of .* has 1 of {tensor.numel()} numbers that are not finite"):
        load_model(path)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UnsupportedModel, match=r"1 of \d+ numbers that are not finite"):
        read_part(checkpoint, read_config(checkpoint), Share(0, 1), torch.float32, torch.device("cpu"))


def test_numbers_too_large_for_the_asked_dtype_are_refused_with_the_cure(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    name = f"{LAYER}.mlp.down_proj.weight"
    tensor = load_file(path / "model.safetensors")[name]
    tensor[0, 0] = 1e5
    with_tensors(path, {name: tensor})
    with pytest.raises(UnsupportedModel, match=r"not finite .* in float16.*finite with --dtype bfloat16"):
        load_model(path, dtype="float16")


def test_weights_that_are_integers_without_a_word_about_them_are_refused(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    name = f"{LAYER}.mlp.down_proj.weight"
    tensor = load_file(path / "model.safetensors")[name]
    with_tensors(path, {name: (tensor * 100).to(torch.int8)})
    with pytest.raises(UnsupportedModel, match=rf"{name} of .* is kept as int8, and config.json says nothing"):
        load_model(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy_of: Callable[..., Path]) -> None:
    path = with_tensors(copy_of(), {f"{LAYER}.mlp.down_proj.weight": torch.zeros(64, 127)})
    with pytest.raises(
        UnsupportedModel, match=rf"{LAYER}\.mlp\.down_proj\.weight of .* shape \(64, 127\); .* \(64, 128\)"
    ):
        load_model(path)
    assert json.loads((path / "config.json").read_text())["intermediate_size"] == 128
