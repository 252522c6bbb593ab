"""Readers that do not read, beside fast ones, on a real model. `pytest -m slow -s tests/e2e/test_slow_readers.py`."""

import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from statistics import quantiles
from urllib.parse import urlsplit

import httpx
import pytest
from space_eval.bench_server import ServerProcess

pytestmark = pytest.mark.slow
NUM_SLOW, NUM_FAST, SECONDS = 64, 40, 120.0
FLAGS = ["--max-sequences", "72", "--client-buffer", "4KiB", "--slow-reader-timeout", "30", "--num-blocks", "4096"]


def test_sixty_four_slow_readers_are_felt_by_no_fast_one(
    serve: Callable[..., AbstractContextManager[ServerProcess]],
) -> None:
    with serve(*FLAGS) as server, ExitStack() as held:
        place = urlsplit(server.url)
        client = held.enter_context(httpx.Client(base_url=server.url, timeout=SECONDS))
        limit = time.monotonic() + SECONDS

        def metric(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])

        def fast() -> list[float]:
            found = []
            for number in range(NUM_FAST):
                begun = time.monotonic()
                body = {"prompt": f"fast {number}", "max_tokens": 60, "ignore_eos": True, "seed": number}
                assert client.post("/v1/completions", json=body).status_code == 200
                found.append(time.monotonic() - begun)
            return found

        fast()  # until everything is warm
        before = fast()
        content = json.dumps(
            {"prompt": "slow", "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 20}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        for _ in range(NUM_SLOW):
            connection = held.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((place.hostname, place.port))
            connection.sendall(head + content)
        last = -1.0
        while (made := metric("spaceserve_generated_tokens_total")) != last:  # until they are paused
            assert time.monotonic() < limit
            last = made
            time.sleep(1.0)
        assert (
            metric('spaceserve_requests{state="running"}') + metric('spaceserve_requests{state="queued"}') == NUM_SLOW
        )
        beside = fast()
        while metric("spaceserve_slow_readers_cut_total") < NUM_SLOW:
            assert time.monotonic() < limit + SECONDS
            time.sleep(0.5)
        after = fast()
    alone, crowded = fastest_quarter(before + after), fastest_quarter(beside)
    sys.stdout.write(f"\nalone {1000 * alone:.1f} ms, beside {NUM_SLOW} slow readers {1000 * crowded:.1f} ms\n")
    assert crowded < 1.1 * alone


def fastest_quarter(seconds: list[float]) -> float:
    """The slowest of them: whatever else the machine does only adds to the others."""
    return quantiles(seconds, n=4)[0]
