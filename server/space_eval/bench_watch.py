"""What a server's /metrics say while it is under load: the draft length its steps choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from space_eval.load_client import Endpoint, LoadError, get_json, get_text

_SERIES = ("spaceserve_draft_length_sum", "spaceserve_draft_length_count")


@dataclass(frozen=True)
class Watch:
    """Between two looks."""

    seconds: float  # after the round's begin, at the second look
    draft_length: float  # mean over the steps of all sequences


@asynccontextmanager
async def watched(endpoint: Endpoint, every: float | None) -> AsyncIterator[list[Watch]]:
    """A list that fills while the block runs; it stays empty without `every`, or where there are no such figures."""
    found: list[Watch] = []
    if every is None:
        yield found
        return
    task = asyncio.create_task(_look(endpoint, every, found))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _look(endpoint: Endpoint, every: float, found: list[Watch]) -> None:
    clock = asyncio.get_running_loop().time
    begun, number = clock(), 0
    before: tuple[float, float] | None = None
    while True:
        try:
            now = draft_figures(await get_text(endpoint, "/metrics"))
        except LoadError:
            return
        if now is None:
            return
        if before is not None and now[1] > before[1]:
            found.append(Watch(clock() - begun, (now[0] - before[0]) / (now[1] - before[1])))
        before = now
        number += 1
        await asyncio.sleep(max(0.0, begun + number * every - clock()))


IDLE_SECONDS = 30.0
"""Longest wait for requests that were cut off to leave a server."""


async def idle(endpoint: Endpoint, *, is_ours: bool) -> None:
    """Until nothing runs there and every block is given back; where that cannot be asked, a second."""
    clock = asyncio.get_running_loop().time
    end = clock() + (IDLE_SECONDS if is_ours else 1.0)
    while clock() < end:
        if is_ours:
            load = await get_json(endpoint, "/load")
            if not (load.get("num_queued") or load.get("num_running") or load.get("blocks_held")):
                return
        await asyncio.sleep(0.02)


def draft_figures(text: str) -> tuple[float, float] | None:
    """Drafts laid out so far, and steps of sequences; None where the text has no such series."""
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(_SERIES))
    try:
        drafted, steps = (float(values[name]) for name in _SERIES)
    except (KeyError, ValueError):
        return None
    return drafted, steps
