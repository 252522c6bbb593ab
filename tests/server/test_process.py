"""The worker as a process: ready line, exit statuses, and a parent that dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from space_common.worker import choices
from space_common.worker.client import GrpcWorker, WorkerClient
from space_kernels.attention_backends import ATTENTION_NAMES
from space_kernels.build import cpu_library
from space_model.model_error import ModelError
from space_router.config import ServeConfig
from space_router.engine.workers.supervisor import worker_command
from space_server.__main__ import SMALL_WEIGHTS, choose_threads, main

FLAGS = ["--num-blocks", "32", "--num-threads", "1", "--log-level", "warning", "--calibration-seconds", "0"]
ENVIRONMENT = os.environ | {"TQDM_DISABLE": "1"}


def launch(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "space_server", *FLAGS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=ENVIRONMENT,
    )  # fmt: skip


def first_tokens(address: str) -> list[int]:
    with GrpcWorker(address) as worker:
        return WorkerClient(worker, automatic=True).generate([70, 71], max_tokens=5).tokens


@pytest.mark.e2e
def test_it_says_ready_serves_and_ends_with_0_on_sigterm(tiny_path: Path, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'w'}"
    with launch("--model", str(tiny_path), "--listen", listen, "--parent-pid", str(os.getpid())) as process:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        assert (word, address) == ("ready", listen)
        assert len(first_tokens(address)) == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_failures_are_one_line_and_a_status_of_their_own(
    tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = str(tiny_path)
    cases = [
        (3, "nothing", ["--model", str(tmp_path / "nothing"), "--listen", f"unix:{tmp_path / 'a'}"]),
        (4, "are available", ["--model", good, "--listen", f"unix:{tmp_path / 'b'}", "--kv-memory", "900000GiB"]),
        (4, "--num-blocks 999999999 needs", ["--model", good, "--listen", "unix:/w", "--num-blocks", "999999999"]),
        (5, "Cannot listen", ["--model", good, "--listen", f"unix:{tmp_path}/no/such/folder"]),
    ]
    for status, words, arguments in cases:
        assert main(["--num-threads", "1", *arguments]) == status
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert words in errors[0]


@pytest.mark.parametrize("exact", ["on", "off"])
def test_exact_products_are_asked_for_by_the_flag_that_the_router_passes_on(
    monkeypatch: pytest.MonkeyPatch, exact: str
) -> None:
    asked = []

    def load(path: str, **settings: Any) -> None:
        asked.append(settings["choose_ops"].keywords["exact"])
        raise ModelError("that is all")

    monkeypatch.setattr("space_server.__main__.load_model", load)
    command = worker_command(ServeConfig(model="demo", exact=exact, placement="shared"), "unix:/w")
    assert main(command[command.index("--model") :]) == 3
    assert asked == [exact == "on"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_with_0(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr("space_server.__main__.load_model", lambda path, **settings: signal.raise_signal(number))
    with pytest.raises(SystemExit) as left:
        main(["--model", "demo", "--listen", "unix:/w"])
    assert left.value.code == 0
    assert signal.getsignal(number) is before


BUSY = """
import runpy, torch
import space_model.loading.load

def busy(*_, **__):
    print("computing", flush=True)
    rows = torch.ones(64, 64)
    while True:  # lets go of the interpreter, and takes it again inside C++
        rows @ rows

space_model.loading.load.load_model = busy
runpy.run_module("space_server", run_name="__main__", alter_sys=True)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_while_a_thread_computes_ends_with_0_and_without_a_word(
    number: signal.Signals, tiny_path: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-P", "-c", BUSY, "--model", str(tiny_path), "--listen", f"unix:{tmp_path / 'w'}", *FLAGS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


@pytest.mark.e2e
def test_flags_that_are_refused_end_with_2_and_help_with_0() -> None:
    for words, status in ((["--listen"], 2), (["--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "space_server", *words], capture_output=True, text=True, env=ENVIRONMENT
        )
        assert done.returncode == status
        assert "usage:" in (done.stderr if status else done.stdout)


def test_flags_are_read_without_torch() -> None:
    code = "import sys; from space_common.worker.settings import WorkerSettings as one; one.parse(sys.argv[1:])"
    words = ["--listen", "unix:/w", "--attention", "triton", "--cpu-kernels", "avx2"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}; print('torch' in sys.modules)", *words],
        capture_output=True, text=True, env=ENVIRONMENT, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_their_values_are_those_of_the_kernels() -> None:
    assert choices.ATTENTION == ATTENTION_NAMES
    assert choices.CPU_KERNELS == cpu_library.CHOICES


@pytest.mark.e2e
def test_a_worker_whose_parent_dies_ends(tiny_path: Path, tmp_path: Path) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as parent,
        launch(
            "--model", str(tiny_path), "--listen", f"unix:{tmp_path / 'w'}", "--parent-pid", str(parent.pid)
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        parent.kill()
        parent.wait()
        assert process.wait(60) == 6


def test_small_weights_get_one_thread_and_large_ones_torchs_own(tiny_path: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text("{}")
    with (large / "model.safetensors").open("wb") as weights:
        weights.truncate(SMALL_WEIGHTS)
    assert choose_threads(str(tiny_path)) == 1
    assert choose_threads(str(large)) is None
