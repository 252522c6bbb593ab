"""A certificate, its key and perhaps an authority, as their files say them now: renewed without a restart."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc

log = logging.getLogger(__name__)

PEM = b"-----BEGIN "


class CertificateError(ValueError):
    """Files cannot be used; the message says which and why, and shows nothing of what is in them."""


@dataclass(frozen=True)
class Certificate:
    """What goes together, as PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    authority: bytes | None = None  # whose certificates the other side must show
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), compare=False)
    """Of a server with this certificate, TLS 1.2 or newer."""


class CertificateFiles:
    """Files that somebody may renew. Each handshake asks; nothing watches in between.

    While new files cannot be used (one of the two is still to be written, or they do not go together), the last ones
    that could go on, and one line of the log says why. Any thread may ask.
    """

    def __init__(self, cert: Path, key: Path, authority: Path | None = None) -> None:
        """Raises CertificateError."""
        self._files = (cert, key, authority)
        self._seen = _stamps(self._present())
        self._lock = threading.Lock()
        self.last = self._read()  # that could be used

    def latest(self) -> Certificate:
        """What the files say now, or the last that could be used."""
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
            if _stamps(self._present()) != stamps:  # written while they were read: the next handshake looks again
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
    """Of a gRPC server that shows what the files say at each handshake. Where they name an authority, clients must show
    a certificate of it.
    """
    shown = files.last

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        latest = files.latest()
        if latest is shown:
            return None
        shown = latest
        return _configuration(latest)

    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)  # None, too: nothing has changed
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetch, shown.authority is not None)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.cert)], certificate.authority)


def _stamps(files: Iterable[Path]) -> tuple[tuple[int, ...] | None, ...]:
    """What changes with a file; through links, as Kubernetes renews its secrets."""
    return tuple(map(_stamp, files))


def _stamp(file: Path) -> tuple[int, ...] | None:
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
    """Instead of a question on the terminal, for ever."""
    raise ValueError("the key is encrypted with a password; write it without one")
