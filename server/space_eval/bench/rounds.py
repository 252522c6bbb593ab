"""Runs rounds of load on every arm, in rotating order, so that drift of the machine affects all arms equally."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from space_common.http_client import Endpoint, HttpError
from tqdm import tqdm

from space_eval.bench.arms import Arm, Exchange, LoadRequest
from space_eval.bench.meters import POWER_SECONDS, DraftMeter, DraftSample, PowerMeter, idle, polled
from space_eval.bench.options import BenchSettings
from space_eval.bench.workload import Closed, LoadShape, Open, Swing, Workload

CpuCounter = Callable[[], Mapping[str, float]]  # returns the CPU seconds so far, by process


@dataclass(frozen=True)
class Round:
    """Measurements of one round of one arm."""

    arm: str
    seconds: float  # from the first request's start to the last one's end, or to the cut-off
    exchanges: Sequence[Exchange]  # by request number
    cpu_shares: Mapping[str, float]  # CPU seconds per second, by process
    drafts: Sequence[DraftSample] = ()  # the server's draft lengths during the round
    watts: float | None = None  # mean power; None without a counter, or if the round is too short
    start: int = 0  # number of the servers' start

    @property
    def arrivals(self) -> Iterator[tuple[float, int]]:
        """Seconds after the start, and tokens, of each event until the end."""
        for exchange in self.exchanges:
            for event in exchange.events:
                if (at := exchange.started + event.seconds) <= self.seconds:
                    yield at, event.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived before the end."""
        return sum(num_tokens for _, num_tokens in self.arrivals)

    @property
    def num_finished(self) -> int:
        return sum(exchange.finished for exchange in self.exchanges)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """Joules per generated token, including prefill."""
        return self.watts * self.seconds / self.num_tokens if self.watts is not None and self.num_tokens else None

    @property
    def request_seconds(self) -> float:
        """Mean seconds of complete answers; nan without any."""
        whole = [exchange.seconds for exchange in self.exchanges if exchange.finished]
        return sum(whole) / len(whole) if whole else math.nan

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by status."""
        failed = sorted(exchange.error for exchange in self.exchanges if exchange.error is not None)
        return dict(Counter(failed))

    @property
    def tokens_per_step(self) -> float | None:
        """Mean over the decode steps of all streams; None if the server counts no steps."""
        return self._mean_per_step(lambda one: (one["tokens_per_step"] or 0.0) * one["steps"])

    @property
    def drafts_per_step(self) -> float | None:
        """Mean draft length; None if the server counts no steps."""
        return self._mean_per_step(lambda one: int(one.get("drafted") or 0))

    def _mean_per_step(self, total_of: Callable[[Mapping[str, float]], float]) -> float | None:
        counted = [exchange.statistics for exchange in self.exchanges if exchange.statistics.get("steps")]
        steps = sum(int(one["steps"]) for one in counted)
        return sum(map(total_of, counted)) / steps if steps else None

    def timeline(self, width: float) -> list[float]:
        """Return the tokens per second in each interval of `width` seconds; an incomplete last one is dropped."""
        counts = [0] * int(self.seconds / width + 1e-9)
        for at, num_tokens in self.arrivals:
            if (place := int(at / width)) < len(counts):
                counts[place] += num_tokens
        return [count / width for count in counts]


async def run_round(
    arm: Arm,
    shape: LoadShape,
    requests: Iterator[LoadRequest],
    *,
    salt: str | None,
    seconds: float | None = None,
    poll_seconds: float | None = None,
    cpu_seconds: CpuCounter = dict,
    on_done: Callable[[], object] = lambda: None,
) -> Round:
    """Run `requests` in `shape`, or for `seconds`. Raises HttpError if one fails and `shape` does not tolerate it.

    `poll_seconds`: interval of polling draft lengths. `on_done` is called after each request.
    """
    clock = asyncio.get_running_loop().time
    exchanges: list[Exchange] = []
    begun = 0.0

    async def send(request: LoadRequest, due: float | None) -> None:
        exchange = Exchange(started=clock() - begun if due is None else due)
        exchanges.append(exchange)
        try:
            await arm.answer(request, salt, exchange, begun + exchange.started)
        finally:
            on_done()

    cpu_before = cpu_seconds()
    drafts, power = DraftMeter(), PowerMeter()
    power_seconds = POWER_SECONDS if arm.counts_energy else None
    async with polled(arm.endpoint, poll_seconds, drafts.read), polled(arm.endpoint, power_seconds, power.read):
        begun = clock()
        await shape.run(requests, send, seconds)
        taken = clock() - begun
    if not any(exchange.events for exchange in exchanges):
        failed = {exchange.error for exchange in exchanges}
        raise HttpError(f"{arm.name}: none of {len(exchanges)} requests was answered ({', '.join(map(str, failed))}).")
    cpu_after = cpu_seconds()
    shares = {name: (cpu_after[name] - used) / taken for name, used in cpu_before.items()}
    return Round(arm.name, taken, exchanges, shares, drafts.samples, power.watts)


def num_identical(ones: Round, others: Round) -> tuple[int, int]:
    """Return the number of answers with the same ids in both rounds, and of those complete with known ids in both."""
    pairs = zip(ones.exchanges, others.exchanges, strict=False)
    both = [(a.token_ids, b.token_ids) for a, b in pairs if a.finished and b.finished and a.token_ids and b.token_ids]
    return sum(a == b for a, b in both), len(both)


@dataclass(frozen=True)
class PrefixIsolation:
    """How a round avoids prefix-cache hits on prompts of other rounds."""

    salted: bool  # by a cache salt in the request, so prompts need no mark
    same_prompts: bool  # all arms get the same prompts

    @classmethod
    def of(cls, arms: Sequence[Arm]) -> PrefixIsolation:
        salted = all(arm.is_spaceserve and arm.api.name != "tgi" for arm in arms)
        shared = len({arm.endpoint for arm in arms}) < len(arms)  # a server with two arms would have cached the other's
        return cls(salted, salted or not shared)


_RequestKey = tuple[Endpoint, str | tuple[int, ...], int]


class PlainAnswers:
    """Tracks the requests, and their lengths, that a server with synthetic acceptance has answered without drafts.

    Such a server drafts from its earlier answers. On a new request, a drafting arm would use the drafts of untrained
    masks, all wrong, and the server's controller would learn not to draft.
    """

    def __init__(self) -> None:
        self._lengths: dict[_RequestKey, int] = {}

    def missing(self, arm: Arm, requests: Iterable[LoadRequest]) -> list[LoadRequest]:
        """Return requests to send without drafts before `arm` gets `requests`: each new one once, at its longest."""
        longest: dict[_RequestKey, LoadRequest] = {}
        for request in requests if arm.has_synthetic_acceptance and arm.speculation != "off" else ():
            key = arm.endpoint, request.prompt, arm.seed + request.number if arm.temperature else 0
            if request.max_tokens > self._lengths.get(key, 0):
                self._lengths[key] = request.max_tokens
                longest[key] = request
        return list(longest.values())


@dataclass
class LoadRun:
    """Runs every load on every arm, on the `start`-th start of the servers."""

    settings: BenchSettings
    arms: Sequence[Arm]
    work: Workload
    cpu_counter: Callable[[Arm], CpuCounter]
    start: int = 0

    def __post_init__(self) -> None:
        self._isolation = PrefixIsolation.of(self.arms)
        self._answered = PlainAnswers()

    async def measure(self) -> list[list[list[Round]]]:
        """Return [shape][round][arm]. Raises HttpError."""
        settings, arms = self.settings, self.arms
        per_arm = [
            settings.warm_up_of(shape) + settings.num_rounds * (settings.requests_of(shape) or 0)
            for shape in settings.shapes
        ]
        measured: list[list[list[Round]]] = []
        total = len(arms) * sum(per_arm)
        with tqdm(total=total or None, unit="request", file=sys.stderr, disable=None) as self._progress:
            for shape in settings.shapes:
                await self._warm_up(shape)
                rounds: list[list[Round]] = []
                for number in range(self.start * settings.num_rounds, (self.start + 1) * settings.num_rounds):
                    turn = number % len(arms)
                    by_arm: dict[str, Round] = {}
                    for arm in [*arms[turn:], *arms[:turn]]:
                        limits = settings.requests_of(shape), settings.seconds_of(shape)
                        by_arm[arm.name] = await self._round(arm, shape, number + 1, *limits)
                    rounds.append([by_arm[arm.name] for arm in arms])
                measured.append(rounds)
        return measured

    async def _warm_up(self, shape: LoadShape) -> None:
        num_requests = self.settings.warm_up_of(shape)
        for arm in self.arms if num_requests else ():
            streams = Closed(min(num_requests, shape.warm_up_streams))
            await self._round(arm, streams, 0, num_requests, None)

    async def _round(
        self, arm: Arm, shape: LoadShape, number: int, num_requests: int | None, seconds: float | None
    ) -> Round:
        """`number`: from 1 over all starts; 0 for a warm-up."""
        run = os.getpid()
        salted, same_prompts = self._isolation.salted, self._isolation.same_prompts
        mark = "" if salted else f"# {run}.{shape.name}.{number}" + ("" if same_prompts else f".{arm.name}")
        rate = shape.rate if isinstance(shape, Open) else None

        def requests(count: int | None) -> Iterator[LoadRequest]:
            return itertools.islice(self.work.requests(number, rate, mark=mark), count)

        of_start = number - self.start * self.settings.num_rounds
        label = f"{shape.name}, {arm.name}, "
        label += f"round {of_start}/{self.settings.num_rounds}" if number else "warm-up"
        if missing := self._answered.missing(arm, requests(num_requests or len(self.work.recorded))):
            self._progress.set_description(f"{label}: {len(missing)} answers without drafts")
            plain = replace(arm, speculation="off")
            await run_round(plain, Closed(shape.warm_up_streams), iter(missing), salt=None)
        self._progress.set_description(label)
        made = await run_round(
            arm,
            shape,
            requests(num_requests),
            salt=f"bench {run} {shape.name} {arm.name} {number}" if salted else None,
            seconds=seconds,
            poll_seconds=shape.moment_seconds if isinstance(shape, Swing) and arm.is_spaceserve else None,
            cpu_seconds=self.cpu_counter(arm),
            on_done=self._progress.update,
        )
        if seconds is not None and not isinstance(shape, Open):  # cancelled requests must not slow the next arm
            await idle(arm.endpoint, is_ours=arm.is_spaceserve)
        return replace(made, start=self.start)
