"""Which files a checkpoint may name: those in its own folder, and the blobs that links of the hub's cache lead to."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def is_local_name(name: str) -> bool:
    """Whether the name stays in the folder it is looked up in, links aside: relative, and without `..`."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def is_contained(file: Path, folder: Path) -> bool:
    """Whether the file, links followed, is in the folder, or is a blob of the hub's cache.

    A snapshot of the cache holds links: models--OWNER--NAME/snapshots/COMMIT/FILE -> models--OWNER--NAME/blobs/HASH.
    """
    there = file.resolve()
    if there.is_relative_to(folder.resolve()):
        return True
    return there.parent.name == "blobs" and there.parent.parent.name.startswith("models--")
