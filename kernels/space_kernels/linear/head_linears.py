"""Linears of heads: one for each, applied to the rows of its own head. Compiled, all of a step are one call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor, nn

from space_kernels.build.cpu_library import HeadRowsStruct, LinearStruct, cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear, cpu_linear


class HeadLinears(nn.Module):
    """y[h] = x[h]·W[h]ᵀ, row-invariant; in bfloat16 compiled where it can be."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """weights: [out, in] of each head. They are copied."""
        super().__init__()
        self.linears = nn.ModuleList(cpu_linear(weight.contiguous(), None) for weight in weights)
        self.out_features = len(weights[0])
        self._library = cpu_library()
        compiled = [linear.struct for linear in self.linears if isinstance(linear, CompiledLinear)]
        self._structs = (LinearStruct * len(compiled))(*compiled) if len(compiled) == len(weights) else None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [H, R, in] -> [H, R, out], both contiguous in the last dimension. `out`: the tensor to write to."""
        num_heads, num_rows, _ = x.shape
        if out is None:
            out = x.new_empty(num_heads, num_rows, self.out_features)
        if self._structs is None or self._library is None:
            for linear, rows, to in zip(self.linears, x, out, strict=True):
                to.copy_(linear(rows))
            return out
        if x.dtype != torch.bfloat16 or x.stride(2) != 1 or out.stride(2) != 1:
            raise TypeError(f"Compiled linears of heads take dense bfloat16 rows; got {x.dtype}, {x.stride()}.")
        here = HeadRowsStruct(x.data_ptr(), *x.stride()[:2], out.data_ptr(), *out.stride()[:2], num_heads, num_rows)
        self._library.linear_each(self._structs, byref(here), torch.get_num_threads())
        return out
