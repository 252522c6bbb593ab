"""A matrix whose rows are looked up, as an embedding's: plain numbers, or blocks of a mapped GGUF file.

Blocks stay in the file. A row is dequantised each time it is looked up, so the table takes no memory of its own.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.build.cpu_library import TableStruct, cpu_library
from space_kernels.linear.gguf_blocks import Blocks

_PLAIN = 0
_TOGETHER = 1024  # rows dequantised at a time, in float32
_TYPES = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q8_0": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7, "MXFP4": 8}
"""`Type` of cpu/table.h"""


@dataclass(frozen=True)
class RowTable:
    """Rows [V, width] of a dtype."""

    source: Tensor | Blocks  # [V, width]; of a GGUF on the CPU alone
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor | RowTable) -> RowTable:
        """Return the table of a weight [V, width]."""
        if isinstance(weight, RowTable):
            return weight
        return cls(weight.detach().contiguous(), weight.dtype)

    def __len__(self) -> int:
        return len(self.source) if isinstance(self.source, Tensor) else self.source.out_features

    @property
    def width(self) -> int:
        return self.source.shape[1] if isinstance(self.source, Tensor) else self.source.in_features

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    def __getitem__(self, part: slice | Tensor) -> Tensor:
        """Return the rows of a slice or of ids, [rows, width]."""
        return self.rows(torch.arange(len(self))[part])

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [..., width] of ids [...]. Raises IndexError for an id outside of the table."""
        if isinstance(self.source, Tensor):
            return F.embedding(ids, self.source)
        flat = ids.flatten()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < len(self):
            raise IndexError(f"An id is outside of the table's {len(self)}.")
        library = cpu_library() if self.dtype is torch.bfloat16 else None
        found = torch.empty(len(flat), self.width, dtype=self.dtype)
        if library is None:
            for some, place in zip(torch.split(flat, _TOGETHER), torch.split(found, _TOGETHER), strict=True):
                place.copy_(self.source.rows(some).dense())
        else:
            places = self.source.order[flat]
            library.look_up(byref(self.struct()), places.data_ptr(), len(places), found.data_ptr())
        return found.view(*ids.shape, -1)

    def struct(self) -> TableStruct:
        """Return the C struct of a table in bfloat16, in the file's own order; the table must live as long."""
        if isinstance(self.source, Tensor):
            return TableStruct(self.source.data_ptr(), self.width * self.source.itemsize, self.width, _PLAIN)
        data = self.source.data
        return TableStruct(data.data_ptr(), data.stride(0), self.width, _TYPES[self.source.kind])
