"""Arrival patterns: a fixed concurrency, a request rate, or a swing between two concurrencies."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from space_eval.bench.client import LoadError
from space_eval.bench.exchange import LoadRequest

Send = Callable[[LoadRequest, float | None], Awaitable[None]]
"""Sends a request and waits for its end; the number is its due time after the round's start (None: now)."""


class LoadShape(ABC):
    """The arrival pattern of a round's requests."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def default_requests(self) -> int | None:
        """Requests per round; None if time ends the round."""
        return None

    @property
    def default_seconds(self) -> float | None:
        """Duration of a round; None if the number of requests ends it."""
        return None

    @property
    def warm_up_streams(self) -> int:
        """Concurrent requests before the first round."""
        return 4

    @abstractmethod
    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Run until `requests` are done, or for `seconds`, then cancel running requests. Raises LoadError."""


@dataclass(frozen=True)
class Closed(LoadShape):
    """Closed loop: each of `num_streams` streams sends its next request when the previous one is done."""

    num_streams: int

    @property
    def name(self) -> str:
        return f"{self.num_streams} stream" + "s" * (self.num_streams > 1)

    @property
    def default_requests(self) -> int:
        return 2 * self.num_streams

    @property
    def warm_up_streams(self) -> int:
        return self.num_streams

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), _first_failure(), asyncio.TaskGroup() as group:
                for _ in range(self.num_streams):
                    group.create_task(_stream(requests, send))


@dataclass(frozen=True)
class Open(LoadShape):
    """Open loop: requests are sent when due, regardless of the server. Failed ones are counted; the round continues."""

    rate: float | None  # per second, Poisson; None: arrivals of the file

    @property
    def name(self) -> str:
        return "as recorded" if self.rate is None else f"{self.rate:g}/s"

    @property
    def default_seconds(self) -> float:
        return 10.0  # a few hundred requests at common rates

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Send arrivals for `seconds`, then wait for all of them."""
        clock = asyncio.get_running_loop().time
        begun = clock()

        async def send_one(request: LoadRequest) -> None:
            with suppress(LoadError):  # recorded in its exchange
                await send(request, request.arrival)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                if seconds is not None and request.arrival >= seconds:
                    break
                await asyncio.sleep(max(0.0, begun + request.arrival - clock()))
                group.create_task(send_one(request))


@dataclass(frozen=True)
class Swing(LoadShape):
    """Alternates `low` and `high` streams, `period` seconds each; surplus streams are cancelled."""

    low: int
    high: int
    period: float

    @property
    def name(self) -> str:
        return f"{self.low}–{self.high} streams every {self.period:g} s"

    @property
    def default_seconds(self) -> float:
        return 6 * self.period

    @property
    def warm_up_streams(self) -> int:
        return self.high

    @property
    def moment_seconds(self) -> float:
        """Seconds per point of a timeline: 1, or less if a half is short."""
        return min(1.0, self.period / 4)

    @classmethod
    def parse(cls, text: str, seconds_of: Callable[[str], float]) -> Swing:
        """Parse `1:64:5s`. Raises ValueError."""
        parts = text.split(":")
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()) or not 0 < int(parts[0]) < int(parts[1]):
            raise ValueError(f"{text!r} is no swing: give LOW:HIGH:PERIOD, such as 1:64:5s")
        return cls(int(parts[0]), int(parts[1]), seconds_of(parts[2]))

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Run for `seconds` (required), the low half first."""
        clock = asyncio.get_running_loop().time
        begun, number = clock(), 0
        end = begun + (2 * self.period if seconds is None else seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end), _first_failure(), asyncio.TaskGroup() as group:
                for _ in range(self.low):
                    group.create_task(_stream(requests, send))
                while True:
                    number += 1
                    await asyncio.sleep(begun + number * self.period - clock())
                    if number % 2:
                        extra = [group.create_task(_stream(requests, send)) for _ in range(self.high - self.low)]
                    else:
                        for task in extra:
                            task.cancel()


async def _stream(requests: Iterator[LoadRequest], send: Send) -> None:
    for request in requests:
        await send(request, None)


@asynccontextmanager
async def _first_failure() -> AsyncIterator[None]:
    """Raise the first failure of an exception group."""
    try:
        yield
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
