"""Where a checkpoint's small files lie: tokenizer and configs, never weights."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from space_router.errors import ConfigError

_SMALL_FILES = (
    "tokenizer.json",
    "*config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
)


def locate(model: str) -> Path:
    """The folder of `demo`, of a path, or of a Hugging Face id (downloads its small files). Raises ConfigError.

    A gated adapter without weights names its base in config.json: the texts are the base's.
    """
    folder = _folder(model)
    section = read_json(folder, "config.json").get("space")
    base = section.get("base") if isinstance(section, dict) else None
    if isinstance(base, str) and base:
        try:
            folder = _folder(str(folder / base) if (folder / base).is_dir() else base)
        except ConfigError as error:
            raise ConfigError(f"{folder} is a gated adapter whose base cannot be had: {error}") from error
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--model={model!r}: {folder} has no {name}; `spaceserve convert` makes a folder that has."
            )
    return folder


def _folder(model: str) -> Path:
    if model == "demo":
        return Path(str(resources.files("space_demo")))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"--model={model!r}: there is no such folder; give `demo`, a folder or a Hugging Face id.")
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigError(f"--model={model!r}: neither a folder nor to be had from Hugging Face: {reason}") from error


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
