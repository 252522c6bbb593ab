"""The weights of a published checkpoint: `*.safetensors` or `pytorch_model*.bin`, in one file or several."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from space_common.files import is_contained
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.whole_model import open_weights
from space_model.model_error import CheckpointNotFound, ModelError

_LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Index of a sharded checkpoint, and the file name of an unsharded one; the first that exists is used."""


class ConvertError(ModelError):
    """A checkpoint that cannot be converted, or settings that do not fit it."""


@dataclass(frozen=True)
class TensorEntry:
    """Metadata of one tensor of the checkpoint."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SourceWeights:
    """The tensors of a checkpoint, by name, in the order of its files."""

    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> SourceWeights:
        """Find the files and read names, shapes and dtypes; the values stay on disk."""
        entries: dict[str, TensorEntry] = {}
        for file in weight_files(folder):
            for name, tensor in _tensors(file).items():
                if name in entries:
                    raise ConvertError(f"{name} is in {entries[name].file.name} and in {file.name}; which is right?")
                entries[name] = TensorEntry(file, tuple(tensor.shape), tensor.dtype)
        if not entries:
            raise ConvertError(f"{folder} has weight files, but no tensor in them.")
        return cls(entries)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) one after the other; one file is open at a time, and none is read as a whole."""
        for file in dict.fromkeys(entry.file for entry in self.entries.values()):
            yield from _tensors(file).items()

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return _tensors(self.entries[name].file)[name]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the model's weights. Raises CheckpointNotFound."""
    for index, single in _LAYOUTS:
        if (folder / index).is_file():
            return _indexed_files(folder / index)
        if (folder / single).is_file():
            return (folder / single,)
    raise CheckpointNotFound(
        f"{folder} has no weights: none of {', '.join(name for layout in _LAYOUTS for name in layout)} is there."
    )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{index} is no index of weight files: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise ConvertError(f"{index} names {name!r}, which is not a file beside it.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointNotFound(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are missing). "
            "Was the download finished?"
        )
    for name in names:
        if not is_contained(index.parent / name, index.parent):
            raise ConvertError(f"{index.parent / name} is a link out of its folder. Copy the file that it leads to.")
    return tuple(index.parent / name for name in names)


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file, memory-mapped: the values are read page by page, when they are used."""
    if file.suffix == ".bin":
        return _load_pickled(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise ConvertError(f"{file} is no safetensors file, or it is cut short: {error}") from error


def _load_pickled(file: Path) -> dict[str, Tensor]:
    """Load the state dict of a `.bin` file without running code in it. (Zip archives, as torch writes since 1.6, can be
    mapped; older files are read whole.)"""
    with file.open("rb") as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise ConvertError(
            f"{file} holds more than tensors, and opening it could run code: {str(error).splitlines()[0]} "
            "Save its state dict alone, or use a safetensors copy of the checkpoint."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ConvertError(f"{file} cannot be read; was the download finished? {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConvertError(f"{file} is no state dict: tensors by name are wanted, at the top.")
    return loaded


@dataclass(frozen=True)
class GgufSource(SourceWeights):
    """Every tensor of the model; written in the dtype that its config names."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GgufSource:
        """Find names and shapes; the values stay on disk."""
        dtype = getattr(torch, checkpoint.config["dtype"])
        (file,) = checkpoint.weights
        with open_weights(checkpoint) as weights:
            entries = {name: TensorEntry(file, weights.shape(name), dtype) for name in weights.names}
        return cls(entries, checkpoint)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) one after the other, in float32; they are rounded once, when written."""
        with open_weights(self.checkpoint) as weights:
            for name in self.entries:
                yield name, weights.whole(name).float()

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        if name not in self.entries:
            raise ConvertError(f"{self.checkpoint.name} has no tensor {name}.")
        with open_weights(self.checkpoint) as weights:
            return weights.whole(name).float()
