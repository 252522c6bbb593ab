"""A router that is killed takes no weights with it: the worker serves the next one at once, empty."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

SECONDS = 120.0
LONG = {"prompt": "def f(x):\n    ", "max_tokens": 400, "temperature": 0.9, "seed": 5, "ignore_eos": True}


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this environment; it is killed with the block, stopped or not."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[bytes], begins: str) -> str:
    """The next line of its output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.decode().startswith(begins):
            return line.decode().strip()
    raise AssertionError(f"it ended with {process.wait()} before it said {begins!r}")


def text_of(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=LONG, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    "fate", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "stopped"]
)
def test_a_worker_keeps_its_weights_and_takes_the_next_router_within_two_seconds(
    checkpoint: Path, tmp_path: Path, fate: signal.Signals
) -> None:
    address = f"unix:{tmp_path / 'w.sock'}"
    router = ["space_router", "router", "--model", str(checkpoint), "--worker-address", address, "--port", "0"]
    with ExitStack() as stack:
        start = stack.enter_context
        worker = start(
            running("space_server", "--model", str(checkpoint), "--listen", address, "--num-threads", "1",
                    "--num-blocks", "256", "--calibration-seconds", "0")
        )  # fmt: skip
        line_of(worker, "ready")
        first = start(running(*router))
        url = line_of(first, "spaceserve: listening on").split()[3]
        line_of(first, "spaceserve: ready")
        whole = text_of(url)
        events: list[dict[str, Any]] = []
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=5) as answer:
            broken = pytest.raises(httpx.TransportError) if fate is signal.SIGKILL else pytest.raises(httpx.ReadTimeout)
            with broken:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 3:
                        first.send_signal(fate)
        told = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert whole.startswith(told)
        assert not any(event["choices"][0]["finish_reason"] for event in events), "no stream that was cut looks whole"

        seconds: list[float] = []
        last = first
        while len(seconds) < 3 and min(seconds, default=2.0) >= 2.0:  # the machine itself may stop now and then
            last.send_signal(fate)
            last = start(running(*router))
            url = line_of(last, "spaceserve: listening on").split()[3]
            begun = time.monotonic()
            line_of(last, "spaceserve: ready")
            seconds.append(time.monotonic() - begun)
        assert min(seconds) < 2.0
        load = httpx.get(f"{url}/load").json()
        assert (load["blocks_free"], load["blocks_held"], load["blocks_cached"]) == (256, 0, 0)
        assert text_of(url) == whole, "a retry with the same seed gives the same text"
        assert worker.poll() is None, "the same process, with the same weights"


def test_a_worker_told_to_end_finishes_what_runs_and_loses_nothing(checkpoint: Path, tmp_path: Path) -> None:
    sockets = [f"unix:{tmp_path / name}" for name in ("a", "b")]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                running("space_server", "--model", str(checkpoint), "--listen", address, "--num-threads", "1",
                        "--num-blocks", "256", "--calibration-seconds", "0")
            )
            for address in sockets
        ]  # fmt: skip
        for worker in workers:
            line_of(worker, "ready")
        addresses = ",".join(sockets)
        router = stack.enter_context(
            running("space_router", "router", "--model", str(checkpoint), "--worker-address", addresses, "--port", "0")
        )
        url = line_of(router, "spaceserve: listening on").split()[3]
        line_of(router, "spaceserve: ready")
        with httpx.Client(timeout=SECONDS) as client:
            _until(lambda: client.get(f"{url}/load").json()["num_workers_up"] == 2)
            wanted = text_of(url)
            workers[0].send_signal(signal.SIGTERM)
            for _ in range(12):
                assert text_of(url) == wanted
        assert workers[0].wait(60) == 0


def _until(holds: Any) -> None:
    limit = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)
