"""The keys that clients may come with."""

from __future__ import annotations

from pathlib import Path

from space_router.errors import ConfigError


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
