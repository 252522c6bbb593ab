"""A checkpoint on disk: its files, hashes and configs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from space_common import default_model
from space_common.default_model import DEFAULT_BASE, DefaultModelUnavailable
from space_common.files import sha256_of
from space_common.gguf.find import SUFFIX, GgufError, find_gguf

from space_model.checkpoint.checkpoint_file import INDEX, indexed_files, read_object
from space_model.checkpoint.peft_folder import PEFT_CONFIG, refuse_as_model
from space_model.checkpoint.tokenizer_eos import tokenizer_eos
from space_model.model_error import CheckpointNotFound, UnsupportedModel

if TYPE_CHECKING:
    from space_common.gguf.reader import GgufFile

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]

Fetch = Callable[[str], Path]
"""Returns the folder of a hub id, or the file `owner/repo:file`. Raises CheckpointNotFound."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files, a GGUF file, or a folder whose `space` section names one as
    base.

    With a base, config, weights and tokenizer come from the base; the folder only holds what its `space` section names.
    """

    name: str  # as the user named it
    folder: Path  # has config and tokenizer; for a GGUF file, the folder they were extracted to
    config: dict[str, Any]  # config.json
    weights: tuple[Path, ...]  # the model's safetensors files, or its GGUF file
    home: Path  # where the files of the `space` section are: the folder itself, even with a base; or the GGUF file
    gguf: GgufFile | None = None  # its header

    @classmethod
    def open(cls, path: str | Path | Checkpoint, fetch: Fetch | None = None) -> Checkpoint:
        """Open `demo`, a folder, a GGUF file, or a hub id (OWNER/NAME or OWNER/NAME:FILE.gguf).

        `fetch` downloads a hub id (None: with huggingface_hub). An open checkpoint is returned as it is.
        """
        if isinstance(path, Checkpoint):
            return path
        fetch = fetch or _from_the_hub
        folder = _folder(str(path), fetch)
        config_file = folder / "config.json"
        config = read_object(config_file) if config_file.is_file() else {}
        section = config.get("space")
        if isinstance(section, dict) and section.get("base") is not None:
            return cls._on_base(str(path), folder, section, fetch)
        refuse_as_model(folder, section)
        try:
            file = find_gguf(folder)
        except GgufError as error:
            raise CheckpointNotFound(str(error)) from error
        if file is not None:
            return cls._of_gguf(str(path), file, folder, section)
        if not config_file.is_file():
            raise CheckpointNotFound(f"{folder} has no config.json; give the folder of a checkpoint.")
        return cls(str(path), folder, with_quantization(folder, config), _weights(folder), folder)

    @classmethod
    def _of_gguf(cls, name: str, file: Path, given: Path, section: Any) -> Checkpoint:
        """Open a GGUF file, found at `given`; `section`: the `space` section of the folder that contains it."""
        from space_common.gguf.reader import GgufFile  # imported late: other formats need no gguf package
        from space_common.gguf.view import view_of

        try:
            header = GgufFile.open(file)
            folder = view_of(header)
        except GgufError as error:
            raise UnsupportedModel(str(error)) from error
        config = read_object(folder / "config.json")
        if section is None:
            return cls(name, folder, config, (file,), file, header)
        return cls(name, folder, config | {"space": section}, (file,), given, header)

    @classmethod
    def _on_base(cls, name: str, home: Path, section: dict[str, Any], fetch: Fetch) -> Checkpoint:
        """Open the checkpoint that `base` names (a path, also relative to `home`, a hub id, or demo)."""
        where = section["base"]
        if not isinstance(where, str) or not where:
            raise CheckpointNotFound(
                f'"base" in the space section of {home} must be a path or a hub id; got {where!r}.'
            )
        try:
            base = cls.open(home / where if (home / where).exists() else where, fetch)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"{home} has no weights of its own, and its base cannot be had: {error}"
            ) from error
        if base.home != (base.folder if base.gguf is None else base.gguf.path):
            raise CheckpointNotFound(f"{home} is based on {where}, which has a base itself; name that one.")
        return cls(name, base.folder, base.config | {"space": section}, base.weights, home, base.gguf)

    @property
    def kept_as(self) -> str | None:
        """Return the type of most of a GGUF file's weights, such as Q4_K; None: unquantised, or in config.json."""
        kind = None if self.gguf is None else next(iter(self.gguf.kinds), None)
        return None if kind in (None, "F32", "F16", "BF16") else kind

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty if absent."""
        file = self.folder / name
        return read_object(file) if file.is_file() else {}

    def model_hash(self) -> str:
        """Hash config.json and the headers of the weights (names, dtypes, shapes, offsets), which is cheap."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        if self.gguf is not None:
            digest.update(self.gguf.header_hash.encode())
            return digest.hexdigest()
        for file in self.weights:
            with file.open("rb") as stream:
                start = stream.read(8)
                if len(start) < 8:
                    raise CheckpointNotFound(f"{file} is empty, or cut short. Fetch it again.")
                (length,) = struct.unpack("<Q", start)
                digest.update(stream.read(length))
        return digest.hexdigest()

    def weights_sha256(self) -> str:
        """Hash the weights file; of several, hash their digests in order. Reads each byte once per process."""
        digests = [sha256_of(file) for file in self.weights]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def tokenizer_hash(self) -> str:
        """Return the sha256 of tokenizer.json, "" if there is none."""
        file = self.folder / "tokenizer.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    def eos_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return the EOS ids of the generation config (else the config), as in transformers, and the tokenizer's EOS.

        Ids outside the vocabulary are dropped.
        """
        sources = (self.read_json("generation_config.json"), self.config, self.config.get("text_config") or {})
        said: Any = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), [])
        ids = [*(said if isinstance(said, list) else [said]), tokenizer_eos(self.read_json)]
        return tuple(dict.fromkeys(id for id in ids if id is not None and 0 <= id < vocab_size))


def adapter_section(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a gated adapter, and its config; a PEFT folder needs no config.json."""
    folder = _folder(str(path), _from_the_hub)
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    section = config.get("space")
    declares = isinstance(section, dict) and section.get("adapter") is not None
    if (folder / PEFT_CONFIG).is_file() and not declares:
        return folder, {"space": {"adapter": "."}}
    if config:
        return folder, config
    raise CheckpointNotFound(f"{folder} has neither config.json nor adapter_config.json; give an adapter's folder.")


_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quant_config.json": ("awq", None),
    "quantize_config.json": ("gptq", None),
}
"""Files beside config.json in which older checkpoints declare their quantisation: the method, and the key that holds it
(None: the whole file)."""


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a quantization_config, taken from another field or file if needed."""
    if config.get("quantization_config") is not None:
        return config
    if isinstance(said := config.get("compression_config"), dict):  # compressed-tensors before its version 0.4
        return config | {"quantization_config": {"quant_method": "compressed-tensors"} | said}
    for name, (method, key) in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            whole = read_object(folder / name)
            section = whole if key is None else whole.get(key)
            return config | {"quantization_config": {**(section or {}), "quant_method": method}}
    return config


def _folder(path: str, fetch: Fetch) -> Path:
    """Return the folder or GGUF file that `path` names."""
    packaged = default_model.packaged(path)
    if packaged is not None:
        return packaged
    folder = Path(path).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix.lower() == SUFFIX):
        return folder
    if folder.is_file():
        raise CheckpointNotFound(f"{path} is a file; give the folder of a checkpoint, or a GGUF file (*{SUFFIX}).")
    if path == DEFAULT_BASE:
        return fetch(path)
    if path.lower().endswith(SUFFIX) and ":" not in path:
        raise CheckpointNotFound(f"There is no file {path}.")
    if path.startswith(("/", ".", "~")) or path.partition(":")[0].count("/") != 1:
        raise CheckpointNotFound(f"There is no folder {path}, and it is no hub id (owner/name) either.")
    return fetch(path)


def _from_the_hub(path: str) -> Path:
    if path == DEFAULT_BASE:
        try:
            return default_model.fetch()
        except DefaultModelUnavailable as error:
            raise CheckpointNotFound(str(error)) from error
    import huggingface_hub  # imported late: a local checkpoint needs no network library

    repository, _, file = path.partition(":")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        raise CheckpointNotFound(f"There is no folder {path}, and the hub did not give {path}: {error}") from error


def _weights(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if index.is_file():
        return indexed_files(index)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointNotFound(
            f"{folder} has its weights as {pickled[0].name}, which can run code when it is opened. "
            f"Turn it into safetensors first: spaceserve convert {folder} NEW_FOLDER"
        )
    parts = sorted(folder.glob("*-of-*.safetensors"))
    if parts:
        raise CheckpointNotFound(
            f"{folder} has {parts[0].name} and no {index.name}, which says what is in which file. Fetch it, too."
        )
    raise CheckpointNotFound(
        f"{folder} has no model.safetensors (and no model.safetensors.index.json). If it is of a repository with GGUF "
        f"files, name one of them: OWNER/NAME:FILE{SUFFIX}"
    )
