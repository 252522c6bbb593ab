"""A checkpoint on disk: its files, its hashes, and the configs that say what it is."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_model.model_error import CheckpointNotFound, UnsupportedModel

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]

Fetch = Callable[[str], Path]
"""The folder of a hub id's files. Raises CheckpointNotFound."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files; or a folder whose `space` section names such a folder as base.

    From a base come config, weights and tokenizer; the folder itself brings only what its `space` section names.
    """

    name: str  # as asked for
    folder: Path  # of config, weights and tokenizer
    config: dict[str, Any]  # config.json
    weights: tuple[Path, ...]  # the model's safetensors files
    home: Path  # of what the `space` section names: the folder itself, also where there is a base

    @classmethod
    def open(cls, path: str | Path | Checkpoint, fetch: Fetch | None = None) -> Checkpoint:
        """`demo`, a folder, or the id of a repository on the Hugging Face hub, which `fetch` gets (None: its library).

        One that is open already is itself.
        """
        if isinstance(path, Checkpoint):
            return path
        fetch = fetch or _from_the_hub
        folder = _folder(str(path), fetch)
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise CheckpointNotFound(f"{folder} has no config.json; give the folder of a checkpoint.")
        config = _object(config_file)
        section = config.get("space")
        if isinstance(section, dict) and section.get("base") is not None:
            return cls._on_base(str(path), folder, section, fetch)
        if "auto_map" in config:
            raise UnsupportedModel(
                f"The checkpoint {path} brings its own code (auto_map in config.json); remote code is never run. "
                "Use a checkpoint of an architecture that transformers has."
            )
        return cls(str(path), folder, config, _weights(folder), folder)

    @classmethod
    def _on_base(cls, name: str, home: Path, section: dict[str, Any], fetch: Fetch) -> Checkpoint:
        """The checkpoint that `base` names (a path, seen from `home` too, a hub id, or demo), with this section."""
        where = section["base"]
        if not isinstance(where, str) or not where:
            raise CheckpointNotFound(
                f'"base" in the space section of {home} must be a path or a hub id; got {where!r}.'
            )
        try:
            base = cls.open(home / where if (home / where).is_dir() else where, fetch)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"{home} has no weights of its own, and its base cannot be had: {error}"
            ) from error
        if base.home != base.folder:
            raise CheckpointNotFound(f"{home} is based on {where}, which has a base itself; name that one.")
        return cls(name, base.folder, base.config | {"space": section}, base.weights, home)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty where it is absent."""
        file = self.folder / name
        return _object(file) if file.is_file() else {}

    def model_hash(self) -> str:
        """Over config.json and the headers of the weights (names, dtypes, shapes, offsets): cheap, and seen by eye."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file in self.weights:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                digest.update(stream.read(length))
        return digest.hexdigest()

    def tokenizer_hash(self) -> str:
        """sha256 of tokenizer.json, "" where there is none."""
        file = self.folder / "tokenizer.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    def eos_ids(self, vocab_size: int) -> tuple[int, ...]:
        """What ends a text, as the generation config says, else the config; an id the head does not have ends none."""
        for source in (self.read_json("generation_config.json"), self.config, self.config.get("text_config") or {}):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(id for id in (ids if isinstance(ids, list) else [ids]) if 0 <= id < vocab_size)
        return ()


def adapter_section(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a gated adapter, and its config; a folder as peft writes it needs no config.json."""
    folder = _folder(str(path), _from_the_hub)
    if (folder / "config.json").is_file():
        return folder, _object(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        return folder, {"space": {"adapter": "."}}
    raise CheckpointNotFound(f"{folder} has neither config.json nor adapter_config.json; give an adapter's folder.")


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in this file."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointNotFound(f"{file} is not JSON: {error}. Was it copied whole?") from error
    if not isinstance(loaded, dict):
        raise CheckpointNotFound(f"{file} holds no JSON object.")
    return loaded


def _folder(path: str, fetch: Fetch) -> Path:
    if path == "demo":
        return Path(str(importlib.resources.files("space_demo")))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise CheckpointNotFound(f"There is no folder {path}, and it is no hub id (owner/name) either.")
    return fetch(path)


def _from_the_hub(path: str) -> Path:
    import huggingface_hub  # only here: a local checkpoint needs no network library

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        raise CheckpointNotFound(f"There is no folder {path}, and the hub did not give {path}: {error}") from error


def _weights(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_object(index).get("weight_map", {}).values()))
        if not names:
            raise CheckpointNotFound(f"{index} names no files.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointNotFound(f"{index} names {missing[0]}, which is not there ({len(missing)} files missing).")
        return tuple(folder / name for name in names)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointNotFound(
            f"{folder} has its weights as {pickled[0].name}, which can run code when it is opened. "
            f"Turn it into safetensors first: spaceserve convert {folder} NEW_FOLDER"
        )
    raise CheckpointNotFound(f"{folder} has no model.safetensors (and no model.safetensors.index.json).")
