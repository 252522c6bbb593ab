"""The index of a sharded checkpoint: the file of each tensor."""

from __future__ import annotations

from pathlib import Path

from space_model.checkpoint.checkpoint_file import is_contained, is_local_name
from space_model.checkpoint.json_file import read_object
from space_model.model_error import CheckpointNotFound

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
