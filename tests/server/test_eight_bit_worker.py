"""A worker whose linears are in eight bits: what it tells the router, what it needs, what it keeps its figures by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_testing import write_quantized
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.free_memory import FreeMemory
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_server.config import parse
from space_server.machine.memory import NotEnoughMemory, choose_num_blocks
from space_server.startup.calibration import CostFile
from space_server.startup.doctor import examine
from space_server.startup.model_need import ModelNeed, check_fits
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

WORDS = ["--listen", "unix:/tmp/none", "--device", "cpu"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_checkpoint(
        tmp_path, num_layers=6, vocab_size=512, dtype="bfloat16", hidden_size=128, num_heads=8, kv_heads=8,
        tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_it_says_so_and_keeps_figures_of_its_own(weights: str, path: Path, tmp_path: Path) -> None:
    plain, eight = (load_model(path, dtype="bfloat16", weights=held) for held in ("plain", weights))
    worker = Worker(eight, num_blocks=8, block_size=16)
    assert worker.hello("first").dtype == f"bfloat16 with {weights} weights"
    files = [CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=4).path for model in (plain, eight)]
    assert files[0] != files[1]


def test_it_needs_less_and_is_named_as_a_cure(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    words = ["--model", str(path), *WORDS, "--dtype", "bfloat16"]
    plain = ModelNeed.asked(parse(words), checkpoint)
    eight = ModelNeed.asked(parse([*words, "--weights", "int8"]), checkpoint)
    assert eight.head * 2 == plain.head
    assert eight.weights < 0.7 * plain.weights
    assert (eight.step, eight.kv_bytes_per_token) == (plain.step, plain.kv_bytes_per_token)
    between = FreeMemory((eight.least + plain.least) // 2, "the machine")
    check_fits(eight, between, "it")
    with pytest.raises(NotEnoughMemory, match="--weights int8"):
        check_fits(plain, between, "it")
    four = ModelNeed.asked(parse([*words, "--weights", "int4"]), checkpoint)
    assert four.head * 32 == plain.head * 17
    linears = 6 * (4 * 128 * 128 + 3 * 128 * read_config(checkpoint).intermediate_size)
    assert (eight.weights - four.weights) * 32 == linears * 12  # 20 bytes for 32 weights
    with pytest.raises(NotEnoughMemory, match="--weights int4"):
        check_fits(plain, FreeMemory((four.least + eight.least) // 2, "the machine"), "it")


def test_on_a_gpu_it_is_linears_alone_with_a_floating_point(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    config = read_config(checkpoint)
    plain = ModelNeed.of(checkpoint, config, torch.bfloat16, torch.device("cuda"), window=256)
    eight = plain.with_weights("fp8")
    assert eight is not None
    linears = 6 * (4 * 128 * 128 + 3 * 128 * config.intermediate_size)
    assert plain.weights - eight.weights == linears
    assert (eight.head, eight.held, eight.with_weights("fp8")) == (0, "fp8", None)
    assert "weights in bfloat16, linears in fp8" in eight.parts()
    between = FreeMemory((eight.least + plain.least) // 2, "the GPU")
    with pytest.raises(NotEnoughMemory, match="--weights fp8"):
        check_fits(plain, between, "it")


def test_what_would_save_nothing_is_refused_whoever_serves(path: Path, tmp_path: Path) -> None:
    words = [*WORDS, "--weights", "fp8", "--model"]
    with pytest.raises(
        InvalidSetting, match="for GPUs, and the device is cpu, where they save nothing; take --weights"
    ):
        ModelNeed.asked(parse([*words, str(path)]), Checkpoint.open(path))
    (found,) = [one for one in examine(parse([*words, str(path)])) if (one.part, one.state) == ("model", "fail")]
    assert "take --weights int8" in found.sentence
    write_quantized(path, tmp_path / "packed", tmp_path / "plain", "awq")
    with pytest.raises(InvalidSetting, match="AWQ ones already; leave out --weights fp8"):
        load_model(tmp_path / "packed", weights="fp8")


def test_keys_and_values_of_eight_bits_give_a_worker_twice_the_pages(path: Path, tmp_path: Path) -> None:
    plain, small = (load_model(path, dtype="bfloat16", kv_dtype=held) for held in ("auto", "fp8"))
    one, two = (
        choose_num_blocks(model.facts, block_size=16, amount=2**22, available=2**30) for model in (plain, small)
    )
    assert two == 2 * one
    assert Worker(small, num_blocks=8, block_size=16).hello("first").dtype == "bfloat16 with fp8 keys and values"
    files = [CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=4).path for model in (plain, small)]
    assert files[0] != files[1]


def test_keys_and_values_of_eight_bits_are_a_cure_on_a_gpu_and_refused_elsewhere(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    config = read_config(checkpoint)
    need = ModelNeed.of(checkpoint, config, torch.bfloat16, torch.device("cuda"), window=256)
    small = ModelNeed.of(checkpoint, config, torch.bfloat16, torch.device("cuda"), window=256, fp8_kv=True)
    assert need.keys_and_values == 2 * small.keys_and_values
    assert small.held_in(torch.float32).keys_and_values == small.keys_and_values
    assert need.with_fp8_kv() == small
    with pytest.raises(NotEnoughMemory, match=r"or --kv-dtype fp8 \("):
        check_fits(need, FreeMemory((need.least + small.least) // 2, "the GPU"), "it")
    with pytest.raises(InvalidSetting, match=r"the device is cpu, where .* leave out --kv-dtype fp8"):
        ModelNeed.asked(parse([*WORDS, "--kv-dtype", "fp8", "--model", str(path)]), checkpoint)


def test_it_is_not_shared(path: Path) -> None:
    ranks: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(InvalidSetting, match="leave out --weights int8, or --tensor-parallel 2"):
        load_model(path, weights="int8", ranks=ranks)
