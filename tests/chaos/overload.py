"""Several API keys ask for half to ten times what the server can do: what is answered in time, and to whom.

Requests of mixed lengths come as a Poisson process whatever the answers, at shares that differ by --greed. Beyond the
capacity as much must be answered in time as at best, waiting must stay bounded, and every key that asks for more than
its share must get as many tokens as the others. The clients run on the server's cores: what they take there is shown.
A server that is started for this bounds its queue by the expected wait, at 0.7 of --first-token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from perf.harness import Report, log, numbers, table
from space_common.http_client import Endpoint, HttpError, get_json, get_text, parsed, stream_events
from space_common.process import ServerProcess
from space_eval.bench.meters import idle
from space_eval.data import long_text
from space_eval.report import facts

from chaos.crowd import Figure
from chaos.harness import PATH, add_flags

MIN_GOODPUT = 0.95  # of the best of all loads
MAX_SPREAD = 0.05  # of a key's tokens around the mean of those that ask for more than their share
MAX_TAIL = 2.0  # p99 over the median of the first token's time
MAX_WAIT = 2.0  # p99 of the wait over the time in which the whole queue is served
BACKLOG = 1.2  # a key asks for more than its share where it asks for so many times of it
QUEUE_SHARE = 0.7  # of the seconds within which an answer in time begins: what a request may wait in the queue
CLIENTS = "clients"
LENGTHS = (
    (40, 24),
    (40, 96),
    (120, 48),
    (120, 128),
    (240, 24),
    (240, 96),
)  # about so many prompt tokens, and an answer
CHARACTERS = 3.4  # of a prompt token, about


@dataclass(frozen=True)
class RequestKind:
    """A prompt and the length of its answer."""

    prompt: str
    num_prompt: int
    num_answer: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_answer


@dataclass
class Arrival:
    """One request and what became of it. Seconds are those of its load."""

    at: float
    tenant: int
    kind: RequestKind
    status: int = 0  # 0: the stream broke, or the load was over before its end
    retry_after: float | None = None
    tokens: list[tuple[float, int]] = field(default_factory=list)  # when, how many
    ended: float | None = None  # None: not whole

    @property
    def first_token(self) -> float | None:
        """Seconds from its arrival."""
        return self.tokens[0][0] - self.at if self.tokens else None

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.tokens)

    def is_in_time(self, first_token: float, per_token: float) -> bool:
        """Whether it is whole, its first token came within `first_token` s and the others at least each `per_token`."""
        if self.ended is None or self.first_token is None or self.first_token > first_token:
            return False
        return self.ended - self.tokens[0][0] <= per_token * max(1, self.num_tokens - 1)


def arrivals(rates: Sequence[float], seconds: float, seed: int, kinds: Sequence[RequestKind]) -> list[Arrival]:
    """A Poisson process of `rates[tenant]` requests a second for each tenant, over `seconds`, in order."""
    found = []
    for tenant, rate in enumerate(rates):
        source, at = random.Random(f"{seed} {tenant}"), 0.0
        while (at := at + source.expovariate(rate)) < seconds:
            found.append(Arrival(at, tenant, source.choice(kinds)))
    return sorted(found, key=lambda one: one.at)


@dataclass(frozen=True)
class LoadResult:
    """What became of one load, from `begin` to `end` of its seconds."""

    load: float  # times the capacity
    shares: Sequence[float]  # of the requests, by tenant
    arrivals: Sequence[Arrival]
    begin: float
    end: float
    first_token: float  # seconds within which an answer in time has begun
    per_token: float
    waits: Sequence[float] = ()  # p50 and p99 of the seconds in the queue, as the server counts them
    used: Mapping[str, float] = field(default_factory=dict)  # cores that clients, router and workers took

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def _within(self, moment: float | None) -> bool:
        return moment is not None and self.begin <= moment < self.end

    @property
    def answered(self) -> list[Arrival]:
        """Whole answers that ended within the time."""
        return [one for one in self.arrivals if self._within(one.ended)]

    @property
    def in_time(self) -> list[Arrival]:
        return [one for one in self.answered if one.is_in_time(self.first_token, self.per_token)]

    @property
    def goodput(self) -> float:
        """Answer tokens a second of requests that were answered in time."""
        return sum(one.num_tokens for one in self.in_time) / self.seconds

    @property
    def throughput(self) -> float:
        """Answer tokens a second, whatever became of their requests."""
        return sum(n for one in self.arrivals for at, n in one.tokens if self._within(at)) / self.seconds

    @property
    def refused(self) -> list[Arrival]:
        return [one for one in self.arrivals if self._within(one.at) and one.status not in (0, 200)]

    @property
    def num_wrong(self) -> int:
        """Refusals other than 429 with Retry-After."""
        return sum(one.status != 429 or one.retry_after is None for one in self.refused)

    @property
    def first_tokens(self) -> list[float]:
        """Seconds to the first token, of those that came within the time."""
        return [one.first_token for one in self.arrivals if one.first_token and self._within(one.tokens[0][0])]

    def tenant_tokens(self) -> list[int]:
        """Prompt and answer tokens that each tenant got within the time; a prompt counts with the first token."""
        counts = Counter[int]()
        for one in self.arrivals:
            counts[one.tenant] += sum(number for at, number in one.tokens if self._within(at))
            if one.tokens and self._within(one.tokens[0][0]):
                counts[one.tenant] += one.kind.num_prompt
        return [counts[tenant] for tenant in range(len(self.shares))]

    @property
    def are_all_greedy(self) -> bool:
        """Whether every tenant asks for more than an equal share of the capacity."""
        return min(self.shares) * self.load * len(self.shares) >= BACKLOG

    @property
    def spread(self) -> float:
        """How far a tenant's tokens are from the mean, over the mean."""
        tokens = self.tenant_tokens()
        mean = fmean(tokens)
        return max(abs(one - mean) for one in tokens) / mean if mean else math.inf

    def row(self) -> tuple[str, ...]:
        first, retries = self.first_tokens, [one.retry_after for one in self.refused if one.retry_after is not None]
        offered = sum(self._within(one.at) for one in self.arrivals) / self.seconds
        return (
            f"{self.load:g}", f"{offered:.2f}", f"{len(self.answered) / self.seconds:.2f}",
            f"{len(self.in_time) / self.seconds:.2f}", f"{self.goodput:.0f}", f"{self.throughput:.0f}",
            f"{len(self.refused)}", f"{median(retries):.1f}" if retries else "–",
            " / ".join(f"{wait:.2f}" for wait in self.waits) or "–",
            f"{of_100(first, 50):.2f} / {of_100(first, 99):.2f}", " ".join(map(str, self.tenant_tokens())),
            ", ".join(f"{name} {cores:.2f}" for name, cores in self.used.items()) or "–",
        )  # fmt: skip


HEAD = (
    "load", "offered/s", "answered/s", "in time/s", "goodput, tokens/s", "tokens/s", "refused", "Retry-After, s",
    "wait p50 / p99, s", "first token p50 / p99, s", "tokens by key", "cores",
)  # fmt: skip


def of_100(values: Sequence[float], number: int) -> float:
    """The value that so many of 100 do not exceed; nan without any."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return quantiles(values, n=100, method="inclusive")[number - 1]


def overload_figures(results: Sequence[LoadResult], max_queue: int) -> list[Figure]:
    """The bounds, at the highest load; the keys' at every load at which all of them ask for more than their share."""
    most = max(results, key=lambda one: one.load)
    best, first, at = max(one.goodput for one in results), most.first_tokens, f"at {most.load:g} times the capacity"
    figures = [
        Figure("best goodput, tokens/s", best),
        Figure(f"goodput {at}, tokens/s", most.goodput, least=MIN_GOODPUT * best),
        Figure(f"first token {at}, s (median)", of_100(first, 50)),
        Figure(f"first token {at}, s (99 of 100)", of_100(first, 99), most=MAX_TAIL * of_100(first, 50)),
    ]
    if most.waits:
        bound = MAX_WAIT * max_queue * most.seconds / max(1, len(most.answered))
        figures.append(Figure(f"wait {at}, s (99 of 100)", most.waits[1], most=bound))
    figures += [
        Figure(f"furthest key from the mean at {one.load:g} times the capacity", one.spread, most=MAX_SPREAD)
        for one in results
        if one.are_all_greedy
    ]
    return [
        *figures,
        Figure("refused otherwise than by 429 with Retry-After", sum(one.num_wrong for one in results), most=0),
    ]


def histogram_quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """The value below which `share` of what came between two scrapes lies, by its buckets (bound -> number up to it);
    linear within a bucket, nan if nothing came."""
    number = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total, low, num_low = max(number.values(), default=0.0), 0.0, 0.0
    for bound, num_up_to in number.items():
        if total and num_up_to >= share * total:
            if bound == math.inf:
                return low
            return low + (bound - low) * (share * total - num_low) / max(1.0, num_up_to - num_low)
        low, num_low = bound, num_up_to
    return math.nan


def buckets(text: str, name: str) -> dict[float, float]:
    """A histogram's buckets in the text of /metrics: its bounds, and how many values are up to each."""
    head = f'{name}_bucket{{le="'
    pairs = (line.removeprefix(head).split('"} ') for line in text.splitlines() if line.startswith(head))
    return {float(bound): float(number) for bound, number in pairs}


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError and HttpError."""
    with ExitStack() as stack:
        keys: list[str | None] = [None] * len(options.greed)
        url, server = options.url, None
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spaceserve-overload-")))
            keys = [secrets.token_hex(16) for _ in options.greed]
            (folder / "keys").write_text("".join(f"{key}\n" for key in keys), encoding="ascii")
            flags = ["--model", options.model, "--api-key-file", str(folder / "keys"), "--log-level", "error"]
            flags += ["--max-sequences", str(options.seats), "--max-queue", str(options.queue)]
            flags += ["--max-queue-seconds", str(QUEUE_SHARE * options.first_token), *options.serve_flags]
            server = stack.enter_context(ServerProcess(flags))
            url = server.url
        endpoint = Endpoint.parse(url)
        overload = Overload([replace(endpoint, api_key=key) for key in keys], options, server)
        results = asyncio.run(overload.run())
    figures = overload_figures(results, options.queue)
    return Report(
        title="Overload",
        facts={**overload.facts, "capacity, requests/s": f"{overload.capacity:.3f}"},
        failures=[f"{one.what}: {one.value:.4g}" for one in figures if not one.holds],
        notes=(
            f"{len(options.greed)} keys that ask at {':'.join(map(str, options.greed))}; in time: first token within "
            f"{options.first_token:g} s, the others every {options.per_token:g} s. {options.seconds:g} s a load."
        ),
        tables=[
            table(HEAD, [one.row() for one in results]),
            table(("what", "measured", "bound", "holds"), [one.row() for one in figures]),
        ],
        record={
            "capacity": overload.capacity,
            "figures": {one.what: one.value for one in figures},
            "loads": [dict(zip(HEAD, one.row(), strict=True)) for one in results],
        },
    )


class Overload:
    """One server and its tenants, one endpoint each."""

    def __init__(
        self, endpoints: Sequence[Endpoint], options: argparse.Namespace, server: ServerProcess | None
    ) -> None:
        """`server`: the one that was started for this; None: another's."""
        self.capacity: float = options.capacity  # requests a second; 0: not measured yet
        self.facts: Mapping[str, Any] = {}
        self._endpoints, self._options, self._server, self._is_ours = endpoints, options, server, server is not None
        self._number = 0  # of the last request; begins its prompt, so that no two share one

    async def run(self) -> list[LoadResult]:
        if self._is_ours:
            self.facts = facts(await get_json(self._endpoints[0], "/info"))
        kinds = [await self._kind(*lengths) for lengths in LENGTHS]
        if not self.capacity:
            self.capacity = await self._closed_loop(kinds)
        log(f"capacity: {self.capacity:.3f} requests/s")
        results = []
        for load in self._options.loads:
            results.append(await self._offer(load, kinds))
            log(" | ".join(f"{head}: {value}" for head, value in zip(HEAD, results[-1].row(), strict=True)))
        return results

    async def _kind(self, num_prompt: int, num_answer: int) -> RequestKind:
        """Ask for one token, to learn how many tokens the server makes of the prompt."""
        source = random.Random(num_prompt * 1000 + num_answer)
        text = long_text()
        begin = source.randrange(len(text) // 2)
        prompt = text[begin : begin + round(num_prompt * CHARACTERS)]
        usage = await self._ask(Arrival(0.0, 0, RequestKind(prompt, 0, 1)), 0.0)
        return RequestKind(prompt, usage["prompt_tokens"], num_answer)

    async def _ask(self, arrival: Arrival, begun: float) -> dict[str, Any]:
        """Fill in the arrival, and return the usage. Raises HttpError if the stream has no whole answer."""
        clock = asyncio.get_running_loop().time
        self._number += 1
        body = {
            "prompt": f"# {self._number}\n{arrival.kind.prompt}", "max_tokens": arrival.kind.num_answer,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
        }  # fmt: skip
        if self._is_ours:
            body["return_token_ids"] = True
        usage: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            try:
                stream = await stack.enter_async_context(
                    aclosing(stream_events(self._endpoints[arrival.tenant], PATH, body))
                )
                async for together in stream:
                    for event in together:
                        value = {} if event == b"[DONE]" else parsed(event)
                        if value.get("error"):
                            raise HttpError(f"The stream ended with an error: {value['error']}")
                        usage = value.get("usage") or usage
                        choices = value.get("choices") or ()
                        number = sum(len(one.get("token_ids") or ()) or bool(one.get("text")) for one in choices)
                        if number:
                            arrival.tokens.append((clock() - begun, number))
            except HttpError as error:
                arrival.status, arrival.retry_after = error.status or -1, error.retry_after
                raise
        arrival.status, arrival.ended = 200, clock() - begun
        return usage

    async def _closed_loop(self, kinds: Sequence[RequestKind]) -> float:
        """Requests a second with as many clients as can run and a few that wait."""
        clock, source = asyncio.get_running_loop().time, random.Random(0)
        begun, seconds = clock(), self._options.seconds / 2
        made: list[Arrival] = []

        async def client(tenant: int) -> None:
            while True:
                made.append(Arrival(clock() - begun, tenant, source.choice(kinds)))
                try:
                    await self._ask(made[-1], begun)
                except HttpError as error:  # one that waited too long
                    if error.retry_after is None:
                        raise
                    await asyncio.sleep(error.retry_after)

        clients = [asyncio.create_task(client(n % len(self._endpoints))) for n in range(self._options.seats * 3 // 2)]
        try:
            await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancelled(clients)
        await idle(self._endpoints[0], is_ours=self._is_ours)
        late = seconds / 4
        num_tokens = sum(n for one in made for at, n in one.tokens if at >= late)
        if not num_tokens:
            raise HttpError(f"No token came within {seconds:g} s: give more by --seconds.")
        rate: float = num_tokens / (seconds - late) / fmean(kind.num_answer for kind in kinds)
        return rate

    async def _offer(self, load: float, kinds: Sequence[RequestKind]) -> LoadResult:
        """Requests at `load` times the capacity, whatever the answers."""
        options, clock = self._options, asyncio.get_running_loop().time
        shares = [greed / sum(options.greed) for greed in options.greed]
        end = options.settle + options.seconds
        planned = arrivals([load * self.capacity * share for share in shares], end, options.seed, kinds)
        begun, tasks = clock(), []

        async def waits_until(moment: float) -> dict[float, float]:
            await asyncio.sleep(max(0.0, begun + moment - clock()))
            return buckets(await get_text(self._endpoints[0], "/metrics"), "spaceserve_queue_seconds")

        async def seconds_until(moment: float) -> Mapping[str, float]:
            await asyncio.sleep(max(0.0, begun + moment - clock()))
            return cpu_seconds(self._server)

        processors = [asyncio.create_task(seconds_until(at)) for at in (options.settle, end)]
        scrapes = [asyncio.create_task(waits_until(at)) for at in (options.settle, end)] if self._is_ours else []
        for arrival in planned:
            await asyncio.sleep(max(0.0, begun + arrival.at - clock()))
            arrival.at = clock() - begun
            tasks.append(asyncio.create_task(self._ask(arrival, begun)))
        await asyncio.sleep(max(0.0, begun + end - clock()))
        waits: list[float] = []
        if scrapes:
            before, after = await asyncio.gather(*scrapes)
            waits = [histogram_quantile(before, after, share) for share in (0.5, 0.99)]
        at_begin, at_end = await asyncio.gather(*processors)
        await _cancelled(tasks)
        await idle(self._endpoints[0], is_ours=self._is_ours)
        return LoadResult(
            load, shares, planned, options.settle, end, options.first_token, options.per_token, waits,
            used={name: (at_end[name] - at_begin[name]) / options.seconds for name in at_end},
        )  # fmt: skip


def cpu_seconds(server: ServerProcess | None) -> dict[str, float]:
    """Processor time until now of the clients, which are this process, and of a server's router and workers (Linux)."""
    if server is None:
        return {CLIENTS: time.process_time()}
    workers = sum(cpu_seconds_of(pid) for pid in server.worker_pids())
    return {CLIENTS: time.process_time(), "router": cpu_seconds_of(server.pid), "workers": workers}


def cpu_seconds_of(pid: int) -> float:
    """Processor time of a process, all its threads and the system's work for it included (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and take up what has failed: its arrival says why."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def loads(text: str) -> list[float]:
    """For argparse: numbers with commas between."""
    return [float(word) for word in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, ("--seats", 8, "requests that run at once"), ("--queue", 16, "requests that wait"),
        ("--seconds", 60.0, "of each load that count"), ("--settle", 20.0, "seconds of each load before them"),
        ("--first-token", 10.0, "seconds within which an answer in time begins"),
        ("--per-token", 0.2, "seconds that each further token may take on average"),
        ("--capacity", 0.0, "requests a second; 0: measured first, in half of --seconds"),
    )  # fmt: skip
    parser.add_argument("--loads", type=loads, default=loads("0.5,1,2,5,10"), help="times the capacity [0.5,1,2,5,10]")
    parser.add_argument("--greed", type=numbers(1), default=[1, 2, 4, 8], help="of each key's requests [1,2,4,8]")
    parser.add_argument("--url", help="a server that runs already, of any engine with /v1/completions [start one]")
    parser.set_defaults(model="smollm2")
