"""A worker that runs elsewhere and is not started by this router."""

from __future__ import annotations

import asyncio

import grpc
from space_common.certificate import CertificateFiles

from space_router.engine.workers.backoff import Backoff
from space_router.engine.workers.exit_cause import ExitCause


class RemoteWorker:
    """The address of a remote worker; `start` only waits for the backoff."""

    def __init__(self, address: str, certificate: CertificateFiles | None = None) -> None:
        """`certificate`: this router's certificate and the authority it trusts; None: no TLS."""
        self._certificate = certificate
        self.name = f"the worker at {address}"
        self._address = address
        self._backoff = Backoff()

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials for the next connection, from the current files; None: no TLS."""
        if self._certificate is None:
            return None
        shown = self._certificate.latest()
        return grpc.ssl_channel_credentials(shown.authority, shown.key, shown.cert)

    async def start(self) -> str:
        await asyncio.sleep(self._backoff.next())
        return self._address

    def reset_backoff(self) -> None:
        self._backoff.worked()

    async def find_exit_cause(self) -> ExitCause:
        """Return UNKNOWN: a remote process cannot be inspected."""
        return ExitCause.UNKNOWN
