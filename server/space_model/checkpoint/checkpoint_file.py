"""The files of a checkpoint: which it may name, its JSON objects, and the index of a sharded one.

A checkpoint may name files in its own folder, and blobs of the hub's cache that links in it lead to.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from space_model.model_error import CheckpointNotFound


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


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in this file; a byte order mark is skipped. Raises CheckpointNotFound."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointNotFound(f"{file} is not JSON: {error}. Was it copied whole?") from error
    if not isinstance(loaded, dict):
        raise CheckpointNotFound(f"{file} holds no JSON object.")
    return loaded


INDEX = "model.safetensors.index.json"


def read_index(index: Path) -> dict[str, str]:
    """Return tensor -> name of a file in the index's folder. Raises CheckpointNotFound."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointNotFound(f"{index} names no files: it has no weight_map. Fetch it again.")
    for tensor, name in found.items():
        if not isinstance(name, str) or not name:
            raise CheckpointNotFound(f"{index} says that {tensor} is in {name!r}, which is no file. Fetch it again.")
    return found


def indexed_files(index: Path) -> tuple[Path, ...]:
    """Return the files that the index names; each must exist in its folder. Raises CheckpointNotFound."""
    folder = index.parent
    names = sorted(set(read_index(index).values()))
    for name in names:
        if not is_local_name(name):
            raise CheckpointNotFound(
                f"{index} names {name!r}, which is outside its folder. Only files of the checkpoint are read: fetch it "
                "again, or correct the index."
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointNotFound(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are missing). "
            "Was the download finished?"
        )
    for name in names:
        if not is_contained(folder / name, folder):
            raise CheckpointNotFound(
                f"{folder / name} is a link to {(folder / name).resolve()}, outside its folder. Copy the file to "
                f"{folder}, or give the folder that it is in."
            )
    return tuple(folder / name for name in names)
