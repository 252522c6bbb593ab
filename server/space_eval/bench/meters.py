"""What is polled of a server while load runs on it: energy and draft lengths; and whether it is idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from space_common.http_client import Endpoint, HttpError, get_json, get_text

ENERGY = "spaceserve_energy_joules_total"
DRAFTS = ("spaceserve_draft_length_sum", "spaceserve_draft_length_count")
POWER_SECONDS = 0.25  # the interval at which workers report their counters
JOULES_PER_KWH = 3.6e6
IDLE_SECONDS = 30.0  # longest wait for cancelled requests to leave a server


@asynccontextmanager
async def polled(endpoint: Endpoint, every: float | None, read: Callable[[float, str], bool]) -> AsyncIterator[None]:
    """While the block runs, call `read` every `every` seconds with the elapsed seconds and the text of /metrics.

    Stops when `read` returns False or the server does not answer; without `every` it does not poll.
    """
    if every is None:
        yield
        return
    task = asyncio.create_task(_poll(endpoint, every, read))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _poll(endpoint: Endpoint, every: float, read: Callable[[float, str], bool]) -> None:
    clock = asyncio.get_running_loop().time
    begun, number = clock(), 0
    while True:
        try:
            text = await get_text(endpoint, "/metrics")
        except HttpError:
            return
        if not read(clock() - begun, text):
            return
        number += 1
        await asyncio.sleep(max(0.0, begun + number * every - clock()))


class PowerMeter:
    """Power from a counter that updates in steps, measured from its first to its last update."""

    def __init__(self) -> None:
        self._updates: list[tuple[float, float]] = []  # (seconds, joules) when a new value was first seen
        self._last: float | None = None

    def read(self, seconds: float, text: str) -> bool:
        if (joules := energy_figure(text)) is None:
            return False
        self.add(seconds, joules)
        return True

    def add(self, seconds: float, joules: float) -> None:
        if self._last is not None and joules != self._last:
            self._updates.append((seconds, joules))
        self._last = joules

    @property
    def watts(self) -> float | None:
        """Mean watts; None if the counter has not changed often enough."""
        if len(self._updates) < 3:
            return None
        (begun, first), (ended, last) = self._updates[0], self._updates[-1]
        return (last - first) / (ended - begun)


def energy_figure(text: str) -> float | None:
    """Return the joules of all devices so far; None if there is no counter."""
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(ENERGY + "{")]
    return sum(map(float, values)) if values else None


async def joules(endpoint: Endpoint) -> float | None:
    """Return the joules that a server has counted so far; None if it has no counter."""
    try:
        return energy_figure(await get_text(endpoint, "/metrics"))
    except HttpError:
        return None


@dataclass(frozen=True)
class DraftSample:
    """The draft length between two polls of a server."""

    seconds: float  # after the round's start, at the second poll
    draft_length: float  # mean over the steps of all sequences


class DraftMeter:
    """The mean draft length from poll to poll."""

    def __init__(self) -> None:
        self.samples: list[DraftSample] = []
        self._before: tuple[float, float] | None = None

    def read(self, seconds: float, text: str) -> bool:
        now = draft_figures(text)
        if now is None:
            return False
        if self._before is not None and now[1] > self._before[1]:
            drafted, steps = now[0] - self._before[0], now[1] - self._before[1]
            self.samples.append(DraftSample(seconds, drafted / steps))
        self._before = now
        return True


def draft_figures(text: str) -> tuple[float, float] | None:
    """Return drafts and sequence steps so far; None if the text has no such series."""
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(DRAFTS))
    try:
        return float(values[DRAFTS[0]]), float(values[DRAFTS[1]])
    except (KeyError, ValueError):
        return None


async def idle(endpoint: Endpoint, *, is_ours: bool) -> None:
    """Wait until no request runs and every block is free; one second, if the server is not `is_ours`."""
    clock = asyncio.get_running_loop().time
    end = clock() + (IDLE_SECONDS if is_ours else 1.0)
    while clock() < end:
        if is_ours:
            load = await get_json(endpoint, "/load")
            if not (load.get("num_queued") or load.get("num_running") or load.get("blocks_held")):
                return
        await asyncio.sleep(0.02)
