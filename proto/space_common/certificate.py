"""TLS certificate files that can be renewed without a restart."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # imported where it is used: it reads its environment once, and `quieten_grpc` sets that first
    import grpc

log = logging.getLogger(__name__)

PEM = b"-----BEGIN "


class CertificateError(ValueError):
    """The files cannot be used; the message names the file and the cause, and never quotes its content."""


@dataclass(frozen=True)
class Certificate:
    """A certificate, its key and optionally an authority, as PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    authority: bytes | None = None  # CA certificates that the peer's certificate must be signed by
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), compare=False)
    """SSL context of a server with this certificate, TLS 1.2 or newer."""


class CertificateFiles:
    """Certificate files that may be renewed at any time; each handshake checks them.

    If new files cannot be used (one is not written yet, or they do not match), the last usable ones stay in use and a
    warning is logged. Thread-safe.
    """

    def __init__(self, cert: Path, key: Path, authority: Path | None = None) -> None:
        """Raises CertificateError."""
        self._files = (cert, key, authority)
        self._seen = _stamps(self._present())
        self._lock = threading.Lock()
        self.last = self._read()  # last usable certificate

    def latest(self) -> Certificate:
        """Return the files' current content, or the last usable one."""
        with self._lock:
            stamps = _stamps(self._present())
            if stamps == self._seen:
                return self.last
            self._seen = stamps
            try:
                fresh = self._read()
            except CertificateError as error:
                log.warning("a renewed certificate is not used yet: %s", error)
                return self.last
            if _stamps(self._present()) != stamps:  # changed while being read: the next handshake reads again
                self._seen = ()
                return self.last
            if fresh != self.last:
                log.info("the certificate in %s is used from now on", self._files[0])
            self.last = fresh
            return fresh

    def _present(self) -> list[Path]:
        return [path for path in self._files if path is not None]

    def _read(self) -> Certificate:
        cert, key, authority = self._files
        made = Certificate(_content(cert), _content(key), None if authority is None else _content(authority))
        made.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            made.context.load_cert_chain(cert, key, password=_no_password)
            if authority is not None:
                made.context.load_verify_locations(authority)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise CertificateError(f"{cert} and {key} do not go together: {reason}") from None
        return made


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server that uses the files' current content at each handshake.

    If there is an authority, clients must present a certificate signed by it.
    """
    shown = files.last

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        latest = files.latest()
        if latest is shown:
            return None
        shown = latest
        return _configuration(latest)

    import grpc

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)  # returning None means unchanged
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetch, shown.authority is not None)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    import grpc

    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.cert)], certificate.authority)


def _stamps(files: Iterable[Path]) -> tuple[tuple[int, ...] | None, ...]:
    """Return values that change with the files. Follows links, because Kubernetes renews secrets by replacing links."""
    return tuple(map(file_stamp, files))


def file_stamp(file: Path) -> tuple[int, ...] | None:
    """Return values that change with the file; None: there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CertificateError(f"{file}: cannot be read: {error.strerror}") from None
    if PEM not in content:
        raise CertificateError(f"{file}: is no PEM file")
    return content


def _no_password() -> str:
    """Fail instead of asking for a password on the terminal."""
    raise ValueError("the key is encrypted with a password; write it without one")
