"""What router, worker, doctor and training make of a GGUF file is what they make of the model converted from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from doubles.gguf_files import write_gguf
from doubles.training import run, tiny_plan
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.convert.convert import Wish, convert
from space_model.loading.load import load_model
from space_model.testing import tiny_adapter, tiny_checkpoint
from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.text.checkpoint import locate
from space_router.text.model_text import ModelText
from space_server.__main__ import choose_threads
from space_server.config import parse
from space_server.startup.doctor import examine
from space_server.startup.model_need import ModelNeed
from space_train.session import load_base

WORDS = ["--listen", "unix:/nowhere", "--device", "cpu", "--model"]


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path) -> Iterator[None]:
    """Texts of this test's files, and variables that a worker sets are of this test."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        yield


@pytest.fixture
def file(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    return write_gguf(checkpoint_of("llama"), tmp_path / "x.Q8_0.gguf", "Q8_0")


def test_router_and_worker_read_the_same_texts(file: Path, tmp_path: Path) -> None:
    text = ModelText.load(ServeConfig(model=str(file)))
    checkpoint = Checkpoint.open(file)
    assert locate(str(file)) == checkpoint.folder
    assert text.name == "x.Q8_0"
    assert text.chat_template is not None
    assert text.tokenizer.encode("the") == [105, *text.tokenizer.encode("e")]
    assert checkpoint.tokenizer_hash() == load_model(file).facts.tokenizer_hash != ""
    adapter = tiny_adapter(tmp_path / "adapter", tmp_path / "x")
    (adapter / "config.json").write_text(json.dumps({"space": {"base": "../x.Q8_0.gguf"}}))
    assert locate(str(adapter)) == checkpoint.folder
    assert locate(str(tmp_path / "adapter" / ".." / "x.Q8_0.gguf")) == checkpoint.folder


@pytest.fixture(autouse=True)
def base_for_adapters(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint whose shapes an adapter has."""
    (tmp_path / "x").symlink_to(checkpoint_of("llama"))


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
    told = list(examine(parse([*WORDS, str(file)])))
    assert [finding.fact for finding in told if finding.state == "fail"] == []
    (model,) = [finding.fact for finding in told if finding.part == "model"]
    assert "kept as Q8_0, F32 (GGUF)" in model


@pytest.mark.parametrize("words", [[], ["--dtype", "float32"], ["--weights", "int8"]])
def test_memory_is_counted_as_the_numbers_are_held(words: list[str], file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "plain", Wish())
    needs = []
    for model in (file, tmp_path / "plain"):
        config = parse([*WORDS, str(model), *words])
        needs.append(dataclasses.replace(ModelNeed.asked(config, Checkpoint.open(model)), small=None))
    assert needs[0] == needs[1]


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
    assert folder is not None
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
