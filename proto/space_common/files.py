"""Reads text and hashes of files."""

from __future__ import annotations

import codecs
import functools
import hashlib
from pathlib import Path, PurePosixPath


def sha256_of(file: Path) -> str:
    """Return the sha256 in hexadecimal; recomputed if the file's size or time has changed. Raises OSError."""
    stat = file.stat()
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns)


def api_key_in(file: Path) -> str:
    """Return the key in the file that --api-key-file names, its first word: a key in a flag would be visible to other
    processes. Raises ValueError."""
    try:
        key = file.expanduser().read_text(encoding="utf-8-sig").split()[0]
    except (OSError, IndexError, UnicodeError):
        raise ValueError(f"--api-key-file {file}: there is no key in it.") from None
    if key.startswith("sha256:"):
        raise ValueError(f"--api-key-file {file}: it has a key's digest, not the key. Give a file with the key itself.")
    return key


@functools.lru_cache
def _digest(file: Path, num_bytes: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_OTHERS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class NotUtf8(ValueError):
    """A text file is not UTF-8; the message names the file, the position and what to do."""


def is_local_name(name: str) -> bool:
    """Return whether the name stays in its folder, links aside: relative, and without `..`."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def is_contained(file: Path, folder: Path) -> bool:
    """Return whether the file, after following links, is in the folder or is a blob of the hub's cache. A snapshot in
    the cache contains links: models--OWNER--NAME/snapshots/COMMIT/FILE -> models--OWNER--NAME/blobs/HASH."""
    there = file.resolve()
    if there.is_relative_to(folder.resolve()):
        return True
    return there.parent.name == "blobs" and there.parent.parent.name.startswith("models--")


def decoded(content: bytes, name: str | Path) -> str:
    """Decode UTF-8, with or without a byte order mark. `name`: for the error. Raises NotUtf8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = next((encoding for mark, encoding in _OTHERS.items() if content.startswith(mark)), None)
        what = f"is {other}" if other else f"is not UTF-8: the byte 0x{content[error.start]:02x} at {error.start}"
        raise NotUtf8(f"{name} {what}. Save it as UTF-8.") from error


def read_text(file: Path) -> str:
    """Return the text of a file. Raises NotUtf8, OSError."""
    return decoded(file.read_bytes(), file)


LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA_FILES = (LORA_CONFIG, LORA_WEIGHTS)
"""Of an ordinary LoRA adapter, as peft saves it."""


def hash_lora(folder: Path) -> str:
    """Return the sha256 over the names, sizes and bytes of a LoRA's files. Raises OSError."""
    digest = hashlib.sha256()
    for name in LORA_FILES:
        file = folder / name
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
