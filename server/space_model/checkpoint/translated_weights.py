"""The tensors of a checkpoint under the names, and in the pieces, of the family that it is served as."""

from __future__ import annotations

from torch import Tensor

from space_model.checkpoint.translation import Part, Translation, chosen
from space_model.checkpoint.weight_files import WeightFiles


class TranslatedWeights(WeightFiles):
    """`files` translated; quantised tensors are dequantised first. Nothing is read before it is asked for."""

    def __init__(self, files: WeightFiles, translation: Translation) -> None:
        super().__init__(files.name, files.opened, files.size)
        self.files = files
        self._parts: dict[str, tuple[str, Part]] = {}  # name -> the tensor of the files, and its rows
        for name in files.names:
            for part in translation.parts_of(name):
                self._parts[part.name] = name, part

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    @property
    def names(self) -> list[str]:
        return sorted(self._parts)

    @property
    def knows_shapes(self) -> bool:
        """Whether the shape of a tensor is known without reading it."""
        return self.files.knows_shapes

    def unused(self) -> list[str]:
        """After all tensors were read, return those that the files' own weights left."""
        return self.files.unused()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        source, part = self._parts[name]
        length, *others = self.files.shape(source)
        if isinstance(part.rows, slice):
            length = len(range(*part.rows.indices(length)))
        elif part.rows is not None:
            length = len(part.rows)
        return (length, *others)

    def whole(self, name: str) -> Tensor:
        if name not in self._parts:
            return self.files.whole(name)  # which says that there is none
        source, part = self._parts[name]
        return chosen(self.files.whole(source), part)

    def rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor."""
        return self.whole(name)[part].clone()

    def columns(self, name: str, part: slice) -> Tensor:
        """Return some columns of a matrix."""
        return self.whole(name)[:, part].clone()
