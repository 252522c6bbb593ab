"""The keys that clients may come with."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from space_router.errors import ConfigError, Unauthorized


class ApiKeys:
    """The keys of one server; each has a name that may be logged and counted, a hash of it."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]
        self._names = [hashlib.sha256(key).hexdigest()[:16] for key in self._keys]

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an `Authorization` header, read as Latin-1; None: missing or not known; "": the server
        has no keys. Compares with all, in time that does not depend on which one fits.
        """
        if not self._keys:
            return ""
        kind, _, given = authorization.partition(" ")
        offered = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        known = [hmac.compare_digest(offered, key) for key in self._keys]
        return self._names[known.index(True)] if any(known) else None

    def refusal(self) -> Unauthorized:
        """What somebody hears who has no key."""
        return Unauthorized("The API key is missing or not known. Send `Authorization: Bearer KEY`.")


def read_keys(file: str | None, given: str) -> tuple[str, ...]:
    """API keys from the file (one per line, `#` starts a comment line) and from `given`, separated by commas.

    Raises ConfigError for a file that cannot be read or holds none.
    """
    lines = given.split(",")
    if file is not None:
        try:
            lines += [
                line
                for line in Path(file).expanduser().read_text(encoding="utf-8").splitlines()
                if not line.startswith("#")
            ]
        except OSError as error:
            raise ConfigError(f"--api-key-file={file!r}: cannot be read: {error.strerror}.") from None
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if file is not None and not keys:
        raise ConfigError(f"--api-key-file={file!r}: holds no key; write one per line.")
    return keys
