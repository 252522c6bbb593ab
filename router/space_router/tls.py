"""TLS settings: the server's certificate for clients, and the router's for workers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from space_common.certificate import CertificateError, CertificateFiles

from space_router.errors import ConfigError
from space_router.settings import parse
from space_router.settings.setting import setting


@dataclass(frozen=True)
class TlsSettings:
    """The TLS part of `ServeConfig`."""

    tls_cert: str | None = setting(
        None,
        "HTTP and gRPC",
        "certificate of this server with those that lead to its authority, PEM; with it HTTP is HTTPS and gRPC is "
        "encrypted too (TLS 1.2 at least). A renewed one is shown from the next handshake on",
        parse.text,
        "PATH",
    )
    tls_key: str | None = setting(None, "HTTP and gRPC", "private key of --tls-cert, PEM", parse.text, "PATH")
    worker_tls_ca: str | None = setting(
        None,
        "workers and process",
        "certificate of the authority that signed the workers' certificates, PEM; with it, --worker-tls-cert and "
        "--worker-tls-key, the workers at --worker-address are spoken to over mutual TLS (there: --tls-client-ca)",
        parse.text,
        "PATH",
    )
    worker_tls_cert: str | None = setting(
        None, "workers and process", "certificate that this router shows to workers, PEM", parse.text, "PATH"
    )
    worker_tls_key: str | None = setting(
        None, "workers and process", "private key of --worker-tls-cert, PEM", parse.text, "PATH"
    )

    def check_tls(self, host: str, grpc_port: int | None, worker_address: tuple[str, ...]) -> None:
        """Raise ConfigError for missing or unusable files, and for flags that would have no effect."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together: give both.")
        self.certificate()
        if host.startswith("unix:") and self.tls_cert is not None:
            raise ConfigError("--tls-cert does nothing on a Unix socket: leave it out, or give --host an address.")
        if host.startswith("unix:") and grpc_port is not None:
            raise ConfigError(f"--grpc-port={grpc_port} needs an address in --host; it is {host!r}.")
        given = [self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key]
        if any(given) and not all(given):
            raise ConfigError("--worker-tls-ca, --worker-tls-cert and --worker-tls-key go together: give all three.")
        if any(given) and (not worker_address or any(one.startswith("unix:") for one in worker_address)):
            raise ConfigError("--worker-tls-ca goes with --worker-address HOST:PORT only: other workers are local.")
        self.worker_certificate()

    def certificate(self) -> CertificateFiles | None:
        """Return the server's certificate for clients; None: no TLS. Raises ConfigError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return _files(f"--tls-cert={self.tls_cert!r} --tls-key={self.tls_key!r}", self.tls_cert, self.tls_key)

    def worker_certificate(self) -> CertificateFiles | None:
        """Return the router's certificate for remote workers, and their authority; None: no TLS. Raises ConfigError."""
        if self.worker_tls_ca is None or self.worker_tls_cert is None or self.worker_tls_key is None:
            return None
        return _files(
            f"--worker-tls-cert={self.worker_tls_cert!r} --worker-tls-key={self.worker_tls_key!r} "
            f"--worker-tls-ca={self.worker_tls_ca!r}",
            self.worker_tls_cert,
            self.worker_tls_key,
            self.worker_tls_ca,
        )


def https(files: CertificateFiles) -> ssl.SSLContext:
    """Return a server's SSL context that uses the files' current content at each handshake."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = files.latest().context

    listening = files.last.context
    listening.sni_callback = choose  # also called for clients that send no server name
    return listening


def _files(flags: str, *paths: str) -> CertificateFiles:
    try:
        return CertificateFiles(*(Path(path).expanduser() for path in paths))
    except CertificateError as error:
        raise ConfigError(f"{flags}: {error}.") from None
