"""Certificates and keys: of this server before its clients, and of this router before its workers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from space_router import parse
from space_router.errors import ConfigError
from space_router.setting import setting


@dataclass(frozen=True)
class TlsSettings:
    """A part of `ServeConfig`."""

    tls_cert: str | None = setting(
        None,
        "HTTP and gRPC",
        "certificate of this server with those that lead to its authority, PEM; with it HTTP is HTTPS and gRPC is "
        "encrypted too (TLS 1.2 at least). Read at start: a renewed one needs a restart",
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
        """Raises ConfigError for files that are missing or do not fit, and for flags that would do nothing."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together: give both.")
        _check_pair(self.tls_cert, self.tls_key, "--tls-cert", "--tls-key")
        if host.startswith("unix:") and self.tls_cert is not None:
            raise ConfigError("--tls-cert does nothing on a Unix socket: leave it out, or give --host an address.")
        if host.startswith("unix:") and grpc_port is not None:
            raise ConfigError(f"--grpc-port={grpc_port} needs an address in --host; it is {host!r}.")
        given = [self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key]
        if any(given) and not all(given):
            raise ConfigError("--worker-tls-ca, --worker-tls-cert and --worker-tls-key go together: give all three.")
        if any(given) and (not worker_address or any(one.startswith("unix:") for one in worker_address)):
            raise ConfigError("--worker-tls-ca goes with --worker-address HOST:PORT only: other workers are local.")
        if self.worker_tls_ca is not None:
            _read(self.worker_tls_ca, "--worker-tls-ca")
        _check_pair(self.worker_tls_cert, self.worker_tls_key, "--worker-tls-cert", "--worker-tls-key")

    def grpc_server_credentials(self) -> grpc.ServerCredentials | None:
        """For clients; None: not encrypted."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return grpc.ssl_server_credentials([(_read(self.tls_key, "--tls-key"), _read(self.tls_cert, "--tls-cert"))])

    def worker_credentials(self) -> grpc.ChannelCredentials | None:
        """For workers elsewhere; None: not encrypted."""
        if self.worker_tls_ca is None or self.worker_tls_cert is None or self.worker_tls_key is None:
            return None
        return grpc.ssl_channel_credentials(
            _read(self.worker_tls_ca, "--worker-tls-ca"),
            _read(self.worker_tls_key, "--worker-tls-key"),
            _read(self.worker_tls_cert, "--worker-tls-cert"),
        )


def _read(path: str, flag: str) -> bytes:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}={path!r}: cannot be read: {error.strerror}.") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{flag}={path!r}: is no PEM file.")
    return content


def _check_pair(cert: str | None, key: str | None, cert_flag: str, key_flag: str) -> None:
    if cert is None or key is None:
        return
    _read(cert, cert_flag)
    _read(key, key_flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(Path(cert).expanduser(), Path(key).expanduser())
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{cert_flag}={cert!r} {key_flag}={key!r}: they do not go together: {getattr(error, 'reason', error)}."
        ) from None
