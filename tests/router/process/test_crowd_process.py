"""More than can be served, and readers that do not read, measured: `pytest -m slow -s tests/router/process`."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from doubles.tcp import tcp_connection

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
StartServer = Callable[..., AbstractContextManager[Any]]
STEP = 0.02
NUM_TOKENS = 40
BODY = {"prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
NUM_SEATS = 4
CAPACITY = NUM_SEATS / (STEP * NUM_TOKENS)
"""Requests a second: all seats taken, all the time."""


HELD = ("num_running", "num_queued", "blocks_held")


def said(figures: str) -> None:
    """Shown by `pytest -s`."""
    sys.stdout.write(f"\n{figures}\n")


@dataclass
class Answer:
    status: int
    headers: bytes
    seconds: float


async def ask(address: tuple[str, int], body: dict[str, Any]) -> Answer:
    """On a connection of its own, without a client's own costs."""
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(content)
    async with tcp_connection("{}:{}".format(*address)) as (reader, writer):
        begun = time.monotonic()
        writer.write(head + content)
        whole = await reader.read(-1)
        seconds = time.monotonic() - begun
    return Answer(int(whole[9:12]), whole.partition(b"\r\n\r\n")[0].lower(), seconds)


async def offer(address: tuple[str, int], rate: float, seconds: float) -> list[Answer]:
    """Requests at an even rate, whatever becomes of those before."""
    begun, asked = time.monotonic(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
        asked.append(asyncio.create_task(ask(address, BODY)))
    return list(await asyncio.gather(*asked))


def address_of(url: str) -> tuple[str, int]:
    place = urlsplit(url)
    return str(place.hostname), int(place.port or 0)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def test_at_ten_times_capacity_some_are_served_as_ever_and_the_rest_is_told_at_once_when_to_come(
    start_server: StartServer,
) -> None:
    worker = ["--accepts", "never", "--step-seconds", str(STEP), "--max-sequences", str(NUM_SEATS)]
    with start_server("--max-queue", "4", worker=worker) as server:
        address = address_of(server.url)
        full = asyncio.run(offer(address, 1.5 * CAPACITY, 8.0))  # seats and queue are taken
        over = asyncio.run(offer(address, 10 * CAPACITY, 12.0))
        after = asyncio.run(offer(address, 0.5 * CAPACITY, 4.0))
    usual = [answer.seconds for answer in full if answer.status == 200]
    served = [answer.seconds for answer in over if answer.status == 200]
    refused = [answer for answer in over if answer.status != 200]
    refusal_seconds = [answer.seconds for answer in refused]
    rate = len(served) / 12.0
    said(
        f"capacity {CAPACITY:.0f}/s; offered {10 * CAPACITY:.0f}/s: served {rate:.1f}/s, median {median(served):.3f} s "
        f"(at 1.5 times: {median(usual):.3f} s); {len(refused)} refused, "
        f"median {1000 * median(refusal_seconds):.1f} ms, "
        f"99 of 100 within {1000 * quantiles(refusal_seconds, n=100)[98]:.1f} ms, "
        f"longest {1000 * max(refusal_seconds):.1f} ms"
    )
    assert {answer.status for answer in refused} == {429}
    assert all(b"retry-after: " in answer.headers for answer in refused)
    assert quantiles(refusal_seconds, n=100)[98] < 0.05
    assert median(served) < 1.1 * median(usual)
    assert rate > 0.7 * CAPACITY, "the queue goes on"
    assert {answer.status for answer in after} == {200}, "nothing is left of it"


def test_sixty_four_slow_readers_are_felt_by_no_fast_one(start_server: StartServer) -> None:
    worker = ["--accepts", "never", "--step-seconds", str(STEP), "--max-sequences", "72", "--num-blocks", "4096"]
    flags = ["--client-buffer", "4KiB", "--slow-reader-timeout", "25"]
    slow_body = {"prompt": "y", "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 5}
    with start_server(*flags, worker=worker) as server, ExitStack() as open_sockets:
        address = address_of(server.url)

        def fast() -> list[float]:
            return [answer.seconds for answer in asyncio.run(offer(address, 2.0, 8.0)) if answer.status == 200]

        fast()  # warm
        alone = fast()
        content = json.dumps(slow_body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(content)
        for _ in range(64):
            connection = open_sockets.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(address)
            connection.sendall(head + content)
        limit = time.monotonic() + 60
        last = -1.0
        while (made := metric(server.url, "spaceserve_generated_tokens_total")) != last:  # until they are paused
            assert time.monotonic() < limit
            last = made
            time.sleep(1.0)
        assert made < 64 * 1900
        beside = fast()
        while metric(server.url, "spaceserve_slow_readers_cut_total") < 64:
            assert time.monotonic() < limit + 60
            time.sleep(0.5)
        while any(load := [httpx.get(f"{server.url}/load").json()[name] for name in HELD]):
            assert time.monotonic() < limit + 70, load
            time.sleep(0.1)
    said(f"alone {median(alone):.4f} s, beside 64 slow readers {median(beside):.4f} s")
    assert len(alone) == len(beside) == 16
    assert median(beside) < 1.1 * median(alone)
