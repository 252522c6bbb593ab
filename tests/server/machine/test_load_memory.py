"""While a model is read it is in memory once, and a piece of it twice: of files of several shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from space_model.testing import tiny_checkpoint
from space_model.verification.layer_reference import CONTEXT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much a process had at most")

LAYERS, HIDDEN, INNER, VOCABULARY = 6, 768, 3072, 1024
SHARD = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * 2
"""Bytes of a layer in bfloat16, which is one file: 19 MB."""

CHILD = """
import gc, json, sys, threading
from pathlib import Path
from space_server.machine.memory import use_one_heap

use_one_heap()
import torch
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
    more = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HIDDEN // 12}
    config |= more | {"num_attention_heads": 12, "num_key_value_heads": 12}
    (large / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    index: dict[str, str] = {}
    for number in range(LAYERS):
        layer = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in (shapes | norms).items()}
        tensors = {f"model.layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}
        if number == 0:
            tensors["model.embed_tokens.weight"] = torch.full((VOCABULARY, HIDDEN), 0.01, dtype=torch.bfloat16)
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
    """Twice as wide as served. With it its context: keys and values of CONTEXT positions, as made and in pages."""
    most, held = peaks[how]
    wide_layer = 2 * size * SHARD
    context = 2 * 2 * CONTEXT * HIDDEN * 4 * size
    assert 0.9 * size * LAYERS * SHARD < held < 1.2 * size * LAYERS * SHARD, (most, held)
    assert most < held + wide_layer + context + 0.25 * size * SHARD, (most / SHARD, held / SHARD)
