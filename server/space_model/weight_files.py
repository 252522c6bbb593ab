"""The tensors of a checkpoint's safetensors files, read one by one, whole or in part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from space_model.checkpoint import Checkpoint
from space_model.model_error import CheckpointNotFound, UnsupportedModel


class WeightFiles:
    """What is in the files; nothing is read before it is asked for.

    with WeightFiles.open(checkpoint) as files: files.rows("lm_head.weight", slice(0, 64))
    """

    def __init__(self, name: str, handles: dict[str, Any], size: int) -> None:
        self.name = name
        self.size = size  # bytes of all files
        self.num_bytes = 0  # read so far
        self._handles = handles  # tensor name -> the open file that has it
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
            yield cls(checkpoint.name, handles, sum(file.stat().st_size for file in checkpoint.weights))

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return sorted(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """A tensor."""
        return self._count(self._handle(name).get_tensor(name))

    def rows(self, name: str, part: slice) -> Tensor:
        """Some rows of a tensor: only they are read."""
        return self._count(self._handle(name).get_slice(name)[part])

    def columns(self, name: str, part: slice) -> Tensor:
        """Some columns of a matrix: only they are read."""
        return self._count(self._handle(name).get_slice(name)[:, part])

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            raise UnsupportedModel(f"The weights of {self.name} lack {name}.")
        return self._handles[name]

    def _count(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self.num_bytes += tensor.nbytes
        return tensor
