"""What a client of a server by HTTPS trusts, and its words for what is wrong with a certificate."""

from __future__ import annotations

import ssl
from pathlib import Path


def client_context(cacert: Path | None) -> ssl.SSLContext:
    """Return the context of a client. `cacert`: a file with the certificates of further authorities, PEM.

    Those of the system, or of the variables SSL_CERT_FILE and SSL_CERT_DIR, are trusted, too. Raises OSError, also for
    a file without certificates.
    """
    context = ssl.create_default_context()
    if cacert is not None:
        context.load_verify_locations(cacert)
    return context


def tls_trouble(error: BaseException) -> str:
    """Return what is wrong with the server's TLS, with the cure; "" if the error is about something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (62, 64):  # host name, address
            return f"its certificate is for another name ({error.verify_message}). Ask by a name that it has."
        return (
            f"its certificate is not trusted ({error.verify_message}). Give the certificate of its authority with "
            "--cacert FILE, or name it in SSL_CERT_FILE."
        )
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it speaks no TLS. Write http:// in place of https://."
    return ""
