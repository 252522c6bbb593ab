"""Readers that do not read beside fast ones, and ten times more requests than can be served.

The fast readers must keep their latency. Of too many requests, those that are accepted must keep theirs, the others
must be rejected at once with the time to retry, and as many must be served as without overload.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from doubles.tcp import tcp_connection
from perf.harness import Report, table
from space_common.http_client import Endpoint, get_json, get_text
from space_common.process import ServerError, ServerProcess
from space_eval.report import facts

from chaos.harness import add_flags, raw_request

MAX_SLOWDOWN = 1.1  # of latency beside slow readers or overload, against that without
MAX_REJECTION_SECONDS = 0.05  # in which 99 of 100 rejected requests must have their whole answer
FULL_LOAD = 2.0  # times the capacity: batch and queue are full, and little is rejected
MIN_SERVED = 0.9  # requests a second under overload, against those at full load
SETTLE_SECONDS = 120.0


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError and HttpError."""
    shared = ["--model", options.model, *options.serve_flags]
    many = ["--max-sequences", str(options.slow + 8), "--client-buffer", "4KiB", "--num-blocks", "4096"]
    with ServerProcess([*shared, *many, "--slow-reader-timeout", "600"]) as server:
        slow = asyncio.run(slow_readers(Endpoint.parse(server.url), options.slow, options.fast, options.turns))
    few = ["--max-sequences", str(options.seats), "--max-queue", str(options.seats)]
    with ServerProcess([*shared, *few]) as server:
        endpoint = Endpoint.parse(server.url)
        over = asyncio.run(overload(endpoint, options.seats, options.tokens, options.times, options.seconds))
        known = facts(asyncio.run(get_json(endpoint, "/info")))
    figures = [*slow, *over]
    return Report(
        title="Crowd",
        facts=known,
        failures=[f"{one.what}: {one.value:.4g}" for one in figures if not one.holds],
        notes=f"{options.slow} readers that do not read; then {options.times:g} times the capacity.",
        tables=[table(("what", "measured", "bound", "holds"), [one.row() for one in figures])],
        record={"figures": {one.what: one.value for one in figures}},
    )


@dataclass(frozen=True)
class Figure:
    """What was measured, and what it must be."""

    what: str
    value: float
    most: float = math.inf
    least: float = -math.inf

    @property
    def holds(self) -> bool:
        return self.least <= self.value <= self.most

    def row(self) -> tuple[str, str, str, str]:
        if self.most == -self.least:  # both infinite
            return self.what, f"{self.value:.4g}", "", ""
        bound = f"≤ {self.most:.4g}" if self.most < math.inf else f"≥ {self.least:.4g}"
        return self.what, f"{self.value:.4g}", bound, "yes" if self.holds else "NO"


@dataclass(frozen=True)
class TimedAnswer:
    """The outcome of a request, and the seconds from the first byte sent to the last one read."""

    status: int
    has_retry_after: bool
    seconds: float


async def timed(endpoint: Endpoint, body: dict[str, Any]) -> TimedAnswer:
    """Over a bare socket: a client's own work is no part of the latency."""
    async with tcp_connection(f"{endpoint.host}:{endpoint.port}") as (reader, writer):
        begun = time.monotonic()
        writer.write(raw_request(body))
        whole = await reader.read(-1)
        seconds = time.monotonic() - begun
    return TimedAnswer(int(whole[9:12] or 0), b"\r\nretry-after:" in whole.lower(), seconds)


# ------------------------------------------------------------------------------------------------ slow readers


def slow_reader_figures(alone: Sequence[float], beside: Sequence[float]) -> list[Figure]:
    """Of seconds that fast requests took alone, and beside slow readers."""
    return [
        Figure("fast request alone, s (median)", median(alone)),
        Figure("fast request beside slow readers, s (median)", median(beside), most=MAX_SLOWDOWN * median(alone)),
        Figure("fast request alone, s (95 of 100)", _of_100(alone, 95)),
        Figure("fast request beside slow readers, s (95 of 100)", _of_100(beside, 95)),
    ]


async def slow_readers(endpoint: Endpoint, num_slow: int, num_fast: int, num_turns: int) -> list[Figure]:
    """In turns with and without slow readers, so that a change of the machine meets both."""

    async def fast() -> list[float]:
        seconds = []
        for number in range(num_fast):
            body = {"prompt": f"fast {number}", "max_tokens": 60, "ignore_eos": True, "seed": number}
            answer = await timed(endpoint, body)
            if answer.status != 200:
                raise ServerError(f"a fast request got {answer.status}")
            seconds.append(answer.seconds)
        return seconds

    await fast()  # warm up
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(num_turns):
        alone += await fast()
        with ExitStack() as held:
            for number in range(num_slow):
                held.enter_context(unread_stream(endpoint, number))
            await _wait_paused(endpoint, num_slow)
            beside += await fast()
        await _wait_gone(endpoint)
    return slow_reader_figures(alone, beside)


def unread_stream(endpoint: Endpoint, seed: int) -> socket.socket:
    """The connection of a client that asks for much and reads none of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((endpoint.host, endpoint.port))
    body = {"prompt": "slow", "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 20, "seed": seed}
    connection.sendall(raw_request(body))
    return connection


async def _wait_paused(endpoint: Endpoint, num_slow: int) -> None:
    """Until all slow readers are held and no more tokens are generated for them."""
    limit, last = time.monotonic() + SETTLE_SECONDS, -1.0
    while True:
        (made,), held = await _samples(endpoint, "spaceserve_generated_tokens_total"), await _num_held(endpoint)
        if made == last and held >= num_slow:
            return
        if time.monotonic() > limit:
            raise ServerError(f"the slow readers are not all paused: {held:g} of {num_slow} are held")
        last = made
        await asyncio.sleep(1.0)


async def _wait_gone(endpoint: Endpoint) -> None:
    limit = time.monotonic() + SETTLE_SECONDS
    while await _num_held(endpoint):
        if time.monotonic() > limit:
            raise ServerError("requests of clients that have disconnected are still held")
        await asyncio.sleep(0.2)


async def _num_held(endpoint: Endpoint) -> float:
    names = (f'spaceserve_requests{{state="{state}"}}' for state in ("running", "queued"))
    return sum(await _samples(endpoint, *names))


async def _samples(endpoint: Endpoint, *names: str) -> list[float]:
    lines = (await get_text(endpoint, "/metrics")).splitlines()
    return [float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2]) for name in names]


# ------------------------------------------------------------------------------------------------ overload


def overload_figures(seconds: float, full: Sequence[TimedAnswer], over: Sequence[TimedAnswer]) -> list[Figure]:
    """Of a load that fills batch and queue, and of one far above the capacity; both for so many seconds."""
    served = [one.seconds for one in full if one.status == 200]
    served_over = [one.seconds for one in over if one.status == 200]
    refused = [one for one in over if one.status != 200]
    num_wrong = sum(one.status != 429 or not one.has_retry_after for one in refused)
    refusals = [one.seconds for one in refused] or [0.0]
    least_served = MIN_SERVED * len(served) / seconds
    return [
        Figure("offered, requests/s", len(over) / seconds),
        Figure(f"served at {FULL_LOAD:g} times the capacity, requests/s", len(served) / seconds),
        Figure("served, requests/s", len(served_over) / seconds, least=least_served),
        Figure("request that is served, s (median)", median(served_over), most=MAX_SLOWDOWN * median(served)),
        Figure("refused", len(refused), least=1),
        Figure("refused otherwise than by 429 with Retry-After", num_wrong, most=0),
        Figure("refusal, s (median)", median(refusals)),
        Figure("refusal, s (99 of 100)", _of_100(refusals, 99), most=MAX_REJECTION_SECONDS),
        Figure("refusal, s (longest)", max(refusals)),
    ]


async def overload(
    endpoint: Endpoint, num_connections: int, num_tokens: int, times: float, seconds: float
) -> list[Figure]:
    """A closed loop of `num_connections` clients shows the capacity; then more requests come at an even rate."""

    async def ask(seed: int) -> TimedAnswer:
        body = {"prompt": "x = ", "max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "temperature": 1}
        return await timed(endpoint, body)

    async def client(first: int, until: float) -> int:
        num_done = 0
        while time.monotonic() < until:
            await ask(first + num_done)
            num_done += 1
        return num_done

    async def offer(rate: float) -> list[TimedAnswer]:
        begun, asked = time.monotonic(), []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            asked.append(asyncio.create_task(ask(number)))
        return list(await asyncio.gather(*asked))

    await client(0, time.monotonic() + seconds / 4)  # warm up
    before = median([(await ask(number)).seconds for number in range(5)])
    until = time.monotonic() + seconds
    capacity = sum(await asyncio.gather(*(client(1000 * n, until) for n in range(num_connections)))) / seconds
    full = await offer(FULL_LOAD * capacity)
    over = await offer(times * capacity)
    after = median([(await ask(number)).seconds for number in range(5)])
    return [
        Figure("capacity, requests/s", capacity),
        *overload_figures(seconds, full, over),
        Figure("one request alone before, s (median)", before),
        Figure("one request alone after, s (median)", after),
    ]


def _of_100(values: Sequence[float], number: int) -> float:
    """The value that so many of 100 do not exceed."""
    return quantiles(values, n=100, method="inclusive")[number - 1] if len(values) > 1 else values[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, ("--slow", 64, "readers that do not read"), ("--fast", 30, "fast requests in a turn"),
        ("--turns", 4, "with and without slow readers"), ("--times", 10.0, "of the capacity that is offered"),
        ("--seconds", 30.0, "of each load"), ("--seats", 8, "requests that run, and that wait, at overload"),
        ("--tokens", 200, "of an answer at overload"),
    )  # fmt: skip
