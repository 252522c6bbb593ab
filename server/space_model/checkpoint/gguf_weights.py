"""The tensors of a GGUF file, dequantised when they are read.

The file is mapped. A tensor is dequantised some rows at a time, by the `gguf` package, to float32, which is rounded
once, to the model's dtype. Tensors that are unquantised and in the model's row order are views.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile, GgufTensor
from space_common.gguf.tensors import StackedSource, TensorRows, TensorSource, sources_of
from space_kernels.linear.gguf_blocks import KINDS, Blocks, form_of
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.stored_weight import FUSED, PANEL, StoredExperts, StoredWeight, is_expert, split_mixtures
from space_model.checkpoint.weight_files import OpenFiles, WeightFiles
from space_model.model_error import CheckpointNotFound, UnsupportedModel

_log = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"

PIECE = 1 << 17  # elements dequantised at once: in float32 they fit a core's cache

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights(WeightFiles):
    """The model's tensors by Hugging Face names, read on demand."""

    def __init__(self, name: str, file: GgufFile, sources: Mapping[str, TensorSource]) -> None:
        size = file.path.stat().st_size
        super().__init__(name, OpenFiles(name, sources), size)
        self._bytes = np.memmap(file.path, dtype=np.uint8, mode="c")  # copy on write: torch requires a writable array
        self.file = file

    @property
    def num_packed(self) -> int:
        return sum(map(self.is_quantised, self.names))

    def shape(self, name: str) -> tuple[int, ...]:
        with self.opened.reading(name) as source:
            return tuple(source.shape)

    def is_packed(self, name: str) -> bool:
        """Return whether the tensor cannot be a view of the file."""
        with self.opened.reading(name) as source:
            return not (source.is_plain and _is_plain(source.parts[0].tensor))

    def is_quantised(self, name: str) -> bool:
        """Return whether the file has the tensor in fewer bits."""
        with self.opened.reading(name) as source:
            return any(not _is_plain(rows.tensor) for rows in source.parts)

    def whole(self, name: str) -> Tensor:
        """Return a tensor: a view of the file in its own dtype, or dequantised to float32."""
        with self.opened.reading(name) as source:
            if source.is_plain and _is_plain(source.parts[0].tensor):
                return self._count(self._view(source.parts[0].tensor))
        return self.rows(name, slice(None))

    def rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor in float32; only they are read."""
        shape = self.shape(name)
        start, stop, step = part.indices(shape[0])
        if step != 1:
            raise ValueError(f"Rows of {name} are read one after another; asked for {part}.")
        place = torch.empty((max(0, stop - start), *shape[1:]))
        self._fill(name, start, place)
        return place

    def columns(self, name: str, part: slice) -> Tensor:
        """Return some columns of a matrix in float32; whole rows are read, a few at a time."""
        num_rows, num_columns = self.shape(name)
        place = torch.empty((num_rows, len(range(num_columns)[part])))
        self._fill(name, 0, place, part)
        return place

    def read_into(self, name: str, place: Tensor) -> None:
        """Write a tensor's values into `place`, rounding to its dtype."""
        self._fill(name, 0, place)

    def _fill(self, name: str, first: int, place: Tensor, columns: slice | None = None) -> None:
        """Write the rows from `first` on, or some of their columns, into `place`."""
        with self.opened.reading(name) as source:
            if isinstance(source, StackedSource):
                for expert, part in enumerate(place, first):
                    part.copy_(torch.from_numpy(_of_expert(self._bytes, source, expert)))
            else:
                width = source.shape[1] if len(source.shape) == 2 else 1
                step = max(1, PIECE // width)
                for start in range(0, len(place), step):
                    stop = min(len(place), start + step)
                    numbers = _numbers(self._bytes, source, first + start, first + stop)
                    made = torch.from_numpy(numbers if columns is None else numbers[:, columns])
                    place[start:stop].copy_(made)
        numel = sum(rows.tensor.num_elements for rows in source.parts)
        bits = sum(rows.tensor.num_bytes for rows in source.parts) * 8 / max(1, numel)
        with self._lock:
            self.num_bytes += int(place.numel() * bits / 8)

    def stored(self, *, fuses: bool) -> dict[str, StoredWeight]:
        kept = kept_blocks(self.opened.handles, fuses=fuses)
        return {name: self.blocks(name) for name in kept if name != EMBEDDING}

    def stored_mixtures(self) -> dict[str, StoredExperts]:
        found = {}
        for path, stacks in kept_mixtures(self.opened.handles).items():
            gate, up, down = (
                [[self._blocks(source, source.of_expert(expert)[part])] for expert in range(source.num_experts)]
                for source, part in ((stacks[0], 0), (stacks[0], 1), (stacks[1], 0))
            )
            found[path] = StoredExperts(gate, up, down, is_transposed=True)
        return found

    def stored_embedding(self) -> tuple[str, Blocks] | None:
        if not is_left(self.opened.handles, EMBEDDING):
            return None
        (rows,) = self.blocks(EMBEDDING)
        return EMBEDDING, rows

    def blocks(self, name: str) -> list[Blocks]:
        """Return the blocks of a matrix as views of the file. All of its parts must be of types in KINDS."""
        with self.opened.reading(name) as source:
            return [self._blocks(source, rows) for rows in source.parts]

    def _blocks(self, source: TensorSource, rows: TensorRows) -> Blocks:
        tensor = rows.tensor
        kept = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        if source.turned_heads:
            order = _turned(source, rows, np.arange(rows.stop - rows.start))
        else:
            kept, order = kept[rows.start : rows.stop], np.arange(rows.stop - rows.start)
        return Blocks(tensor.name, tensor.kind_name, torch.from_numpy(kept), torch.from_numpy(order))

    def _view(self, tensor: GgufTensor) -> Tensor:
        kept = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        dtype = _PLAIN[tensor.kind_name]
        if tensor.offset % dtype.itemsize:  # the file's alignment may be smaller
            kept = kept.copy()
        return torch.from_numpy(kept).view(dtype).view(tensor.shape)


def _is_plain(tensor: GgufTensor) -> bool:
    return tensor.kind_name in _PLAIN


def _numbers(data: npt.NDArray[np.uint8], source: TensorSource, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Return [stop - start, columns] or [stop - start], in the model's row order."""
    if source.turned_heads:
        (rows,) = source.parts
        wanted = _turned(source, rows, np.arange(start, stop))
        found: npt.NDArray[np.float32] = _dequantized(data, rows.tensor, wanted)
    else:
        pieces, before = [], 0
        for rows in source.parts:
            first, last = max(start - before, 0) + rows.start, min(stop - before + rows.start, rows.stop)
            if first < last:
                pieces.append(_dequantized(data, rows.tensor, slice(first, last)))
            before += rows.stop - rows.start
        found = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return found - np.float32(source.shift) if source.shift else found


def _of_expert(data: npt.NDArray[np.uint8], source: StackedSource, expert: int) -> npt.NDArray[np.float32]:
    """Return an expert's weights [inputs, outputs] or biases [outputs]."""
    parts = [_dequantized(data, rows.tensor, slice(rows.start, rows.stop)) for rows in source.of_expert(expert)]
    in_turn: npt.NDArray[np.float32] = np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
    return in_turn.T


def _turned(source: TensorSource, rows: TensorRows, number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows of the file's tensor that are rows `number` of the model's."""
    size = (rows.stop - rows.start) // source.turned_heads
    head, row = number // size, number % size
    # the file interleaves the rotary pairs; the model has them half a head apart
    return rows.start + head * size + row % (size // 2) * 2 + row // (size // 2)


def kept_blocks(sources: Mapping[str, TensorSource], *, fuses: bool) -> set[str]:
    """Return the names of the weights that `--weights gguf` keeps in their blocks: linears, and the output head (of a
    tied one the embedding's name). `fuses`: the network fuses linears; they are kept if all parts are."""
    names = {name for name, source in sources.items() if _keeps(name, source)}
    for name in [*names] if fuses else []:
        module, _, linear = name.removesuffix(".weight").rpartition(".")
        group = next((group for group in FUSED if linear in group), ())
        fused = [f"{module}.{one}.weight" for one in group]
        if not names.issuperset(fused) or any(len(sources[one].parts) > 1 for one in fused):
            names.discard(name)
        elif any(sources[one].shape[0] % PANEL for one in fused):
            names.difference_update(fused)
        elif "gate_proj" in group and len({form_of(sources[one].parts[0].tensor.kind_name) for one in fused}) > 1:
            names.difference_update(fused)  # their outputs alternate
    if "lm_head.weight" in sources:
        names.discard(EMBEDDING)

    def may_join(gate: str, up: str) -> bool:
        forms = {form_of(sources[one].parts[0].tensor.kind_name) for one in (gate, up)}
        return len(forms) == 1 and sources[gate].shape[0] % PANEL == 0

    return names - split_mixtures(names, sources, may_join)


def kept_mixtures(sources: Mapping[str, TensorSource]) -> dict[str, tuple[StackedSource, StackedSource]]:
    """Return the stacked experts that `--weights gguf` keeps in their blocks, by path: gate and up, then down."""
    found = {}
    for name, gate_up in sources.items():
        path, _, linear = name.rpartition(".")
        down = sources.get(f"{path}.down_proj")
        if linear != "gate_up_proj" or not isinstance(gate_up, StackedSource) or not isinstance(down, StackedSource):
            continue
        kinds = [rows.tensor.kind_name for rows in (*gate_up.parts, *down.parts)]
        if not KINDS.issuperset(kinds) or gate_up.num_outputs % PANEL:
            continue
        if form_of(kinds[0]) == form_of(kinds[1]):
            found[path] = gate_up, down
    return found


def is_left(sources: Mapping[str, TensorSource], name: str) -> bool:
    """Return whether the named weight can be left in its blocks."""
    return name in sources and _keeps(name, sources[name])


def _keeps(name: str, source: TensorSource) -> bool:
    matrix = (
        len(source.shape) == 2
        and not source.shift
        and (name.endswith(("_proj.weight", "lm_head.weight", EMBEDDING)) or is_expert(name))
    )
    even = all((rows.stop - rows.start) % PANEL == 0 for rows in source.parts[:-1])
    return matrix and even and all(rows.tensor.kind_name in KINDS for rows in source.parts)


def _dequantized(data: npt.NDArray[np.uint8], tensor: GgufTensor, rows: Any) -> Any:
    """Return some rows of a tensor of the file, float32: a slice, or row numbers."""
    kept = data[tensor.offset : tensor.offset + tensor.num_bytes]
    kind = GGMLQuantizationType(tensor.kind)
    if len(tensor.shape) == 1:  # a block of a 1-D tensor spans several elements
        return quants.dequantize(np.ascontiguousarray(kept), kind)[rows].copy()
    return quants.dequantize(np.ascontiguousarray(kept.reshape(tensor.shape[0], -1)[rows]), kind)


def held_bytes(file: GgufFile, config: Mapping[str, Any], *, fuses: bool) -> dict[str, int]:
    """Return the bytes of each weight that stays in memory as blocks."""
    sources = sources_of(file, config)
    kept = kept_blocks(sources, fuses=fuses)
    for path in kept_mixtures(sources):
        kept |= {f"{path}.gate_up_proj", f"{path}.down_proj"}
    return {
        name: sum(
            (rows.stop - rows.start) * rows.tensor.shape[1] * form_of(rows.tensor.kind_name).bytes_of_groups // 256
            for rows in sources[name].parts
        )
        for name in kept
    }


def left_numbers(file: GgufFile, config: Mapping[str, Any]) -> int:
    """Return how many numbers an embedding has that is left in its blocks; 0 if it is not."""
    sources = sources_of(file, config)
    return math.prod(sources[EMBEDDING].shape) if is_left(sources, EMBEDDING) else 0


def entries(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield name, safetensors dtype and number of elements of each tensor; quantised ones count as BF16, the usual
    dtype."""
    for name, source in sources_of(file, config).items():
        kinds = {rows.tensor.kind_name for rows in source.parts}
        yield name, kinds.pop() if len(kinds) == 1 and kinds <= set(_PLAIN) else "BF16", math.prod(source.shape)


@contextmanager
def open_gguf(checkpoint: Checkpoint, file: GgufFile) -> Iterator[GgufWeights]:
    """Open the weights of a checkpoint whose GGUF header was read, for the duration of the block."""
    try:
        weights = GgufWeights(checkpoint.name, file, sources_of(file, checkpoint.config))
    except GgufError as error:
        raise UnsupportedModel(str(error)) from error
    except OSError as error:
        raise CheckpointNotFound(f"{file.path} cannot be read: {error.strerror or error}.") from error
    try:
        yield weights
    finally:
        weights.opened.finish()
