"""A worker that somebody else keeps alive."""

from __future__ import annotations

import asyncio

from space_router.workers.supervisor import FIRST_BACKOFF, LAST_BACKOFF


class RemoteWorker:
    """An address; `start` only waits a little longer each time."""

    def __init__(self, address: str) -> None:
        self.name = f"the worker at {address}"
        self._address = address
        self._backoff = 0.0

    async def start(self) -> str:
        await asyncio.sleep(self._backoff)
        self._backoff = min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * self._backoff))
        return self._address

    def proved_itself(self) -> None:
        self._backoff = 0.0
