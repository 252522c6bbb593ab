"""The sha256 of large files, computed once per process."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


def sha256_of(file: Path) -> str:
    """Return the sha256 in hexadecimal; recomputed if the file's size or time has changed. Raises OSError."""
    stat = file.stat()
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache
def _digest(file: Path, num_bytes: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
