"""A GGUF file is the model that it was made from, for router, worker, doctor and training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from doubles.gguf_files import write_gguf
from doubles.training import run, tiny_plan
from gguf import quants
from quantized_testing import write_mxfp4_experts
from safetensors.torch import load_file
from space_common.gguf.reader import GgufFile
from space_common.gguf.tensors import sources_of
from space_kernels.build.cpu_library import library_file, own_kinds
from space_model.checkpoint import gguf_weights
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.weight_files import WeightStream
from space_model.convert.convert import Wish, convert
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.loading.whole_model import open_weights
from space_model.model_error import CheckpointNotFound, ModelError, UnsupportedModel
from space_model.networks.tensor_parallel import Share
from space_model.precision import choose_dtype
from space_model.space_model import SpaceModel
from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.text.checkpoint import locate
from space_router.text.model_text import ModelText
from space_server.__main__ import choose_threads
from space_server.config import parse
from space_server.startup.doctor import examine
from space_server.startup.model_need import ModelNeed
from space_train.session import load_base
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

FAMILIES = ["llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3", "gemma"]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]
KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = Path(__file__).parent


def logits(model: SpaceModel) -> Tensor:
    ids = torch.randint(16, 128, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    segment = Segment(ids, 0, range(3), DraftLayout.full(2, 3), adapter=0 if model.drafting.adapters else None)
    batch = ForwardBatch.build(
        [segment],
        block_size=16,
        mask_ids=model.facts.mask_ids or (4, 5, 6),
        adapter_masks=[5] * len(model.drafting.adapters),
    )
    return model.logits(model.forward(batch, model.allocate_kv(3, 16))[: batch.num_rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_and_logits_are_the_originals(
    family: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    if family in ("smollm3", "gemma"):
        sizes = {"num_layers": 5} if family == "smollm3" else {}  # whose fourth has no positions
        source = tiny_checkpoint(tmp_path / "source", "llama", model_type=family, **sizes)
    else:
        source = checkpoint_of(family)
    original = load_file(source / "model.safetensors")
    file = write_gguf(source, tmp_path / "x.gguf")
    with open_weights(Checkpoint.open(file)) as weights:
        assert set(weights.names) == set(original)
        for name, tensor in original.items():
            assert weights.shape(name) == tuple(tensor.shape)
            # a norm of Gemma is kept with 1 added, which costs its last bits
            assert torch.allclose(weights.whole(name), tensor, rtol=0, atol=1e-7), name
    ours, theirs = load_model(file, dtype="float32"), load_model(source, dtype="float32", num_masks=0)
    assert (ours.facts.kv_heads, ours.facts.head_dim, ours.facts.window) == (2, 16, 512)
    assert float((logits(ours) - logits(theirs)).abs().max()) < 1e-5


@pytest.mark.parametrize("share", [1.0, 0.75], ids=["phi-3", "phi-4-mini"])
def test_factors_of_longrope_are_the_originals(share: float, tmp_path: Path) -> None:
    count = int(8 * share)
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2][:count],
        "long_factor": [1.0, 1.4, 2.1, 3.3, 4.0, 5.0, 6.0, 8.0][:count], "partial_rotary_factor": share,
    }  # fmt: skip
    source = tiny_checkpoint(tmp_path / "source", "phi3_longrope", num_masks=0, rope_parameters=rope)
    file = write_gguf(source, tmp_path / "x.gguf")
    config = Checkpoint.open(file).config
    assert {"partial_rotary_factor": 1.0, **config["rope_parameters"]}.items() >= rope.items()
    assert config["original_max_position_embeddings"] == 256
    assert load_model(file, dtype="float32").facts.window == 256
    ours, theirs = (load_model(one, dtype="float32", weights="plain", max_model_len=512) for one in (file, source))
    assert ours.facts.rope_switch == theirs.facts.rope_switch == 256
    for length in (200, 300):
        ids = torch.randint(16, 128, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        both = []
        for model in (ours, theirs):
            segment = Segment(ids, 0, range(20), is_long=length > 256)
            batch = ForwardBatch.build([segment], block_size=16, mask_ids=())
            both.append(model.logits(model.forward(batch, model.allocate_kv(20, 16))[:length]))
        assert float((both[0] - both[1]).abs().max()) < 1e-5


@pytest.mark.parametrize("damage", ["left out", "cut", "zero"])
def test_factors_of_longrope_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "phi3_longrope", num_masks=0)
    file = write_gguf(
        source, tmp_path / "x.gguf", rope_factors={"left out": (), "cut": (1.0,) * 7, "zero": (0.0,) * 8}[damage]
    )
    with pytest.raises(UnsupportedModel, match=r"numbers above 0 in rope_factors_long\.weight where 8 frequencies are"):
        load_model(file)


def mixture(folder: Path, family: str) -> Path:
    """A tiny mixture of experts, each with a width of its own where the family has one."""
    if family == "gpt_oss":
        return tiny_checkpoint(folder, family, num_masks=0, dtype="bfloat16")
    if family in ("mixtral", "qwen3_moe"):  # as published, and as llama.cpp takes it for granted
        fields = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
        return tiny_checkpoint(folder, family, num_masks=0, tie_word_embeddings=False, dtype="bfloat16", **fields)
    more = {"shared_expert_intermediate_size": 96} if family == "qwen2_moe" else {"intermediate_size": 32}
    return tiny_checkpoint(folder, "qwen3_moe", model_type=family, num_masks=0, dtype="bfloat16", **more)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_and_logits_are_the_originals(family: str, tmp_path: Path) -> None:
    source = mixture(tmp_path / "source", family)
    original = load_file(source / "model.safetensors")
    file = write_gguf(source, tmp_path / "x.gguf")
    with open_weights(Checkpoint.open(file)) as weights:
        assert set(weights.names) == set(original)
        for name, tensor in original.items():
            assert torch.equal(weights.whole(name), tensor.float()), name
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(16, 128, (30,), generator=torch.Generator().manual_seed(0))
    ours = load_model(file, dtype="float32", weights="plain")
    batch = ForwardBatch.build(
        [Segment(ids.tolist(), 0, range(3), DraftLayout.full(0, 1))], block_size=16, mask_ids=(4,)
    )
    found = ours.logits(ours.forward(batch, ours.allocate_kv(3, 16))[:30])
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
    assert float((found - wanted).abs().max()) < 1e-4


def test_experts_stay_in_their_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(mixture(tmp_path / "source", "qwen2_moe"), tmp_path / "x.gguf", "Q8_0")
    convert(file, tmp_path / "plain", Wish(dtype=torch.bfloat16))
    for weights in ("plain", "int8"):
        assert torch.equal(
            logits(load_model(file, weights=weights)), logits(load_model(tmp_path / "plain", weights=weights))
        )
    with caplog.at_level(logging.INFO):
        kept = logits(load_model(file, weights="auto"))
    # two layers, each 12 weights of experts, 3 of the shared one and 4 of attention; and the head
    assert "39 weights stay as the file has them (Q8_0); the embedding's rows are looked up in it" in caplog.text
    plain = logits(load_model(file, weights="plain"))
    # of rows; rounded inputs let a few choose another expert
    assert float(((kept - plain).norm(dim=1) / plain.norm(dim=1)).median()) < 0.1


def test_gpt_oss_in_blocks_is_what_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Experts in MXFP4 and the rest in bfloat16, as a GGUF and as safetensors: the same bits."""
    source, published = mixture(tmp_path / "source", "gpt_oss"), tmp_path / "published"
    write_mxfp4_experts(source, published, tmp_path / "plain")
    file = write_gguf(tmp_path / "plain", tmp_path / "x.gguf", "BF16", experts="MXFP4")
    with caplog.at_level(logging.INFO):
        kept = load_model(file, weights="auto")
    assert kept.facts.number_format == "bfloat16 with gguf weights"
    assert "24 weights stay as the file has them (MXFP4); no other is quantised" in caplog.text
    assert torch.equal(logits(kept), logits(load_model(published, weights="auto")))
    dense = load_model(file, weights="plain", dtype="float32")
    assert torch.equal(logits(dense), logits(load_model(published, weights="plain", dtype="float32")))
    held = gguf_weights.held_bytes(GgufFile.open(file), Checkpoint.open(file).config, fuses=False)
    layer = {"gate_up_proj": 4 * 2 * 128 * 64, "down_proj": 4 * 64 * 128}
    assert held == {
        f"model.layers.{number}.mlp.experts.{name}": numbers * 4.5 / 8
        for number in range(2)
        for name, numbers in layer.items()
    }
    with open_weights(Checkpoint.open(file)) as weights, open_weights(Checkpoint.open(tmp_path / "plain")) as plain:
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias"):
            name = f"model.layers.1.mlp.experts.{name}"
            assert torch.equal(weights.rows(name, slice(1, 3)), plain.whole(name).float()[1:3])


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("blk.0.attn_sinks.weight", r"lacks blk\.0\.attn_sinks\.weight"),
        ("blk.1.ffn_up_exps.bias", r"lacks blk\.1\.ffn_up_exps\.bias"),
        (None, r"ffn_gate_exps\.weight in .* has 4 experts, and the metadata says 8"),
    ],
)
def test_a_gpt_oss_that_is_not_whole_is_refused(without: str | None, message: str, tmp_path: Path) -> None:
    source = mixture(tmp_path / "source", "gpt_oss")
    if without is None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(write_gguf(source, tmp_path / "x.gguf", without=without))


def test_experts_that_are_not_as_many_as_the_metadata_says_are_refused(tmp_path: Path) -> None:
    source = mixture(tmp_path / "source", "mixtral")
    file = write_gguf(source, tmp_path / "x.gguf", without="blk.0.ffn_up_exps.weight")
    with pytest.raises(UnsupportedModel, match=r"lacks blk\.0\.ffn_up_exps\.weight"):
        load_model(file)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    with pytest.raises(UnsupportedModel, match=r"ffn_gate_exps\.weight in .* has 4 experts, and the metadata says 8"):
        load_model(write_gguf(source, tmp_path / "y.gguf"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_numbers_in_blocks_are_those_that_transformers_reads(
    family: str, kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint_of(family)
    if family == "qwen3":  # of which transformers reads no other size of heads
        source = tiny_checkpoint(tmp_path / "source", "qwen3", head_dim=128, num_masks=0)
    file = write_gguf(source, tmp_path / "x.gguf", kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    with open_weights(Checkpoint.open(file)) as weights:
        for name in weights.names:
            assert torch.equal(weights.whole(name), theirs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_numbers_is_held_as_it_is_converted(kind: str, llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", kind)
    convert(file, tmp_path / "plain", Wish(dtype=torch.float32))
    for dtype in ("float32", "bfloat16"):
        found, wanted = load_model(file, dtype=dtype), load_model(tmp_path / "plain", dtype=dtype)
        assert torch.equal(logits(found), logits(wanted))
    original = load_file(llama / "model.safetensors")
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        step = float(tensor.abs().max()) * {"Q8": 1 / 127, "Q5": 1 / 15, "Q4": 1 / 7}.get(kind[:2], 1 / 256)
        assert float((tensor - original[name]).abs().max()) <= step


def test_k_quants_are_the_numbers_that_llama_cpp_makes_of_them() -> None:
    file = GgufFile.open(K_QUANTS / "k_quants.gguf")
    wanted: dict[str, dict[str, str]] = json.loads((K_QUANTS / "k_quants.json").read_text())
    assert {entry["type"] for entry in wanted.values()} == {"F32", "Q4_K", "Q5_K", "Q6_K", "Q5_0"}
    checkpoint = Checkpoint.open(K_QUANTS / "k_quants.gguf")
    with open_weights(checkpoint) as weights:
        for name, source in sources_of(file, checkpoint.config).items():
            numbers = weights.whole(name)
            if source.turned_heads:  # back to llama.cpp's order of rows
                halves = numbers.reshape(source.turned_heads, 2, -1, *numbers.shape[1:])
                numbers = halves.transpose(1, 2).reshape(numbers.shape)
            digest = hashlib.sha256(numbers.contiguous().numpy().tobytes()).hexdigest()
            assert digest == wanted[source.parts[0].tensor.name]["sha256"], name


def test_k_quants_are_served(tmp_path: Path) -> None:
    convert(K_QUANTS / "k_quants.gguf", tmp_path / "plain", Wish())
    found, wanted = load_model(K_QUANTS / "k_quants.gguf"), load_model(tmp_path / "plain")
    assert torch.equal(logits(found), logits(wanted))


def test_a_rank_reads_its_part_of_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q8_0")
    with open_weights(Checkpoint.open(file)) as weights:
        for rank in range(2):
            share = Share(rank, 2)
            for name in ("q_proj", "k_proj", "v_proj"):
                path = f"model.layers.1.self_attn.{name}.weight"
                whole = weights.whole(path)
                assert torch.equal(weights.rows(path, share.of(len(whole))), whole[share.of(len(whole))])
            path = "model.layers.0.mlp.down_proj.weight"
            whole = weights.whole(path)
            assert torch.equal(weights.columns(path, share.of(whole.shape[1])), whole[:, share.of(whole.shape[1])])
        assert weights.num_bytes < 4 * weights.size


def test_joined_and_split_attention_are_read_either_way(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp has converters that join what others split."""
    plain = {}
    for family in ("llama", "phi3"):
        file = write_gguf(checkpoint_of(family), tmp_path / f"{family}.gguf", "Q8_0")
        with open_weights(Checkpoint.open(file)) as weights:
            plain[family] = {name: weights.whole(name) for name in weights.names}
        other = write_gguf(checkpoint_of(family), tmp_path / f"{family}-other.gguf", "Q8_0", swap_attention=True)
        with open_weights(Checkpoint.open(other)) as weights:
            assert set(weights.names) == set(plain[family])
            for name, tensor in plain[family].items():
                assert torch.equal(weights.whole(name), tensor), name


def test_no_tensor_is_in_memory_twice(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q4_0")
    monkeypatch.setattr(gguf_weights, "PIECE", 512)
    made: list[int] = []
    dequantize = quants.dequantize

    def counted(data: Any, kind: Any) -> Any:
        numbers = dequantize(data, kind)
        made.append(numbers.size)
        return numbers

    monkeypatch.setattr(quants, "dequantize", counted)
    with open_weights(Checkpoint.open(file)) as weights:
        stream = WeightStream(weights, torch.device("cpu"))
        for name in weights.names:
            assert stream.whole(name, torch.bfloat16).dtype is torch.bfloat16
    assert max(made) <= 512
    assert sum(made) == GgufFile.open(file).kinds["Q4_0"]


def test_what_plain_numbers_cost_is_said(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q4_0")
    with caplog.at_level(logging.INFO):
        model = load_model(file, dtype="bfloat16")
    assert "15 weights of Q4_0 are held as plain bfloat16" in caplog.text
    assert model.facts.name == str(file)


def test_the_dtype_is_one_that_loses_nothing_of_the_blocks(llama: Path, tmp_path: Path) -> None:
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")):
        checkpoint = Checkpoint.open(write_gguf(llama, tmp_path / f"{kind}.gguf", kind))
        assert checkpoint.config["dtype"] == dtype
        assert checkpoint.kept_as == ("Q8_0" if kind == "Q8_0" else None)
    gpu = torch.device("cuda")
    assert choose_dtype("auto", gpu, torch.bfloat16, kept="Q8_0") == (torch.bfloat16, "finer than the steps of Q8_0")


def test_a_folder_with_one_file_is_that_file(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_gguf(llama, folder / "x.gguf", "Q8_0")
    (folder / "mmproj-x.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("x")
    found, alone = Checkpoint.open(folder), Checkpoint.open(file)
    assert (found.folder, found.config, found.weights) == (alone.folder, alone.config, alone.weights)
    assert found.model_hash() == alone.model_hash()
    shutil.copy(file, folder / "y.gguf")
    with pytest.raises(CheckpointNotFound, match=r"holds 2 GGUF files: x.gguf, y.gguf. Name one of them: .*x\.gguf"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", "There is no file .*absent.gguf"),
        ("model-00001-of-00003.gguf", r"part 1 of 3.*llama-gguf-split --merge model-00001-of-00003.gguf model.gguf"),
        ("notes.txt", r"is a file; give the folder of a checkpoint, or a GGUF file"),
        ("pickle.gguf", "is no GGUF file: it begins with"),
    ],
)
def test_a_file_that_is_no_model_is_refused_with_the_cure(name: str, message: str, tmp_path: Path) -> None:
    for other in ("model-00001-of-00003.gguf", "notes.txt"):
        (tmp_path / other).write_bytes(b"GGUF")
    (tmp_path / "pickle.gguf").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(tmp_path / name)


def test_an_adapter_folder_may_name_a_file_as_its_base(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q8_0")
    convert(file, tmp_path / "plain", Wish(dtype=torch.float32))
    folder = tiny_adapter(tmp_path / "adapter", tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    wanted = logits(load_model(folder, dtype="float32"))
    for base in (str(file), "../x.gguf"):
        (folder / "config.json").write_text(json.dumps({"space": config["space"] | {"base": base}}))
        model = load_model(folder, dtype="float32")
        assert torch.equal(logits(model), wanted)
        assert (model.facts.num_masks, model.facts.has_draft_head) == (5, True)
    beside = load_model(file, dtype="float32", adapters={"code": tmp_path / "adapter"})
    assert torch.equal(logits(beside), wanted)


def test_a_space_section_beside_the_file_is_its_own(llama: Path, tmp_path: Path) -> None:
    """As training writes it, whose base did not move."""
    folder = tiny_adapter(tmp_path / "trained", llama)
    config = json.loads((folder / "config.json").read_text())
    del config["space"]["base"]
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(llama, folder / "x.gguf")
    model = load_model(folder, dtype="float32")
    wanted = load_model(tiny_adapter(tmp_path / "other", llama), dtype="float32")
    assert torch.equal(logits(model), logits(wanted))
    convert(folder, tmp_path / "converted", Wish())
    assert torch.equal(logits(load_model(tmp_path / "converted", dtype="float32")), logits(wanted))


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_in_eight_bits_are_those_of_the_converted_model(weights: str, llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q8_0")
    convert(file, tmp_path / "plain", Wish(dtype=torch.bfloat16))
    found, wanted = load_model(file, weights=weights), load_model(tmp_path / "plain", weights=weights)
    assert torch.equal(logits(found), logits(wanted))


WORDS = ["--listen", "unix:/nowhere", "--device", "cpu", "--model"]


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path) -> Iterator[None]:
    """Texts of this test's files, and variables that a worker sets are of this test. The compiled library is shared."""
    (tmp_path / "cache" / "spaceserve").mkdir(parents=True)
    for kind in own_kinds()[:1]:
        library = library_file(kind)
        (tmp_path / "cache" / "spaceserve" / library.name).symlink_to(library)
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        yield


@pytest.fixture
def file(llama: Path, tmp_path: Path) -> Path:
    return write_gguf(llama, tmp_path / "x.Q8_0.gguf", "Q8_0")


def test_router_and_worker_read_the_same_texts(file: Path, llama: Path, tmp_path: Path) -> None:
    text = ModelText.load(ServeConfig(model=str(file)))
    checkpoint = Checkpoint.open(file)
    assert locate(str(file)) == checkpoint.folder
    assert text.name == "x.Q8_0"
    assert text.chat_template is not None
    assert text.tokenizer.encode("the") == [105, *text.tokenizer.encode("e")]
    assert checkpoint.tokenizer_hash() == load_model(file).facts.tokenizer_hash != ""
    adapter = tiny_adapter(tmp_path / "adapter", llama)
    (adapter / "config.json").write_text(json.dumps({"space": {"base": "../x.Q8_0.gguf"}}))
    assert locate(str(adapter)) == checkpoint.folder
    assert locate(str(tmp_path / "adapter" / ".." / "x.Q8_0.gguf")) == checkpoint.folder


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("folder/x.Q8_0.gguf", "x.Q8_0"),
        ("owner/repo:sub/x.gguf", "x"),
        ("owner/repo:X.GGUF", "X"),
        ("owner/repo", "repo"),
        ("folder/a.b", "a.b"),
    ],
)
def test_the_served_name_is_the_file_without_its_ending(model: str, name: str) -> None:
    assert ServeConfig(model=model).model_name == name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("absent/x.gguf", "no such folder or file"),
        ("two", r"holds 2 GGUF files: a.gguf, b.gguf. Name one of them"),
        ("broken.gguf", "is empty"),
    ],
)
def test_the_router_refuses_what_the_worker_would(model: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for broken in ("two/a.gguf", "two/b.gguf", "broken.gguf"):
        (tmp_path / broken).write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        locate(str(tmp_path / model))


def test_doctor_says_what_the_file_holds_and_that_it_fits(file: Path) -> None:
    reported = list(examine(parse([*WORDS, str(file)])))
    assert [finding.fact for finding in reported if finding.state == "fail"] == []
    (model,) = [finding.fact for finding in reported if finding.part == "model"]
    assert "kept as Q8_0, F32 (GGUF)" in model


@pytest.mark.parametrize("words", [["--weights", "plain"], ["--dtype", "float32"], ["--weights", "int8"]])
def test_memory_is_counted_as_the_numbers_are_held(words: list[str], file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "plain", Wish())
    needs = []
    for model in (file, tmp_path / "plain"):
        config = parse([*WORDS, str(model), *words])
        needs.append(dataclasses.replace(ModelNeed.asked(config, Checkpoint.open(model)), small=()))
    rows = 128 * 64 * needs[1].dtype.itemsize  # the embedding's, which are looked up in the file
    assert needs[0] == dataclasses.replace(needs[1], weights=needs[1].weights - rows)


def test_threads_are_chosen_by_the_size_in_memory(file: Path) -> None:
    assert choose_threads(file) == 1
    with mock.patch("space_server.__main__.SMALL_WEIGHTS", file.stat().st_size):
        assert choose_threads(file) is None


def test_training_starts_from_the_same_numbers_and_leaves_a_folder_that_serves(file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    convert(file, plain, Wish(dtype=torch.float32))
    ours, theirs = load_base(Checkpoint.open(file), tiny_plan()), load_base(Checkpoint.open(plain), tiny_plan())
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other), name
    with mock.patch("doubles.training.read_model", lambda source: load_base(Checkpoint.open(source), tiny_plan())):
        folder = run(file, tiny_plan(), tmp_path / "out").folder
    assert (folder / file.name).samefile(file)
    said = json.loads((folder / "config.json").read_text())["space"]
    assert said["base_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    model = load_model(folder)
    assert (model.facts.adapters[0].num_masks, model.facts.dtype) == (3, load_model(file).facts.dtype)
    assert locate(str(folder)) == Checkpoint.open(file).folder


def test_a_file_without_the_texts_of_a_model_is_refused_by_both(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_masks=0)
    file = write_gguf(source, tmp_path / "bare.gguf", tokens=False)
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model"):
        locate(str(file))
