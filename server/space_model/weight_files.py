"""The tensors of a checkpoint's safetensors files, read one by one, whole or in part."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from space_model.checkpoint import Checkpoint
from space_model.model_error import CheckpointNotFound, UnsupportedModel


class OpenFiles:
    """Files that several threads read; they are closed when nobody reads any more.

    Where a load fails, transformers does not wait for its other threads: one may be in the midst of a tensor.
    """

    def __init__(self, name: str, handles: Mapping[str, Any]) -> None:
        self.handles = handles  # tensor name -> the open file that has it
        self._name = name
        self._changed = threading.Condition()
        self._num_readers = 0
        self._closed = False

    @contextmanager
    def reading(self, tensor: str) -> Iterator[Any]:
        """The file with the tensor, which stays open as long as the block lasts."""
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
        """Let nobody begin to read, and wait for those who do."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_readers)


class WeightFiles:
    """What is in the files; nothing is read before it is asked for.

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
        """The files of a checkpoint, open as long as the block lasts."""
        with ExitStack() as stack:
            handles = {}
            try:
                for file in checkpoint.weights:
                    handle = stack.enter_context(safe_open(file, framework="pt"))
                    handles.update(dict.fromkeys(handle.keys(), handle))
            except (OSError, SafetensorError) as error:
                raise CheckpointNotFound(f"The weights of {checkpoint.name} cannot be read: {error}") from error
            opened = OpenFiles(checkpoint.name, handles)
            stack.callback(opened.finish)
            yield cls(checkpoint.name, opened, sum(file.stat().st_size for file in checkpoint.weights))

    def __contains__(self, name: object) -> bool:
        return name in self.opened.handles

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return sorted(self.opened.handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header."""
        with self.opened.reading(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """A tensor."""
        with self.opened.reading(name) as file:
            return self._count(file.get_tensor(name))

    def rows(self, name: str, part: slice) -> Tensor:
        """Some rows of a tensor: only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[part])

    def columns(self, name: str, part: slice) -> Tensor:
        """Some columns of a matrix: only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[:, part])

    def _count(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self.num_bytes += tensor.nbytes
        return tensor
