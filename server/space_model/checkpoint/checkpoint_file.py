"""The files that a checkpoint may name: those in its own folder, and hub cache blobs that its links lead to."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def is_local_name(name: str) -> bool:
    """Return whether the name stays in its folder, links aside: relative, and without `..`."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def is_contained(file: Path, folder: Path) -> bool:
    """Return whether the file, after following links, is in the folder or is a blob of the hub's cache.

    A snapshot in the cache contains links: models--OWNER--NAME/snapshots/COMMIT/FILE -> models--OWNER--NAME/blobs/HASH.
    """
    there = file.resolve()
    if there.is_relative_to(folder.resolve()):
        return True
    return there.parent.name == "blobs" and there.parent.parent.name.startswith("models--")
