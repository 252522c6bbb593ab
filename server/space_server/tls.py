"""Certificates and keys of a worker that routers reach over a network."""

from __future__ import annotations

from pathlib import Path

from space_common.certificate import CertificateError, CertificateFiles


def mutual_tls(cert: str | None, key: str | None, client_ca: str | None) -> CertificateFiles | None:
    """What three flags name; None without any. Raises ValueError naming them."""
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
    if not any(given.values()):
        return None
    if cert is None or key is None or client_ca is None:
        missing = [flag for flag, path in given.items() if path is None]
        raise ValueError(f"{' and '.join(given)} go together; {' and '.join(missing)} is missing")
    try:
        return CertificateFiles(Path(cert), Path(key), Path(client_ca))
    except CertificateError as error:
        raise ValueError(f"argument --tls-cert {cert} --tls-key {key} --tls-client-ca {client_ca}: {error}") from None
