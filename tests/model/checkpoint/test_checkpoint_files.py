"""A checkpoint whose files are cut short, mixed up, elsewhere or of another kind is refused by the file's name."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from space_model.adapters import GatedLora
from space_model.checkpoint.checkpoint import Checkpoint, tokenizer_eos, whole_folder
from space_model.checkpoint.weight_files import WeightFiles
from space_model.loading.load import load_model
from space_model.model_error import CheckpointNotFound, InvalidSpaceSection
from tiny_checkpoints import tiny_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(copy_of: Callable[..., Path]) -> Path:
    """The tiny Llama in two files."""
    path = copy_of()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for file, names in ((FIRST, sorted(tensors)[::2]), (SECOND, sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def change(index: Path, **entries: object) -> None:
    """Other entries of the weight_map; None: the entry goes."""
    said = json.loads(index.read_text())
    said["weight_map"] = {name: file for name, file in (said["weight_map"] | entries).items() if file is not None}
    index.write_text(json.dumps(said))


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_a_file_that_is_cut_short_or_empty_is_named(file: str, kept: int, sharded: Path) -> None:
    whole = (sharded / file).read_bytes()
    (sharded / file).write_bytes(whole[:kept])
    with pytest.raises(
        CheckpointNotFound, match=rf"{file} (is empty|\(\d+ bytes\) is no .* cut short).*Fetch it again"
    ):
        load_model(sharded)
    if kept in (0, 4):
        with pytest.raises(CheckpointNotFound, match=rf"{file} is empty, or cut short"):
            Checkpoint.open(sharded).model_hash()


def test_another_file_under_the_name_of_weights_is_named(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors is a Git LFS pointer .* `git lfs pull`"):
        load_model(path)
    (path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>")
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors \(\d+ bytes\) is no safetensors file"):
        load_model(path)


@pytest.mark.parametrize("name", ["../{0}/secret.safetensors", "{0}/../../secret", "/etc/passwd", "a\\..\\b"])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, sharded: Path) -> None:
    there = name.format(sharded.name)
    change(sharded / INDEX, **{"model.norm.weight": there})
    with pytest.raises(CheckpointNotFound, match=rf"{INDEX} names {re.escape(repr(there))}, which is outside"):
        load_model(sharded)


def test_a_link_out_of_the_folder_is_refused_and_those_of_the_hubs_cache_are_not(sharded: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (sharded / SECOND).rename(elsewhere / "secret")
    (sharded / SECOND).symlink_to(elsewhere / "secret")
    with pytest.raises(CheckpointNotFound, match=rf"{SECOND} is a link to .*secret, outside its folder. Copy"):
        load_model(sharded)
    cache = elsewhere / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (sharded / SECOND).unlink()
    (elsewhere / "secret").rename(sharded / SECOND)
    for number, file in enumerate(sorted(sharded.iterdir())):
        (cache / "blobs" / str(number)).write_bytes(file.read_bytes())
        (cache / "snapshots" / "abc" / file.name).symlink_to(Path("../../blobs", str(number)))
    load_model(cache / "snapshots" / "abc")


def test_a_folder_that_is_a_link_itself_is_served(sharded: Path, tmp_path: Path) -> None:
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(sharded)
    load_model(link)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model.lost.weight": FIRST}, rf"says that model\.lost\.weight is in {FIRST}, and no file has it"),
        ({"model.norm.weight": FIRST}, rf"says that model\.norm\.weight is in {FIRST}, and it is in {SECOND}"),
        ({"model.norm.weight": 7}, r"says that model\.norm\.weight is in 7, which is no file"),
    ],
)
def test_an_index_that_its_files_contradict_is_refused(entries: dict[str, object], message: str, sharded: Path) -> None:
    if entries == {"model.norm.weight": FIRST} and "model.norm.weight" in load_file(sharded / FIRST):
        entries, message = {"model.norm.weight": SECOND}, message.replace(FIRST, "X").replace(SECOND, FIRST)
        message = message.replace("X", SECOND)
    change(sharded / INDEX, **entries)
    with pytest.raises(CheckpointNotFound, match=message):
        load_model(sharded)


@pytest.mark.parametrize("said", [{"weight_map": []}, {"weight_map": None}, {"weight_map": {}}, {}])
def test_an_index_without_a_map_is_refused(said: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps(said))
    with pytest.raises(CheckpointNotFound, match=rf"{INDEX} names no files"):
        load_model(sharded)


def test_a_tensor_that_is_in_two_files_is_named_with_both(sharded: Path) -> None:
    both = load_file(sharded / FIRST)
    name = min(both)
    save_file(load_file(sharded / SECOND) | {name: both[name]}, sharded / SECOND, metadata={"format": "pt"})
    with pytest.raises(CheckpointNotFound, match=rf"{name} of .* is in {FIRST} and in {SECOND}"):
        load_model(sharded)


def test_files_without_their_index_are_named_with_what_is_missing(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointNotFound, match=rf"has {FIRST} and no {INDEX}, .* Fetch it, too"):
        load_model(sharded)


def test_a_tensor_that_the_index_does_not_name_is_read_from_its_file(sharded: Path) -> None:
    change(sharded / INDEX, **{"model.norm.weight": None})
    with WeightFiles.open(Checkpoint.open(sharded)) as files:
        assert "model.norm.weight" in files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_byte_order_mark_is_skipped(name: str, sharded: Path) -> None:
    (sharded / "generation_config.json").write_text('{"eos_token_id": 9}')
    (sharded / name).write_bytes(b"\xef\xbb\xbf" + (sharded / name).read_bytes())
    assert load_model(sharded).facts.eos_ids == (9, 0)  # the tokenizer's is 0


def peft_folder(path: Path, **fields: object) -> Path:
    """A folder as peft writes it for an ordinary adapter."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "owner/base"} | fields
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(64, 2)}
    save_file(pair, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


KINDS = [
    ({}, "a LoRA adapter of peft for owner/base", r"merge_and_unload\(\)"),
    ({"use_dora": True}, "a DoRA adapter of peft for owner/base", r"merge_and_unload\(\)"),
    ({"peft_type": "IA3"}, "an adapter of type IA3 of peft for owner/base", r"merge_and_unload\(\)"),
    ({"peft_type": "PROMPT_TUNING"}, "an adapter of type PROMPT_TUNING of peft", "cannot be merged"),
    ({"base_model_name_or_path": None}, "a LoRA adapter of peft for its base", r"merge_and_unload\(\)"),
]


@pytest.mark.parametrize(("fields", "what", "cure"), KINDS)
def test_an_ordinary_adapter_is_no_model(fields: dict[str, object], what: str, cure: str, tmp_path: Path) -> None:
    path = peft_folder(tmp_path, **fields)
    with pytest.raises(CheckpointNotFound, match=rf"is {what}.*, and no model: it has no weights of its own.*{cure}"):
        load_model(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointNotFound, match=f"is {what}.*, and no model"):
        load_model(path)


def test_a_folder_with_a_model_and_an_adapter_is_refused(copy_of: Callable[..., Path]) -> None:
    path = peft_folder(copy_of())
    with pytest.raises(
        CheckpointNotFound, match=r"a model and a LoRA adapter .* beside it, which is not applied.*move"
    ):
        load_model(path)


@pytest.mark.parametrize(("fields", "what", "cure"), KINDS)
def test_an_ordinary_adapter_is_no_gated_one(fields: dict[str, object], what: str, cure: str, tmp_path: Path) -> None:
    base, path = tiny_checkpoint(tmp_path / "base"), peft_folder(tmp_path / "adapter", **fields)
    message = (
        rf"Adapter mine: .* is {what}.*, which changes the text .* gated one.*mask_embeddings\.safetensors.*{cure}"
    )
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(base, adapters={"mine": path})
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(base, adapters={"mine": path})


def test_a_gated_adapter_given_as_a_model_is_told_how_it_is_given(tmp_path: Path) -> None:
    pair = torch.zeros(2, 64), torch.zeros(64, 2)
    gated = GatedLora(torch.ones(3, 64), {"model.layers.0.self_attn.q_proj": pair}, scale=1.0)
    gated.save_peft(tmp_path, base="owner/base")
    with pytest.raises(CheckpointNotFound, match=rf"no model: .* --model owner/base --adapter NAME={tmp_path}"):
        load_model(tmp_path)


def test_a_model_whose_section_names_the_adapter_beside_it_is_served_with_it(copy_of: Callable[..., Path]) -> None:
    path = copy_of(space={"adapter": "."})
    pair = torch.zeros(2, 64), torch.zeros(64, 2)
    gated = GatedLora(torch.ones(3, 64), {"model.layers.0.self_attn.q_proj": pair}, scale=1.0)
    gated.save_peft(path, base="owner/base")
    assert load_model(path).facts.num_masks == 3


OLD, NEW = {"weights": "old", "config": "old"}, {"weights": "new", "config": "new"}

DIES_AT = """
import os, pathlib, shutil, sys
from space_model.checkpoint.checkpoint import whole_folder
left = 0
def dying(call):
    def at_last(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*arguments, **keywords)
    return at_last
for name in ("mkdir", "rename", "write_text"):
    setattr(pathlib.Path, name, dying(getattr(pathlib.Path, name)))
shutil.rmtree = dying(shutil.rmtree)
for line in sys.stdin:
    folder, left = pathlib.Path(line.split()[0]), int(line.split()[1])
    if (child := os.fork()) == 0:
        with whole_folder(folder) as new:
            (new / "weights").write_text("new")
            (new / "config").write_text("new")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Reads lines of a folder and a number of calls, and answers each with the exit code of a process that writes the
folder and ends at the call after these."""


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()} if folder.is_dir() else {}


def write(folder: Path, files: dict[str, str]) -> None:
    with whole_folder(folder) as new:
        for name, text in files.items():
            (new / name).write_text(text)


def test_a_writer_that_is_killed_leaves_the_old_or_the_new_whole(tmp_path: Path) -> None:
    words = [sys.executable, "-c", DIES_AT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        num_kills = kill_writers(tmp_path, writers.stdin, writers.stdout)
        writers.stdin.close()
    assert num_kills == 8, "every call that moves something was the last one of a process"


def kill_writers(tmp_path: Path, asks: IO[str], exit_codes: IO[str]) -> int:
    """Let a writer die at each of its calls in turn; return how many there are."""
    for num_kills in itertools.count():
        folder = tmp_path / str(num_kills) / "model"
        write(folder, OLD)
        asks.write(f"{folder} {num_kills}\n")
        asks.flush()
        if int(exit_codes.readline()) == 0:
            return num_kills
        beside = folder.with_name("model.replaced")
        assert contents(folder) in (OLD, NEW) or contents(beside) == OLD, num_kills
        write(folder, NEW)  # the same command, given again
        assert contents(folder) == NEW
        assert [place.name for place in folder.parent.iterdir()] == ["model"]
    raise AssertionError


def test_a_writer_that_fails_leaves_the_old_and_no_half(tmp_path: Path) -> None:
    write(tmp_path / "model", OLD)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "model", {"weights": "new", "no/folder": "new"})
    assert contents(tmp_path / "model") == OLD
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "large")
    write(tmp_path / "model", NEW)
    assert (tmp_path / "model").is_symlink()
    assert contents(tmp_path / "large") == NEW


ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0, "</s>": 2}}}
UNIGRAM = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", 0.0]]}}

NAMED: dict[str, tuple[dict[str, Any], int | None]] = {
    "by an added token": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, 7),
    "as an object": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, 7),
    "by a word of the vocabulary": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "</s>"}}, 2),
    "by a piece of a unigram model": ({"tokenizer.json": UNIGRAM, "tokenizer_config.json": {"eos_token": "</s>"}}, 2),
    "in added_tokens_decoder": (
        {"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "</s>"}}}},
        5,
    ),
    "in special_tokens_map.json alone": (
        {"tokenizer.json": ADDED, "special_tokens_map.json": {"eos_token": "</s>"}},
        2,
    ),
    "as null": (
        {
            "tokenizer.json": ADDED,
            "tokenizer_config.json": {"eos_token": None, "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": "</s>"},
        },
        None,
    ),
    "by a token that is not there": ({"tokenizer.json": ADDED, "tokenizer_config.json": {"eos_token": "<eos>"}}, None),
    "nowhere": ({}, None),
}


@pytest.mark.parametrize("how", NAMED)
def test_a_tokenizer_names_its_eos(how: str) -> None:
    files, expected = NAMED[how]
    assert tokenizer_eos(lambda name: files.get(name, {})) == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 10]}, 9, (3, 10, 7)),
        ({"eos_token_id": 7}, 9, (7,)),
        ({}, 9, (9, 7)),
        (None, [9, 11], (9, 11, 7)),
        (None, None, (7,)),
        ({"eos_token_id": [128, 11, -1]}, 9, (11, 7)),
    ],
)
def test_the_eos_ids_are_the_generation_config_s_and_the_tokenizer_s(
    tmp_path: Path, generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]
) -> None:
    folder = tiny_checkpoint(tmp_path / "m", eos_token_id=config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(json.dumps(ADDED))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Checkpoint.open(folder).eos_ids(vocab_size=128) == expected
