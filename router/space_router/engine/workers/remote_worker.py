"""A worker that somebody else keeps alive."""

from __future__ import annotations

import asyncio

import grpc
from space_common.certificate import CertificateFiles

from space_router.engine.workers.backoff import Backoff
from space_router.engine.workers.exit_cause import ExitCause


class RemoteWorker:
    """An address; `start` only waits a little longer each time."""

    def __init__(self, address: str, certificate: CertificateFiles | None = None) -> None:
        """`certificate`: of this router, and of those that it trusts; None: not encrypted."""
        self._certificate = certificate
        self.name = f"the worker at {address}"
        self._address = address
        self._backoff = Backoff()

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """For the next connection: renewed files count from then on."""
        if self._certificate is None:
            return None
        shown = self._certificate.latest()
        return grpc.ssl_channel_credentials(shown.authority, shown.key, shown.cert)

    async def start(self) -> str:
        await asyncio.sleep(self._backoff.next())
        return self._address

    def proved_itself(self) -> None:
        self._backoff.worked()

    async def inquest(self) -> ExitCause:
        """From here nobody can tell."""
        return ExitCause.UNKNOWN
