"""Finds the GGUF file that the user names: the file itself, its folder, or `owner/repo:file.gguf`.

This module does not import the `gguf` package, which models of other formats do not need.
"""

from __future__ import annotations

import re
from pathlib import Path


class GgufError(Exception):
    """The file cannot be read or served; the message names what is unsupported or broken, and what to do."""


SUFFIX = ".gguf"

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""If a folder has one of these, it holds the weights; draft heads may lie beside a GGUF file as other safetensors
files."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_OTHERS = ("mmproj", "imatrix")
"""Prefixes of files that lie beside a model's: an image projector, quantisation statistics."""


def is_gguf(path: Path) -> bool:
    """Return whether the file name is a GGUF file's; the magic bytes are checked when it is opened."""
    return path.suffix.lower() == SUFFIX


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`, or the only weights of the folder `path`; None if there is none.

    Raises GgufError for a folder with several GGUF files, and for a split model.
    """
    if is_gguf(path) and not path.is_dir():
        if not path.exists():
            raise GgufError(f"There is no file {path}.")
        return _whole(path)
    if not path.is_dir() or any((path / name).is_file() for name in _SAFETENSORS):
        return None
    found = sorted(file for file in path.iterdir() if is_gguf(file) and file.is_file())
    models = [file for file in found if not file.name.lower().startswith(_OTHERS)] or found
    if not models:
        return None
    if len(models) > 1 and not all(_PART.search(file.name) for file in models):
        names = ", ".join(file.name for file in models)
        raise GgufError(f"{path} holds {len(models)} GGUF files: {names}. Name one of them: {models[0]}")
    return _whole(models[0])


def _whole(path: Path) -> Path:
    part = _PART.search(path.name)
    if part is not None and int(part[2]) > 1:
        first = path.name[: part.start()]
        raise GgufError(
            f"{path} is part {int(part[1])} of {int(part[2])}, and a model in several GGUF files is not read. Join "
            f"them first: llama-gguf-split --merge {first}-00001-of-{part[2]}.gguf {first}.gguf"
        )
    return path
