"""Certificates for tests, made by the openssl command: an authority, and those that it signs for this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Files in PEM."""

    cert: Path
    key: Path


def authority(folder: Path, name: str = "authority") -> Certificate:
    """One that signs others, and itself."""
    made = _place(folder, name)
    _openssl("req", "-x509", *_fresh(name), "-days", "1", "-keyout", made.key, "-out", made.cert)
    return made


def signed(folder: Path, name: str, by: Certificate) -> Certificate:
    """One for localhost."""
    made, asked, names = _place(folder, name), folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", "-new", *_fresh(name), "-keyout", made.key, "-out", asked)
    _openssl(
        "x509", "-req", "-in", asked, "-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-days", "1",
        "-extfile", names, "-out", made.cert,
    )  # fmt: skip
    return made


def _place(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.crt", folder / f"{name}.key")


def _fresh(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
