"""Certificates and keys of a worker that routers reach over a network."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc


@dataclass(frozen=True)
class Tls:
    """What mutual TLS needs, as PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes

    @classmethod
    def read(cls, cert: str | None, key: str | None, client_ca: str | None) -> Tls | None:
        """From three files; None without any. Raises ValueError naming flag and file."""
        given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
        if not any(given.values()):
            return None
        if missing := [flag for flag, path in given.items() if path is None]:
            raise ValueError(f"{' and '.join(given)} go together; {' and '.join(missing)} is missing")
        contents = {flag: _read(flag, path) for flag, path in given.items() if path is not None}
        if cert is not None and key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
            except ssl.SSLError as error:
                raise ValueError(f"--tls-cert {cert} and --tls-key {key} do not go together: {error.reason}") from None
        return cls(contents["--tls-cert"], contents["--tls-key"], contents["--tls-client-ca"])

    def credentials(self) -> grpc.ServerCredentials:
        """Of a server whose clients must show a certificate, too."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.client_ca, require_client_auth=True)


def _read(flag: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"argument {flag}: {path}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise ValueError(f"argument {flag}: {path}: is no PEM file")
    return content
