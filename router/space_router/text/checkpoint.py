"""Where a checkpoint's small files lie: tokenizer and configs, never weights."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from space_proto.hub import Hub, HubError, is_hub_id

from space_router.errors import ConfigError


def locate(model: str, hub: Hub = Hub()) -> Path:  # noqa: B008  # frozen
    """The folder of `demo`, of a path, or of a Hugging Face id (downloads its small files). Raises ConfigError.

    A gated adapter without weights names its base in config.json: the texts are the base's.
    """
    folder = _folder(model, hub)
    section = read_json(folder, "config.json").get("space")
    base = section.get("base") if isinstance(section, dict) else None
    if isinstance(base, str) and base:
        try:
            folder = _folder(str(folder / base) if (folder / base).is_dir() else base, replace(hub, revision=None))
        except ConfigError as error:
            raise ConfigError(f"{folder} is a gated adapter whose base cannot be had: {error}") from error
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--model={model!r}: {folder} has no {name}; `spaceserve convert` makes a folder that has."
            )
    return folder


def _folder(model: str, hub: Hub) -> Path:
    if model == "demo":
        return Path(str(resources.files("space_demo")))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(model):
        raise ConfigError(f"--model={model!r}: there is no such folder; give `demo`, a folder or a Hugging Face id.")
    try:
        return hub.fetch(model, weights=False)
    except HubError as error:
        raise ConfigError(f"--model={model!r} is no folder, and: {error}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder; empty where there is no such file. Raises ConfigError."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{folder / name} holds no JSON object.")
    return value
