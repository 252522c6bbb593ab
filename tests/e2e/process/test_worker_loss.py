"""Workers and routers that are killed, stopped or disturbed take nothing with them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos.__main__ import main

KILLS = 2  # a request that sees a third worker die under it is given up


def test_streams_go_on_with_the_same_text_when_their_worker_is_killed(live: Any) -> None:
    batch_params: list[dict[str, Any]] = [
        {"temperature": 0, "speculation": "off"},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 4, "speculation": 2},
    ]
    wanted = [
        {"prompt": f"def f{i}(x):\n    ", "max_tokens": 400, **sampling_params}
        for i, sampling_params in enumerate(batch_params)
    ]
    undisturbed = [live.complete(**one)["choices"][0]["text"] for one in wanted]
    before = live.wait_idle()["spaceserve_worker_restarts_total"]
    # Every stream says when it has had some of its events and waits for the kill, so that each kill meets all of them.
    meeting = threading.Barrier(len(wanted) + 1, timeout=60)

    def read(one: dict[str, Any]) -> str:
        pieces = []
        for number, event in enumerate(live.stream(**one, return_token_ids=True), start=1):
            pieces.append(event["choices"][0]["text"])
            if number in (5, 12):
                meeting.wait()
                meeting.wait()
        return "".join(pieces)

    killed = []
    with ThreadPoolExecutor(len(wanted)) as pool:
        streams = [pool.submit(read, one) for one in wanted]
        for _ in range(KILLS):
            meeting.wait()
            killed.append(live.wait_worker())
            assert live.metrics()["spaceserve_requests{state=running}"] >= 2, "several streams lose it"
            os.kill(killed[-1], signal.SIGKILL)
            restarts = before + len(killed)
            live.wait_for(lambda now, n=restarts: now["spaceserve_worker_restarts_total"] == n, "another worker")
            meeting.wait()
        texts = [stream.result() for stream in streams]
    assert texts == undisturbed
    after = live.wait_idle()
    assert after["spaceserve_worker_restarts_total"] - before == KILLS
    assert live.wait_worker() not in killed
    assert len(set(killed)) == KILLS


def test_a_worker_that_is_told_to_end_finishes_what_runs_and_is_no_loss(live: Any) -> None:
    wanted = {"prompt": "def g(x):\n    ", "max_tokens": 400, "temperature": 0.9, "seed": 5}
    text = live.complete(**wanted)["choices"][0]["text"]
    before = live.wait_idle()["spaceserve_worker_restarts_total"]
    pieces, ended = [], 0
    for event in live.stream(**wanted):
        if not pieces:
            ended = live.wait_worker()
            os.kill(ended, signal.SIGTERM)
        pieces.append(event)
    assert "".join(event["choices"][0]["text"] for event in pieces) == text
    assert live.complete(**wanted)["choices"][0]["text"] == text
    assert live.wait_worker() != ended
    assert live.metrics()["spaceserve_worker_restarts_total"] == before


def test_requests_wait_while_the_worker_is_away_and_may_leave(live: Any) -> None:
    text = live.complete("while True:", seed=1, temperature=1)["choices"][0]["text"]
    live.wait_idle()
    os.kill(live.wait_worker(), signal.SIGKILL)
    live.wait_for(lambda now: now["spaceserve_worker_up"] == 0, "the loss is seen")
    assert live.http.get("/health").status_code == 503
    with closing(live.connect({"prompt": "I shall not wait"})):
        live.wait_for(lambda now: now["spaceserve_requests{state=queued}"] == 1, "it is queued")
    live.wait_for(lambda now: now["spaceserve_requests{state=queued}"] == 0, "it has left the queue")
    assert live.complete("while True:", seed=1, temperature=1)["choices"][0]["text"] == text
    assert live.http.get("/health").status_code == 200


def faults(out: Path, *flags: str) -> dict[str, object]:
    """What a run that nothing may be lost in reports."""
    of_server = ["--num-threads", "1", "--num-blocks", "512", "--calibration-seconds", "0"]
    assert main(["faults", "--out", str(out), *flags, "--", *of_server]) == 0
    made: dict[str, object] = json.loads((out / "faults.json").read_text())
    assert (made["num_streams_lost"], made["num_tokens_different"], made["num_pages_leaked"]) == (0, 0, 0)
    return made


def test_streams_survive_kills_hangs_and_nonsense_with_the_text_of_their_solo_runs(
    checkpoint: Path, tmp_path: Path
) -> None:
    made = faults(
        tmp_path, "--model", str(checkpoint), "--faults", "2", "--streams", "8", "--tokens", "64", "--pause", "0.3"
    )
    assert made["num_kills_and_hangs"] == 2
    assert made["num_faults"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_same_with_every_kind_of_fault_and_more_streams(checkpoint: Path, tmp_path: Path, num_workers: int) -> None:
    made = faults(
        tmp_path, "--model", str(checkpoint), "--faults", "20", "--streams", "32", "--tokens", "160",
        "--workers", str(num_workers),
    )  # fmt: skip
    assert made["num_kills_and_hangs"] == 20


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


def text_of(url: str, **fields: Any) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={**LONG, **fields}, timeout=SECONDS)
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
        reported = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert whole.startswith(reported)
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
            wanted = text_of(url, max_tokens=40)
            workers[0].send_signal(signal.SIGTERM)
            for _ in range(12):
                assert text_of(url, max_tokens=40) == wanted
        assert workers[0].wait(60) == 0


def _until(holds: Any) -> None:
    limit = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)
