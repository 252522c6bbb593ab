"""Amounts of memory are read exactly, and blocks are as many as fit."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles.worker import ScriptedModel
from safetensors.torch import save_file
from space_common.worker.settings import parse_amount
from space_model.free_memory import FreeMemory
from space_model.model_facts import ModelFacts
from space_model.verification.layer_reference import CONTEXT, NUM_ROWS
from space_server.machine.memory import (
    NotEnoughMemory,
    check_num_blocks,
    choose_max_sequences,
    choose_num_blocks,
    choose_num_kept,
    choose_num_sequences,
    free_bytes,
)
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

FACTS = dataclasses.replace(ScriptedModel(window=100).facts, kv_bytes_per_token=1000)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1GiB", 1024**3), ("800MiB", 800 * 1024**2), ("1.5kb", 1500), ("4096", 4096), ("0.5", 0.5), ("1.0", 1.0)],
)
def test_amounts(text: str, amount: int | float) -> None:
    assert parse_amount(text) == amount
    assert type(parse_amount(text)) is type(amount)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1 TiBs", "nan", "lots"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("amount", "available", "blocks"),
    [
        (400_000, 10**9, 25),  # blocks of 16 slots of 1000 bytes
        (0.5, 1_600_000, 50),
        (None, 10**12, 64 * 7),  # 64 windows of 7 blocks
        (None, 1_600_000, 50),  # half of what is free
    ],
)
def test_blocks_fit_the_amount(amount: int | float | None, available: int, blocks: int) -> None:
    assert choose_num_blocks(FACTS, block_size=16, amount=amount, available=available) == blocks


def test_the_default_stops_at_one_gib() -> None:
    wide = dataclasses.replace(FACTS, window=100_000)
    assert choose_num_blocks(wide, block_size=16, amount=None, available=10**12) == 1024**3 // 16_000


def test_less_than_one_window_and_more_than_there_is_are_refused() -> None:
    with pytest.raises(NotEnoughMemory, match="need 112000 bytes; there are 100000"):
        choose_num_blocks(FACTS, block_size=16, amount=100_000, available=10**9)
    with pytest.raises(NotEnoughMemory, match="asks for 2000000000 bytes; 1000000 are available"):
        choose_num_blocks(FACTS, block_size=16, amount=2_000_000_000, available=1_000_000)


ON_GPU = dataclasses.replace(FACTS, window=8192, device=torch.device("cuda"))
GB = 10**9
EACH = 1024 * 1000  # keys and values of a usual sequence


@pytest.mark.parametrize(
    ("facts", "asked", "amount", "num_blocks", "available", "sequences"),
    [
        (ON_GPU, None, None, None, 100 * GB, 256),
        (ON_GPU, None, None, None, 256 * EACH, 128),  # a tenth is left free
        (ON_GPU, None, None, None, 150 * EACH, 128),
        (ON_GPU, None, None, None, 100 * EACH, 64),
        (ON_GPU, None, 1.0, None, 256 * EACH, 256),
        (ON_GPU, None, 0.3, None, 256 * EACH, 64),
        (ON_GPU, None, 128 * EACH, None, 100 * GB, 128),
        (ON_GPU, None, None, 256 * 64, 100 * GB, 256),  # blocks of 16 slots
        (ON_GPU, None, None, 256 * 64 - 1, 100 * GB, 128),
        (dataclasses.replace(ON_GPU, window=512), None, None, None, 150 * EACH, 256),  # shorter ones need less
        (ON_GPU, 300, None, None, 1, 300),
        (FACTS, None, None, None, 100 * GB, 64),
        (FACTS, 3, None, None, 100 * GB, 3),
    ],
)
def test_as_many_sequences_run_on_a_gpu_as_its_pages_hold(
    facts: ModelFacts, asked: int | None, amount: float | None, num_blocks: int | None, available: int, sequences: int
) -> None:
    found = choose_max_sequences(
        facts, asked=asked, amount=amount, available=available, num_blocks=num_blocks, block_size=16
    )
    assert found == sequences


@pytest.mark.parametrize(
    ("state_bytes", "available", "sequences"),
    [(0, 10, 64), (1000, 10**9, 64), (10_000, 1_000_000, 50), (900_000, 1_000_001, 1)],
)
def test_as_many_sequences_run_as_have_room_for_recurrent_states(
    state_bytes: int, available: int, sequences: int
) -> None:
    assert choose_num_sequences(FACTS, asked=64, state_bytes=state_bytes, available=available) == sequences


@pytest.mark.parametrize(
    ("asked", "kept_bytes", "available", "kept"),
    [(None, 0, 10**9, 0), (None, 100, 10**9, 8), (None, 100, 4000, 5), (None, 100, -5, 0), (1050, 100, 2000, 10)],
)
def test_as_many_recurrent_states_are_kept_as_fit(
    asked: int | None, kept_bytes: int, available: int, kept: int
) -> None:
    found = choose_num_kept(asked, num_sequences=4, kept_bytes=kept_bytes, available=available)
    assert found == kept
    with pytest.raises(NotEnoughMemory, match="--state-cache asks for 10 bytes; 5 are available"):
        choose_num_kept(10, num_sequences=4, kept_bytes=1, available=5)


def test_recurrent_states_that_leave_no_room_for_a_window_are_refused() -> None:
    with pytest.raises(NotEnoughMemory, match=r"states of a sequence need 950000 bytes.*Lower --max-model-len"):
        choose_num_sequences(FACTS, asked=64, state_bytes=950_000, available=1_000_000)


def test_blocks_asked_for_by_number_must_fit() -> None:
    assert check_num_blocks(FACTS, num_blocks=10, block_size=16, available=160_000) == 10
    with pytest.raises(NotEnoughMemory, match="--num-blocks 11 needs 176000 bytes; 160000 are available on cpu"):
        check_num_blocks(FACTS, num_blocks=11, block_size=16, available=160_000)


def test_free_memory_is_known_on_linux_and_elsewhere(tmp_path: Path) -> None:
    cpu, nowhere = torch.device("cpu"), tmp_path / "nowhere"
    assert free_bytes(cpu) > 0
    assert free_bytes(cpu, meminfo=nowhere, cgroup=nowhere) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert free_bytes(cpu, meminfo=meminfo, cgroup=nowhere) == 7 * 1024


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"), "total_inactive_file"),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, names: tuple[str, str, str], idle: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 100 kB\n")
    (tmp_path / "memory").mkdir()
    for name, words in zip(names, ("5000\n", "3000\n", f"anon 9\n{idle} 1000\n"), strict=True):
        (tmp_path / name).write_text(words)
    assert free_bytes(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path) == 3000
    (tmp_path / names[0]).write_text("max\n")
    assert free_bytes(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path) == 100 * 1024


def test_a_process_has_what_the_groups_around_it_leave(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("9:memory:/pod/one\n0::/pod/one\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 100 kB\n")

    def free() -> FreeMemory:
        return FreeMemory.on(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path / "groups", process=tmp_path)

    def group(folder: str, limit: str, usage: str, used: str, bound: int) -> None:
        place = tmp_path / "groups" / folder
        place.mkdir(parents=True)
        (place / limit).write_text(f"{bound}\n")
        (place / usage).write_text(f"{used}\n")
        (place / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 0\n")

    assert free().bound == "the machine's memory"
    group("pod", "memory.max", "memory.current", "4000", 9000)
    assert (free().num_bytes, free().bound) == (5000, f"the limit in {tmp_path}/groups/pod/memory.max")
    group("memory/pod/one", "memory.limit_in_bytes", "memory.usage_in_bytes", "1000", 3000)
    assert free().num_bytes == 2000
    assert free().among(2).num_bytes == 1000


def test_a_process_has_what_its_own_limits_leave() -> None:
    script = (
        "import resource, torch\n"
        "from space_model.free_memory import FreeMemory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "found = FreeMemory.on(torch.device('cpu'))\n"
        'assert found.bound == "this process\'s limit (ulimit -d)", found\n'
        "assert 0 < found.num_bytes < 1 << 30\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_one_window_is_given_where_it_fits_though_it_is_more_than_half() -> None:
    assert choose_num_blocks(FACTS, block_size=16, amount=None, available=120_000) == 7


SIZE = 48 << 20
"""More than the largest that glibc ever keeps by itself."""

SCRIPT = f"""
import resource, torch
from space_model.malloc import keep_freed_memory

def faults():
    for _ in range(10):
        torch.ones({SIZE} // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones({SIZE} // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
assert keep_freed_memory()
print(faults(), given_back)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has mallopt")
def test_memory_is_not_given_back_between_two_tensors() -> None:
    pages = SIZE // resource.getpagesize()
    # A small block that lands in the freed room moves the next tensor once to fresh pages: one or two of ten.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    kept, given_back = map(int, done.stdout.split())
    assert kept < 3 * pages < 9 * pages <= given_back


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much a process had at most")

LAYERS, HIDDEN, HEADS, INNER, VOCABULARY = 6, 768, 12, 3072, 1024
SHARD = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * 2
"""Bytes of a layer in bfloat16, which is one file: 19 MB."""

CHILD = """
import gc, json, sys, threading
from pathlib import Path
from space_model.malloc import use_one_heap

use_one_heap()
import torch
from torch import Tensor
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.loading.load import load_model
from space_model.checkpoint.weight_files import give_back
from space_model.loading.sharded_model import read_part
from space_model.networks.tensor_parallel import Share
from space_model.loading.whole_model import stream_model

torch.set_num_threads(1)
small, path = sys.argv[1:]

def kept(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def on_a_device(path, dtype):
    checkpoint = Checkpoint.open(path)
    return stream_model(checkpoint, read_config(checkpoint), dtype, torch.device("cpu"), copies=True)

def part(path):
    checkpoint = Checkpoint.open(path)
    return read_part(checkpoint, read_config(checkpoint), Share(1, 2), torch.float32, torch.device("cpu"))

loads = {
    "on a device": lambda path: on_a_device(path, torch.bfloat16),
    "on a device, widened": lambda path: on_a_device(path, torch.float32),
    "half of it, widened": part,
    "packed": lambda path: load_model(path, dtype="bfloat16", attention="torch"),
    "packed, widened": lambda path: load_model(path, dtype="float32"),
}
for name, load in loads.items():
    load(small)  # what is imported, and made once
    gc.collect()
    before = kept("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load(path)
    most = kept("VmHWM") - before
    give_back(Checkpoint.open(path).weights)
    print(json.dumps([name, most, kept("VmRSS") - before]))
    del model
    gc.collect()
"""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """By how it was loaded: bytes that it took at most, and those that it takes."""
    sizes = {"num_layers": 1, "hidden_size": 64, "vocab_size": VOCABULARY, "num_masks": 0}
    small = tiny_checkpoint(tmp_path_factory.mktemp("small"), dtype="bfloat16", **sizes)  # type: ignore[arg-type]
    large = tmp_path_factory.mktemp("large")
    config = json.loads((small / "config.json").read_text())
    more = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HIDDEN // HEADS}
    config |= more | {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    (large / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    index: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        """Where all weights are one number, all sums round alike, which the check at load takes for another model."""
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    for number in range(LAYERS):
        layer = {name: drawn(*shape) for name, shape in shapes.items()}
        layer |= {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in norms.items()}
        tensors = {f"model.layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}
        if number == 0:
            tensors["model.embed_tokens.weight"] = drawn(VOCABULARY, HIDDEN)
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        file = f"model-{number}.safetensors"
        save_file(tensors, large / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (large / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", CHILD, str(small), str(large)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return {name: (most, held) for name, most, held in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("how", "size"), [("on a device", 1.0), ("on a device, widened", 2.0), ("half of it, widened", 1.0)]
)
def test_beside_the_model_there_is_a_shard_at_most(how: str, size: float, peaks: dict[str, tuple[int, int]]) -> None:
    most, held = peaks[how]
    model = size * LAYERS * SHARD
    assert 0.9 * model < held < 1.2 * model, (most, held)
    assert most < held + 1.5 * size * SHARD, (most / SHARD, held / SHARD)


@pytest.mark.parametrize(("how", "size"), [("packed", 1.0), ("packed, widened", 2.0)])
def test_the_check_at_load_takes_one_layer_in_wide_numbers(
    how: str, size: float, peaks: dict[str, tuple[int, int]]
) -> None:
    """Twice as wide as served. With it its context: keys and values of CONTEXT positions, as made and in pages; and
    the scores of the rows with these, and what the softmax makes of them."""
    most, held = peaks[how]
    wide_layer = 2 * size * SHARD
    context = 2 * 2 * CONTEXT * HIDDEN * 4 * size + 2 * HEADS * NUM_ROWS * (CONTEXT + NUM_ROWS) * 4 * size
    assert 0.9 * size * LAYERS * SHARD < held < 1.2 * size * LAYERS * SHARD, (most, held)
    assert most < held + wide_layer + context + 0.25 * size * SHARD, (most / SHARD, held / SHARD)
