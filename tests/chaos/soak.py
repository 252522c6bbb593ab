"""Mixed load for an hour, and whether anything grows: memory, open files, latency, pages."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import socket
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, astuple, dataclass
from typing import Any

from perf.harness import PerfError, Report, log, table
from processes import ProcessFigures
from space_common.http_client import Endpoint, HttpError, get_json, get_text, post_json
from space_common.process import ServerProcess
from space_eval.bench.meters import idle
from space_eval.data import built_in, long_text
from space_eval.report import facts

from chaos.harness import PATH, StreamAnswer, add_flags, ask, num_leaked_pages, raw_request, stream_choices

SLOW_SECONDS = 5.0  # after which a slow reader disconnects

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class Visits:
    """Draws one visit after the other; the same seed draws the same, and counts by kind what became of them."""

    def __init__(self, endpoint: Endpoint, *, window: int, text: str, seed: int) -> None:
        """`text`: what prompts are cut from; `window`: of the model, in tokens."""
        self.num_done: Counter[str] = Counter()
        self.num_refused: Counter[str] = Counter()  # 429: the queue was full, as it may be
        self.wrong: list[str] = []  # what should not have happened
        self._endpoint = endpoint
        self._window = window
        self._text = text
        self._source = random.Random(seed)
        self._kinds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream": (30, self._stream), "whole answer": (10, self._whole), "cancelled": (15, self._cancelled),
            "slow reader": (5, self._slow), "long prompt": (8, self._long), "grammar": (8, self._grammar),
            "prediction": (8, self._prediction), "several choices": (8, self._choices), "mistake": (8, self._mistake),
        }  # fmt: skip

    async def one(self) -> None:
        """One visit; an error is recorded, not raised."""
        kinds = list(self._kinds)
        (kind,) = self._source.choices(kinds, [self._kinds[name][0] for name in kinds])
        try:
            await self._kinds[kind][1]()
        except HttpError as error:
            if error.status == 429:
                self.num_refused[kind] += 1
                await asyncio.sleep(0.5)
            else:
                self.wrong.append(f"{kind}: {error}")
            return
        self.num_done[kind] += 1

    def _prompt(self, num_characters: int) -> str:
        start = self._source.randrange(len(self._text) - num_characters)
        return self._text[start : start + num_characters]

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {
            "prompt": self._prompt(self._source.randint(20, 200)), "max_tokens": self._source.randint(8, 96),
            "temperature": self._source.choice([0.0, 0.8]), "seed": self._source.randrange(1 << 32),
            "speculation": self._source.choice(["auto", "auto", "off", 2]), **fields,
        }  # fmt: skip

    async def _events(self, body: Mapping[str, Any], leave_after: int | None = None) -> None:
        """Read a stream to its end, or disconnect after so many choices of events."""
        num_choices = 0
        async with aclosing(stream_choices(self._endpoint, PATH, {**body, "stream": True})) as stream:
            async for choices in stream:
                num_choices += len(choices)
                if leave_after is not None and num_choices >= leave_after:
                    return

    async def _stream(self) -> None:
        await self._events(self._body())

    async def _whole(self) -> None:
        await post_json(self._endpoint, PATH, self._body())

    async def _cancelled(self) -> None:
        await self._events(self._body(max_tokens=200, ignore_eos=True), self._source.randint(1, 30))

    async def _long(self) -> None:
        body = self._body(prompt=self._prompt(8 * self._window), truncate_prompt_tokens=self._window * 3 // 4)
        await self._events({**body, "max_tokens": 16})

    async def _grammar(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
        answer = await post_json(self._endpoint, PATH, self._body(response_format=form, max_tokens=96))
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])

    async def _prediction(self) -> None:
        text = self._prompt(150)
        await self._events(self._body(prompt=text, prediction={"type": "content", "content": text}))

    async def _choices(self) -> None:
        await post_json(self._endpoint, PATH, self._body(n=self._source.randint(2, 4), temperature=1.0))

    async def _mistake(self) -> None:
        """A request that cannot be served must be refused with a client error and a message."""
        wrong: list[dict[str, Any]] = [
            {"prompt": 5.5}, {"max_tokens": -1}, {"temperature": "warm"}, {"prompt": [2**31]},
            {"prompt": self._prompt(8 * self._window), "truncate_prompt_tokens": None},
            {"structured_outputs": {"regex": "("}},
        ]  # fmt: skip
        try:
            await post_json(self._endpoint, PATH, self._body(**self._source.choice(wrong)))
        except HttpError as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
        else:
            raise HttpError("A request that cannot be served was answered with 200.")

    async def _slow(self) -> None:
        """Read a few bytes at a time through a small buffer; then disconnect."""
        request = raw_request(self._body(max_tokens=400, ignore_eos=True, stream=True))
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with connection, suppress(ConnectionError):
            await loop.sock_connect(connection, (self._endpoint.host, self._endpoint.port))
            await loop.sock_sendall(connection, request)
            end = loop.time() + SLOW_SECONDS
            while loop.time() < end and await loop.sock_recv(connection, 64):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


RESTARTS = "spaceserve_worker_restarts_total "
WARM_UP = 0.2  # share of the time at the beginning that slopes leave out: caches fill and code is loaded

SERIES = (
    *(f"{process}, {what}" for what in ("MiB", "files", "threads") for process in ("router", "worker")),
    "probe, ms to the first token", "probe, ms to the last token", "pages held", "requests running",
)  # fmt: skip
"""What is watched."""

Observation = dict[str, float]  # at one moment: `seconds` since the begin, and each of SERIES


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError, HttpError, and PerfError for a run that is too short."""
    if options.minutes * 60 < 8 * options.every:
        raise PerfError(f"--minutes {options.minutes:g} holds fewer than 8 observations; let it run longer.")
    with ServerProcess(["--model", options.model, *options.serve_flags]) as server:
        return asyncio.run(_soak(server, options))


async def _soak(server: ServerProcess, options: argparse.Namespace) -> Report:
    endpoint = Endpoint.parse(server.url)
    info = await get_json(endpoint, "/info")
    visits = Visits(endpoint, window=info["max_total_tokens"], text=long_text(), seed=options.seed)
    probe = Probe(endpoint)
    await probe.send()
    clock = asyncio.get_running_loop().time
    begun = clock()
    end = begun + 60 * options.minutes

    async def client() -> None:
        while clock() < end:
            await visits.one()

    seen: list[Observation] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(client())
        while clock() < end:
            await asyncio.sleep(max(0.0, begun + len(seen) * options.every - clock()))
            seen.append({"seconds": clock() - begun, **await _observe(server, endpoint, probe)})
            log("; ".join(f"{name}: {value:.0f}" for name, value in seen[-1].items()))
    await idle(endpoint, is_ours=True)
    failures = {
        "changes of the probe's text": probe.num_changed,
        "pages leaked": await num_leaked_pages(endpoint),
        "workers lost": await _num_restarts(endpoint),
    }
    return report(facts(info), seen, visits, failures)


class Probe:
    """The same request again and again: how long it takes beside the others, and whether its answer changes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_changed = 0
        self._endpoint = endpoint
        self._first: StreamAnswer | None = None

    async def send(self) -> tuple[float, float]:
        """Milliseconds to the first token and to the last."""
        clock = asyncio.get_running_loop().time
        begun, firsts = clock(), list[float]()
        body = {"prompt": built_in()[0], "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "priority": -10}
        answer = await ask(self._endpoint, body, lambda num_tokens: firsts.append(clock()))
        self._first = self._first or answer
        self.num_changed += answer != self._first
        return 1000 * (firsts[0] - begun), 1000 * (clock() - begun)


async def _observe(server: ServerProcess, endpoint: Endpoint, probe: Probe) -> Observation:
    first, last = await probe.send()
    load = await get_json(endpoint, "/load")
    found: Observation = {"probe, ms to the first token": first, "probe, ms to the last token": last}
    for name, pid in (("router", server.pid), ("worker", (server.worker_pids() or [0])[-1])):
        process = ProcessFigures.of(pid)
        found[f"{name}, MiB"] = process.resident_bytes / 2**20
        found[f"{name}, files"], found[f"{name}, threads"] = process.num_files, process.num_threads
    return found | {"pages held": load["blocks_held"], "requests running": load["num_running"]}


async def _num_restarts(endpoint: Endpoint) -> int:
    lines = (await get_text(endpoint, "/metrics")).splitlines()
    return int(sum(float(line.split()[1]) for line in lines if line.startswith(RESTARTS)))


@dataclass(frozen=True)
class Slope:
    """By least squares."""

    begin: float  # median of the first tenth
    end: float  # median of the last tenth
    per_hour: float
    error: float  # standard error of `per_hour`, if the errors are independent


def slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Of (seconds, value). Raises ValueError for fewer than three points."""
    if len(points) < 3:
        raise ValueError(f"A slope takes 3 points; there are {len(points)}. Let the soak run longer.")
    hours, values = [seconds / 3600 for seconds, _ in points], [value for _, value in points]
    per_hour, intercept = statistics.linear_regression(hours, values)
    residual = sum((v - intercept - per_hour * h) ** 2 for h, v in zip(hours, values, strict=True))
    error = math.sqrt(residual / (len(points) - 2) / (len(points) * statistics.pvariance(hours)))
    tenth = max(1, len(points) // 10)
    return Slope(statistics.median(values[:tenth]), statistics.median(values[-tenth:]), per_hour, error)


def slopes(seen: Sequence[Observation]) -> dict[str, Slope]:
    """Of each of SERIES, after the warm-up."""
    steady = [one for one in seen if one["seconds"] >= WARM_UP * seen[-1]["seconds"]]
    return {name: slope([(one["seconds"], float(one[name])) for one in steady]) for name in SERIES}


def report(
    known: Mapping[str, Any], seen: Sequence[Observation], visits: Visits, failures: Mapping[str, int]
) -> Report:
    """`failures`: counts that must be 0."""
    found = slopes(seen)
    done = ", ".join(f"{number} {kind}" for kind, number in sorted(visits.num_done.items()))
    rows = [(name, *(f"{value:.2f}" for value in astuple(one))) for name, one in found.items()]
    return Report(
        title="Soak",
        facts=known,
        failures=[*visits.wrong[:20], *(f"{number} {what}." for what, number in failures.items() if number)],
        notes=f"{seen[-1]['seconds'] / 60:.1f} minutes, {visits.num_done.total()} visits done ({done}), "
        f"{visits.num_refused.total()} refused with 429, {len(visits.wrong)} that went wrong; "
        f"{', '.join(f'{number} {what}' for what, number in failures.items())}. Slopes after the first "
        f"{WARM_UP:.0%} of the time:",
        tables=[table(("", "begin", "end", "per hour", "±"), rows)],
        record={
            "num_done": visits.num_done, "num_refused": visits.num_refused, "failures": failures,
            "slopes": {name: asdict(one) for name, one in found.items()}, "observations": seen,
        },
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--minutes", 60.0, "of load"),
        ("--streams", 12, "clients at once"),
        ("--every", 5.0, "seconds between two observations"),
    )
