"""Locate a checkpoint's small files: tokenizer and configs, not weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from space_common import default_model
from space_common.default_model import DEFAULT_BASE
from space_common.files import NotUtf8, read_text
from space_common.gguf.find import GgufError, find_gguf
from space_common.hub import Hub, HubError, is_hub_id
from space_common.other_formats import other_format
from space_common.tokenizer.tokenizer_files import published_tokenizer

from space_router.errors import ConfigError


def locate(model: str, hub: Hub = Hub(), flag: str = "--model") -> Path:  # noqa: B008  # frozen
    """Return the folder for `demo`, a path, or a Hugging Face id (downloads its small files). Raises ConfigError.

    For a gated adapter, the folder is that of its base, which config.json names. For a GGUF file, the folder holds the
    files extracted from its header. `flag`: that names the model, for messages.
    """
    folder = _folder(model, hub, flag)
    section = read_json(folder, "config.json").get("space")
    base = section.get("base") if isinstance(section, dict) else None
    if isinstance(base, str) and base:
        try:
            place = str(folder / base) if (folder / base).exists() else base
            folder = _folder(place, replace(hub, revision=None), flag)
        except ConfigError as error:
            raise ConfigError(f"{folder} is a gated adapter whose base cannot be had: {error}") from error
    for name, is_there in (
        ("config.json", (folder / "config.json").is_file()),
        ("tokenizer.json", published_tokenizer(folder) is not None),
    ):
        if not is_there:
            cure = other_format(folder) or "`spaceserve convert` makes a folder that has."
            if is_hub_id(model) and not Path(model).exists():
                cure += f" If the repository has GGUF files, name one of them: {flag} {model}:FILE.gguf"
            raise ConfigError(f"{flag}={model!r}: {folder} has no {name}. {cure}")
    return folder


def _folder(model: str, hub: Hub, flag: str) -> Path:
    if (packaged := default_model.packaged(model)) is not None:
        return packaged
    place = Path(model).expanduser()
    if not place.exists():
        if model != DEFAULT_BASE and not is_hub_id(model):
            raise ConfigError(
                f"{flag}={model!r}: there is no such folder or file; give `smollm2`, `demo`, a folder, a GGUF file or "
                "a Hugging Face id."
            )
        try:
            place = default_model.fetch(hub) if model == DEFAULT_BASE else hub.fetch(model, weights=False)
        except HubError as error:
            raise ConfigError(f"{flag}={model!r} is no folder, and: {error}") from error
    try:
        return _view_of(place) or place
    except GgufError as error:
        raise ConfigError(f"{flag}={model!r}: {error}") from error


def _view_of(place: Path) -> Path | None:
    """Return a folder with the files in the header of the GGUF file at or in `place`, or None if there is none."""
    section = read_json(place, "config.json").get("space") if place.is_dir() else None
    if (isinstance(section, dict) and section.get("base")) or (file := find_gguf(place)) is None:
        return None
    from space_common.gguf.view import view_folder  # imported here because other formats do not need the gguf package

    return view_folder(file)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the folder, or {} if the file is missing. Raises ConfigError."""
    try:
        value = json.loads(read_text(folder / name))
    except FileNotFoundError:
        return {}
    except NotUtf8 as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / name} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{folder / name} holds no JSON object.")
    return value
