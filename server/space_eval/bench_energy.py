"""What a server draws under load, by its own counters (`spaceserve_energy_joules_total`), as a round runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from space_eval.load_client import Endpoint, LoadError, get_text

SERIES = "spaceserve_energy_joules_total"
LOOK_SECONDS = 0.25
"""As often as a worker says what it has counted."""

JOULES_PER_KWH = 3.6e6


class PowerMeter:
    """Looks at a counter that moves in steps; between its first and its last movement the power is known."""

    def __init__(self) -> None:
        self._moves: list[tuple[float, float]] = []  # seconds, joules: when a new value was first seen
        self._last: float | None = None

    def look(self, seconds: float, joules: float) -> None:
        if self._last is not None and joules != self._last:
            self._moves.append((seconds, joules))
        self._last = joules

    @property
    def watts(self) -> float | None:
        """None where the counter has not moved often enough to tell."""
        if len(self._moves) < 3:
            return None
        (begun, first), (ended, last) = self._moves[0], self._moves[-1]
        return (last - first) / (ended - begun)


def energy_figure(text: str) -> float | None:
    """Joules of all devices so far; None where nothing is counted."""
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(SERIES + "{")]
    return sum(map(float, values)) if values else None


@asynccontextmanager
async def metered(endpoint: Endpoint | None) -> AsyncIterator[PowerMeter]:
    """A meter that looks while the block runs; at nothing without an endpoint."""
    meter = PowerMeter()
    if endpoint is None:
        yield meter
        return
    task = asyncio.create_task(_look(endpoint, meter))
    try:
        yield meter
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _look(endpoint: Endpoint, meter: PowerMeter) -> None:
    clock = asyncio.get_running_loop().time
    while (so_far := await joules(endpoint)) is not None:
        meter.look(clock(), so_far)
        await asyncio.sleep(LOOK_SECONDS)


async def joules(endpoint: Endpoint) -> float | None:
    """What a server has counted so far; None where it counts nothing."""
    try:
        return energy_figure(await get_text(endpoint, "/metrics"))
    except LoadError:
        return None
