"""Reads tensors from a checkpoint's safetensors files, one by one, whole or in part."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.checkpoint_file import INDEX, read_index
from space_model.model_error import CheckpointNotFound, UnsupportedModel


class OpenFiles:
    """Files that several threads read; they are closed after the last read ends.

    When a load fails, transformers does not wait for its other threads: one may be reading a tensor.
    """

    def __init__(self, name: str, handles: Mapping[str, Any]) -> None:
        self.handles = handles  # tensor name -> the open file that has it
        self._name = name
        self._changed = threading.Condition()
        self._num_readers = 0
        self._closed = False

    @contextmanager
    def reading(self, tensor: str) -> Iterator[Any]:
        """Yield the tensor's file, and keep it open for the duration of the block."""
        if tensor not in self.handles:
            raise UnsupportedModel(f"The weights of {self._name} lack {tensor}.")
        with self._changed:
            if self._closed:
                raise CheckpointNotFound(f"The weights of {self._name} are closed; {tensor} comes too late.")
            self._num_readers += 1
        try:
            yield self.handles[tensor]
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Refuse new reads, and wait for those in progress."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_readers)


class WeightFiles:
    """The tensors of the files, read on demand.

    with WeightFiles.open(checkpoint) as files: files.rows("lm_head.weight", slice(0, 64))
    """

    def __init__(self, name: str, opened: OpenFiles, size: int) -> None:
        self.name = name
        self.opened = opened
        self.size = size  # bytes of all files
        self.num_bytes = 0  # read so far
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def open(cls, checkpoint: Checkpoint) -> Iterator[WeightFiles]:
        """Open a checkpoint's files for the duration of the block."""
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            files: dict[str, Path] = {}
            for file in checkpoint.weights:
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt"))
                    names = list(handle.keys())
                except (OSError, SafetensorError) as error:
                    raise CheckpointNotFound(_cut_short(file, error)) from error
                for name in names:
                    if name in files:
                        raise CheckpointNotFound(
                            f"{name} of {checkpoint.name} is in {files[name].name} and in {file.name}; one of them is "
                            "of another checkpoint. Fetch it again into an empty folder."
                        )
                    files[name] = file
                handles.update(dict.fromkeys(names, handle))
            _check_index(checkpoint, files)
            opened = OpenFiles(checkpoint.name, handles)
            stack.callback(opened.finish)
            yield cls(checkpoint.name, opened, sum(file.stat().st_size for file in checkpoint.weights))

    def __contains__(self, name: object) -> bool:
        return name in self.opened.handles

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self.opened.handles)

    def unused(self) -> list[str]:
        """After all tensors were read, return those that neither the model nor its dequantised weights used."""
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header."""
        with self.opened.reading(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """Return a tensor."""
        with self.opened.reading(name) as file:
            return self._count(file.get_tensor(name))

    def rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor; only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[part])

    def columns(self, name: str, part: slice) -> Tensor:
        """Return some columns of a matrix; only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[:, part])

    @property
    def num_packed(self) -> int:
        """Return the number of quantised tensors."""
        return 0

    def is_packed(self, name: str) -> bool:
        """Return whether `read_into` must dequantise the tensor."""
        return False

    def read_into(self, name: str, place: Tensor) -> None:
        """Write a quantised tensor's values into `place`, which has its shape, on any device in any dtype."""
        raise NotImplementedError

    def _count(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self.num_bytes += tensor.nbytes
        return tensor


def _cut_short(file: Path, error: Exception) -> str:
    size = file.stat().st_size if file.is_file() else 0
    what = "is empty" if not size else f"({size} bytes) is no safetensors file, or it is cut short: {error}"
    return f"{file} {what}. Fetch it again."


def _check_index(checkpoint: Checkpoint, files: Mapping[str, Path]) -> None:
    """Check that the index matches the files: a tensor that is in none of them was lost."""
    index = checkpoint.folder / INDEX
    if not index.is_file() or (checkpoint.folder / "model.safetensors") in checkpoint.weights:
        return
    wrong = {
        name: file
        for name, file in read_index(index).items()
        if name not in files or files[name] != checkpoint.folder / file
    }
    if wrong:
        name = min(wrong)
        there = f"it is in {files[name].name}" if name in files else "no file has it"
        raise CheckpointNotFound(
            f"{index} says that {name} is in {wrong[name]}, and {there} ({len(wrong)} tensors). The files are of "
            "several checkpoints, or one is cut short: fetch them again into an empty folder."
        )
