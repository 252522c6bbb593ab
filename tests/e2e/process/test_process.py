"""The process from its first line to its exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from processes import free_port
from space_eval.bench.server_process import ServerProcess

Serve = Callable[..., AbstractContextManager[ServerProcess]]
LONG = {"prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_lets_streams_finish_then_exits_0_without_orphans(serve: Serve, number: signal.Signals) -> None:
    port = free_port()
    with serve(environment={"SPACESERVE_PORT": str(port)}) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        workers = server.worker_pids()
        assert len(workers) == 1
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.signal(number)
            seen = [line for line in lines if line]
        assert seen[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in seen[-2]
        assert server.wait() == 0
        assert not any(map(is_alive, workers)), "the router waits for its workers"
        words = server.last_words()
        assert "Traceback" not in words, words


def test_no_worker_outlives_a_router_that_is_killed(serve: Serve) -> None:
    with serve() as server:
        workers = server.worker_pids()
        server.process.kill()
        server.wait()
        assert ended(workers, 30)


def test_a_model_that_is_not_there_ends_the_start_with_one_line() -> None:
    begun = time.monotonic()
    ran = spaceserve("--model", "/no/such/folder", "--port", "0")
    assert ran.returncode not in (0, None)
    (line,) = ran.stderr.splitlines()
    assert "/no/such/folder" in line
    assert time.monotonic() - begun < 30


def test_weights_that_cannot_be_read_end_the_start_with_the_workers_words(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    ran = spaceserve("--model", str(broken), "--port", "0")
    assert ran.returncode == 1
    assert "spaceserve: error: " in ran.stdout
    assert "model.safetensors cannot be read" in ran.stdout
    assert ran.stdout.count("cannot be read") == 1
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_flag_that_means_nothing_is_refused_by_name() -> None:
    for flags, words in ((["--speculation", "fast"], "--speculation='fast'"), (["--port", "70000"], "--port='70000'")):
        ran = spaceserve(*flags)
        assert ran.returncode == 2
        assert words in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


def spaceserve(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPACESERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "space_router", "serve", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
