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
from doubles.training import random_ids
from processes import free_port
from space_model.loading.load import load_model
from space_model.testing import tiny_checkpoint
from space_train.__main__ import main
from space_train.run_folder import load_checkpoint

TINY = "--steps 3 --length 32 --rows-per-step 4 --num-masks 3 --head-hidden 8 --lora-rank 2 --precision no"
SWITCHES = "--ar-share 0.5 --scheduled-drafting 0.5 --learning-rate 1e-2 --evaluations 2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    words = ["".join(chr(number % 26 + 97) for number in random_ids(20 + seed, seed)) for seed in range(24)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return file


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
    """The signal reaches them at different moments; they stop behind the same update."""
    command = ["--model", str(base), "--data", str(texts), "--out", str(tmp_path), *TINY.split(), *SWITCHES.split()]
    two = launch([*command, "--minutes", "600", "--steps", "1000000", "--checkpoint-steps", "1"])
    deadline = time.monotonic() + 200
    while not (tmp_path / "state.pt").exists() and two.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    two.send_signal(signal.SIGTERM)
    _, said = two.communicate(timeout=90)
    assert "Stopped behind update" in said, said
    done = int(load_checkpoint(tmp_path / "state.pt")["counters"]["step"])
    assert main([*command, "--steps", str(done + 1)]) == 0
    assert len(record(tmp_path)["losses"]) == done + 1


@pytest.mark.slow
def test_sharded_weights_learn_what_whole_ones_do_and_either_goes_on_with_the_others_run(
    base: Path, texts: Path, tmp_path: Path
) -> None:
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
