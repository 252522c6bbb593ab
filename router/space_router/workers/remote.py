"""A worker that somebody else keeps alive."""

from __future__ import annotations

import asyncio

import grpc

from space_router.workers.backoff import Backoff
from space_router.workers.cause import Cause


class RemoteWorker:
    """An address; `start` only waits a little longer each time."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials`: of this router, and of those that it trusts; None: not encrypted."""
        self.credentials = credentials
        self.name = f"the worker at {address}"
        self._address = address
        self._backoff = Backoff()

    async def start(self) -> str:
        await asyncio.sleep(self._backoff.next())
        return self._address

    def proved_itself(self) -> None:
        self._backoff.worked()

    async def inquest(self) -> Cause:
        """From here nobody can tell."""
        return Cause.ITSELF
