"""`spaceserve eval crowd`: readers that do not read beside fast ones, and ten times more requests than can be served.

The fast ones must keep their latency. Of too many requests, those that are taken must keep theirs, the others must be
told at once when to come again, and as many must be served as before. Exit status 0 if all of this holds, 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx

from space_eval.bench_facts import facts
from space_eval.bench_server import ServerError, ServerProcess

MOST_SLOWER = 1.1
"""Latency beside a crowd, at most so many times that without."""

REFUSAL_SECONDS = 0.05
"""In which 99 of 100 of those who cannot be served must have their whole answer."""

SOME_TIMES = 2.0
"""The capacity: what is a little too much, so that seats and queue are full and little else happens."""

LEAST_SERVED = 0.9
"""Requests a second of those without overload that must still be served at it."""

SETTLE_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="what is served: demo, a folder, a hub id [demo]")
    parser.add_argument("--slow", type=int, default=64, metavar="N", help="readers that do not read [64]")
    parser.add_argument("--fast", type=int, default=30, metavar="N", help="fast requests in a turn [30]")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="with and without slow readers [4]")
    parser.add_argument("--times", type=float, default=10.0, metavar="X", help="of the capacity that is offered [10]")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each load [30]")
    parser.add_argument("--seats", type=int, default=8, metavar="N", help="that run, and that wait, at overload [8]")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of an answer at overload [200]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")


def run(options: argparse.Namespace) -> int:
    """Exit status 0: everything held."""
    try:
        slow, over, info = asyncio.run(_both(options))
    except ServerError as error:
        print(f"spaceserve eval crowd: {error}", file=sys.stderr)
        return 1
    print(slow.sentence())
    print(over.sentence())
    if options.out is not None:
        made = {"facts": facts(info), "slow_readers": asdict(slow), "overload": asdict(over)}
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0 if slow.holds and over.holds else 1


async def _both(options: argparse.Namespace) -> tuple[SlowReaders, Overload, dict[str, Any]]:
    shared = ["--model", options.model, *options.serve_flags]
    beside = ["--max-sequences", str(options.slow + 8), "--client-buffer", "4KiB", "--num-blocks", "4096"]
    with ServerProcess([*shared, *beside, "--slow-reader-timeout", "600"]) as server:
        slow = await slow_readers(Place.of(server.url), options.slow, options.fast, options.turns)
    few = ["--max-sequences", str(options.seats), "--max-queue", str(options.seats)]
    with ServerProcess([*shared, *few]) as server:
        over = await overload(Place.of(server.url), options.seats, options.tokens, options.times, options.seconds)
        info = Place.of(server.url).info()
    return slow, over, info


@dataclass(frozen=True)
class Answer:
    """What came back, and how long it took from the first byte sent to the last one read."""

    status: int
    has_retry_after: bool
    seconds: float


@dataclass(frozen=True)
class Place:
    """A server, asked over bare sockets: a client's own work is no part of a latency."""

    url: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Place:
        parts = urlsplit(url)
        return cls(url, str(parts.hostname), int(parts.port or 80))

    def request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def ask(self, body: dict[str, Any]) -> Answer:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        begun = time.monotonic()
        writer.write(self.request(body))
        whole = await reader.read(-1)
        seconds = time.monotonic() - begun
        writer.close()
        return Answer(int(whole[9:12] or 0), b"\r\nretry-after:" in whole.lower(), seconds)

    def info(self) -> dict[str, Any]:
        """What the server says of itself."""
        found: dict[str, Any] = httpx.get(f"{self.url}/info", timeout=60).json()
        return found

    def metric(self, name: str) -> float:
        """One sample of /metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


# ------------------------------------------------------------------------------------------------ slow readers


@dataclass(frozen=True)
class SlowReaders:
    """Seconds of fast requests, one after the other, alone and beside readers that do not read."""

    num_slow: int
    num_each: int
    alone: float  # median
    alone_95: float
    beside: float
    beside_95: float

    @property
    def holds(self) -> bool:
        return self.beside < MOST_SLOWER * self.alone

    def sentence(self) -> str:
        return (
            f"{self.num_slow} slow readers: a fast request takes {1000 * self.alone:.1f} ms alone and "
            f"{1000 * self.beside:.1f} ms beside them ({100 * (self.beside / self.alone - 1):+.1f} %; medians of "
            f"{self.num_each}); "
            f"95 of 100 within {1000 * self.alone_95:.1f} and {1000 * self.beside_95:.1f} ms: {_verdict(self.holds)}"
        )


async def slow_readers(place: Place, num_slow: int, num_fast: int, num_turns: int) -> SlowReaders:
    """Turns with and without slow readers, so that a change of the machine meets both."""

    async def fast() -> list[float]:
        found = []
        for number in range(num_fast):
            body = {"prompt": f"fast {number}", "max_tokens": 60, "ignore_eos": True, "seed": number}
            answer = await place.ask(body)
            if answer.status != 200:
                raise ServerError(f"a fast request got {answer.status}")
            found.append(answer.seconds)
        return found

    await fast()  # until everything is warm
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(num_turns):
        alone += await fast()
        with ExitStack() as held:
            for number in range(num_slow):
                _stuck(place, number, held)
            await _paused(place, num_slow)
            beside += await fast()
        await _idle(place)
    return SlowReaders(num_slow, len(alone), median(alone), _of_100(alone, 95), median(beside), _of_100(beside, 95))


def _stuck(place: Place, seed: int, held: ExitStack) -> None:
    """A reader that asks for much and reads none of it."""
    connection = held.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((place.host, place.port))
    body = {"prompt": "slow", "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 20, "seed": seed}
    connection.sendall(place.request(body))


async def _paused(place: Place, num_slow: int) -> None:
    """Until they are all there and nothing more is made for them."""
    limit, last = time.monotonic() + SETTLE_SECONDS, -1.0
    while (made := place.metric("spaceserve_generated_tokens_total")) != last or _num_held(place) < num_slow:
        if time.monotonic() > limit:
            raise ServerError(f"the slow readers are not all paused: {_num_held(place):g} of {num_slow} are held")
        last = made
        await asyncio.sleep(1.0)


async def _idle(place: Place) -> None:
    limit = time.monotonic() + SETTLE_SECONDS
    while _num_held(place):
        if time.monotonic() > limit:
            raise ServerError("requests of clients that have gone are still held")
        await asyncio.sleep(0.2)


def _num_held(place: Place) -> float:
    return sum(place.metric(f'spaceserve_requests{{state="{state}"}}') for state in ("running", "queued"))


# ------------------------------------------------------------------------------------------------ overload


@dataclass(frozen=True)
class Overload:
    """Requests of a load a little above the capacity, and of one far above it."""

    capacity: float  # requests a second
    offered: float
    served: float  # a second, a little above the capacity
    served_over: float  # a second, far above it
    seconds: float  # of a request that is served, a little above: it waits for its turn there, too
    seconds_over: float
    num_refused: int
    num_wrong: int  # refused otherwise than by 429 with Retry-After
    refused: float  # seconds, median
    refused_99: float
    refused_last: float
    seconds_after: float  # of a request alone once it is over
    seconds_before: float

    @property
    def holds(self) -> bool:
        return (
            self.num_refused > 0
            and self.num_wrong == 0
            and self.seconds_over < MOST_SLOWER * self.seconds
            and self.served_over > LEAST_SERVED * self.served
            and self.refused_99 < REFUSAL_SECONDS
        )

    def sentence(self) -> str:
        return (
            f"overload: {self.offered:.0f} requests/s at a capacity of {self.capacity:.1f}/s: {self.served_over:.1f}/s "
            f"served in {self.seconds_over:.2f} s each (at {SOME_TIMES:g} times: {self.served:.1f}/s in "
            f"{self.seconds:.2f} s, medians); {self.num_refused} refused, {self.num_wrong} of them otherwise than by "
            "429 with Retry-After, "
            f"median {1000 * self.refused:.1f} ms, 99 of 100 within {1000 * self.refused_99:.1f} ms, longest "
            f"{1000 * self.refused_last:.1f} ms; one alone {self.seconds_before:.2f} s before and "
            f"{self.seconds_after:.2f} s after: {_verdict(self.holds)}"
        )


async def overload(place: Place, num_seats: int, num_tokens: int, times: float, seconds: float) -> Overload:
    """First as many as run at once, each followed by the next: the capacity. Then more, at an even rate."""

    def body(seed: int) -> dict[str, Any]:
        return {"prompt": "x = ", "max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "temperature": 1}

    async def ask(seed: int) -> Answer:
        return await place.ask(body(seed))

    async def one_after_another(first: int, until: float) -> int:
        num_done = 0
        while time.monotonic() < until:
            await ask(first + num_done)
            num_done += 1
        return num_done

    async def offer(rate: float) -> list[Answer]:
        begun, asked = time.monotonic(), []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            asked.append(asyncio.create_task(ask(number)))
        return list(await asyncio.gather(*asked))

    await one_after_another(0, time.monotonic() + seconds / 4)  # until everything is warm
    before = median([(await ask(number)).seconds for number in range(5)])
    until = time.monotonic() + seconds
    capacity = sum(await asyncio.gather(*(one_after_another(1000 * n, until) for n in range(num_seats)))) / seconds
    some = [one.seconds for one in await offer(SOME_TIMES * capacity) if one.status == 200]
    over = await offer(times * capacity)
    after = median([(await ask(number)).seconds for number in range(5)])
    taken = [one.seconds for one in over if one.status == 200]
    refused = [one for one in over if one.status != 200]
    told = [one.seconds for one in refused] or [0.0]
    return Overload(
        capacity=capacity,
        offered=times * capacity,
        served=len(some) / seconds,
        served_over=len(taken) / seconds,
        seconds=median(some),
        seconds_over=median(taken),
        num_refused=len(refused),
        num_wrong=sum(one.status != 429 or not one.has_retry_after for one in refused),
        refused=median(told),
        refused_99=_of_100(told, 99),
        refused_last=max(told),
        seconds_before=before,
        seconds_after=after,
    )


def _of_100(values: list[float], number: int) -> float:
    """The value that so many of 100 do not exceed."""
    return quantiles(values, n=100, method="inclusive")[number - 1] if len(values) > 1 else values[0]


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"
