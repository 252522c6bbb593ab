"""Several processes train what one trains: real ones, that talk over gloo."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from doubles.train_command import TINY, write_records
from doubles.training import random_ids, rows_for, run, tiny_plan
from processes import free_port
from space_model.loading.load import load_model
from space_train.__main__ import main
from space_train.data.train_batch import train_batch
from space_train.networks.trainee import Trainee
from space_train.run_folder import load_checkpoint
from space_train.train_plan import InvalidPlan, Method
from space_train.training import sharding
from space_train.training.sharding import SWITCH, check_can_shard, check_parts, shard_like, take_request, whole
from tiny_checkpoints import tiny_checkpoint
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SWITCHES = "--length 32 --ar-share 0.5 --learning-rate 1e-2 --evaluations 2"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["".join(chr(number % 26 + 97) for number in random_ids(20 + seed, seed)) for seed in range(24)]
    return write_records(tmp_path_factory.mktemp("data") / "texts.jsonl", ({"text": text} for text in words))


def launch(command: list[str], *, sharded: bool = False) -> subprocess.Popen[str]:
    """Two processes of the command. (`accelerate launch --cpu` starts several only through MPI.)"""
    port = str(free_port())
    flags = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port, "-m", "space_train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    environment["ACCELERATE_USE_FSDP"] = str(sharded)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def assert_two_do_what_one_does(flags: str, base: Path, texts: Path, out: Path, *, sharded: bool = False) -> None:
    command = ["--model", str(base), "--data", str(texts), *TINY.split(), *SWITCHES.split(), *flags.split()]
    two = launch([*command, "--out", str(out / "two")], sharded=sharded)
    _, said = two.communicate(timeout=280)
    assert two.returncode == 0, said
    assert main([*command, "--out", str(out / "one")]) == 0
    one, both = record(out / "one"), record(out / "two")
    assert (one["num_processes"], both["num_processes"]) == (1, 2)
    assert both["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert (both["num_tokens"], both["num_masks"]) == (one["num_tokens"], one["num_masks"])
    assert both["flops"] == pytest.approx(one["flops"])
    assert both["curve"][-1]["loss"] == pytest.approx(one["curve"][-1]["loss"], abs=1e-4)
    weights = [load_checkpoint(out / name / "state.pt")["trained"] for name in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-4)
    assert load_model(out / "two" / "model").facts.num_masks == 3


def test_two_processes_train_adapters_as_one_does(base: Path, texts: Path, tmp_path: Path) -> None:
    """Every second row is without masks, so that now and then one of the processes has none to learn from."""
    assert_two_do_what_one_does("--rows-per-step 2", base, texts, tmp_path)


@pytest.mark.slow
def test_two_processes_train_a_whole_model_in_parts_as_one_does(base: Path, texts: Path, tmp_path: Path) -> None:
    assert_two_do_what_one_does("--method full --optimiser muon --accumulate 2", base, texts, tmp_path)


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_stopped(base: Path, texts: Path, tmp_path: Path) -> None:
    """The signal reaches them at different moments; they stop after the same update."""
    command = ["--model", str(base), "--data", str(texts), "--out", str(tmp_path), *TINY.split(), *SWITCHES.split()]
    two = launch([*command, "--minutes", "600", "--steps", "1000000", "--checkpoint-steps", "1"])
    deadline = time.monotonic() + 200
    while not (tmp_path / "state.pt").exists() and two.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    two.send_signal(signal.SIGTERM)
    _, said = two.communicate(timeout=90)
    assert "Stopped after update" in said, said
    done = int(load_checkpoint(tmp_path / "state.pt")["counters"]["step"])
    assert main([*command, "--steps", str(done + 1)]) == 0
    assert len(record(tmp_path)["losses"]) == done + 1


@pytest.mark.slow
def test_sharded_weights_learn_what_whole_ones_do_and_go_on_alike(base: Path, texts: Path, tmp_path: Path) -> None:
    """What `accelerate launch --use_fsdp` asks for, on the CPU: each process has half of every weight."""
    assert_two_do_what_one_does("--method full --accumulate 2 --ar-share 0", base, texts, tmp_path, sharded=True)
    command = ["--model", str(base), "--data", str(texts), *TINY.split(), *SWITCHES.split(), "--method", "full"]
    command += ["--ar-share", "0", "--steps", "5"]
    assert main([*command, "--out", str(tmp_path / "two")]) == 0
    two = launch([*command, "--out", str(tmp_path / "one")], sharded=True)
    _, said = two.communicate(timeout=280)
    assert two.returncode == 0, said
    both, one = record(tmp_path / "one"), record(tmp_path / "two")
    assert (one["num_processes"], both["num_processes"]) == (1, 2)
    assert both["losses"] == pytest.approx(one["losses"], abs=1e-3)
    assert len(one["losses"]) == 5


def test_a_request_is_heard_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "true")
    assert take_request()
    assert SWITCH not in os.environ
    assert not take_request()


def test_frozen_bases_and_muon_are_refused() -> None:
    check_can_shard(tiny_plan(Method.FULL))
    with pytest.raises(InvalidPlan, match="Method gated-lora shards nothing, its base is frozen: start it without"):
        check_can_shard(tiny_plan())
    with pytest.raises(InvalidPlan, match="Muon needs whole matrices"):
        check_can_shard(tiny_plan(Method.FULL, optimiser="muon"))


def test_parts_with_other_passes_than_the_others_are_refused() -> None:
    plan = tiny_plan(Method.FULL, ar_share=0.5)
    data = rows_for(plan)
    check_parts([train_batch(data, plan, first, 2) for first in (0, 2)])
    with pytest.raises(InvalidPlan, match="every part of an update needs rows with and without masks"):
        check_parts([train_batch(data, plan, first, 1) for first in (0, 1)])


def test_what_is_whole_already_stays_as_it_is() -> None:
    tensor = torch.arange(3.0)
    tree = {"a": [tensor, {"b": 2}], "c": "text"}
    assert whole(tree, keep=True) == tree
    assert shard_like(tensor, torch.nn.Parameter(torch.zeros(3))) is tensor


def test_what_is_put_together_is_kept_where_it_is_asked_for() -> None:
    """A process that writes nothing takes part, and holds no copy of the model."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(4.0)
        tree = {"a": [distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])], "b": 2}
        kept = whole(tree, keep=True)
        assert torch.equal(kept["a"][0], tensor)
        assert whole(tree, keep=False) == {"a": [None], "b": 2}
    finally:
        distributed.destroy_process_group()


class Seen(Exception):
    """The test has what it wants."""


def test_weights_that_are_spread_were_on_no_device_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def shard(trainee: Trainee, *_: Any) -> None:
        found.update(parameter.device.type for parameter in trainee.parameters())
        raise Seen

    monkeypatch.setattr(sharding, "shard", shard)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))  # any other than where it was read
    monkeypatch.setenv(SWITCH, "true")
    with pytest.raises(Seen):
        run(tiny_checkpoint(tmp_path / "base", num_masks=0), tiny_plan(Method.FULL), tmp_path / "out")
    assert found == {"cpu"}
