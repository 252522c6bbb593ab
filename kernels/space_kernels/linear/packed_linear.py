"""Row-invariant linear layers with weights packed for the CPU's matrix units (oneDNN)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROW_TILE = 4
"""Rows are padded to a multiple of this: fewer are summed in another order (measured on torch 2.13)."""

TILE = 32
"""Rows per matmul where other row counts may be summed in another order, which depends on the processor (torch 2.13).
Unpacked: always so many (on an x86-64 of model 207 those below 16 differ, and with several threads some up to 64).
Packed bfloat16: at most so many (with AMX most widths differ from 33 rows on); packed float32 does not differ.
"""

_TYPICAL_ROWS = 16
"""Row count that the packed layout is optimised for: that of a SPACE step of one sequence."""


class PackedLinear(nn.Module):
    """x·Wᵀ + b with W in oneDNN's packed layout: about twice as fast as the plain layout for few rows.

    Bitwise, a row's result does not depend on the other rows. Row counts are padded to multiples of ROW_TILE.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out], float32, bfloat16 or float16, on the CPU. The weight is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight.dtype)
        self.weight = pack(weight) if self.packed else weight.detach().clone()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        rows = x.numel() // self.in_features
        if rows % ROW_TILE:
            flat = pad_rows(x.reshape(rows, self.in_features))
            return self._matmul(flat)[:rows].view(*x.shape[:-1], self.out_features)
        return self._matmul(x)

    def _matmul(self, x: Tensor) -> Tensor:
        if self.packed:
            return self._packed_matmul(x, "none")
        flat = x.reshape(-1, self.in_features)
        tiles = torch.split(pad_rows(flat, TILE), TILE)
        whole = torch.cat([F.linear(tile, self.weight, self.bias) for tile in tiles])[: len(flat)]
        return whole.view(*x.shape[:-1], self.out_features)

    def _packed_matmul(self, x: Tensor, activation: str) -> Tensor:
        """x [..., in], rows a multiple of ROW_TILE -> [..., out]"""

        def multiply(rows: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, activation, [], "")
            return out

        if x.dtype is not torch.bfloat16 or x.numel() <= TILE * self.in_features:
            return multiply(x)
        tiles = torch.split(x.reshape(-1, self.in_features), TILE)
        return torch.cat([multiply(tile) for tile in tiles]).view(*x.shape[:-1], self.out_features)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(x·Wᵀ + b), rounded once; packed only, rows a multiple of ROW_TILE."""
        return self._packed_matmul(x, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return (x·Wᵀ + b)·other; packed only, rows a multiple of ROW_TILE.

        Not fused: that gave bfloat16 rows different bits at some row counts on a processor with AMX (torch 2.13).
        """
        return self._matmul(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return x·Wᵀ + b + other, not fused, as `times`; packed only, rows a multiple of ROW_TILE."""
        return self._matmul(x).add_(other)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """Append rows of zeros up to the next multiple: [N, …] -> [N', …]; x itself if none are needed."""
    missing = -len(x) % multiple
    return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def pack(weight: Tensor) -> Tensor:
    """Convert a weight [out, in] to the layout that is fastest for a few rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)
    return packed


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has a working packed matmul for the dtype. Tested, because the operators are private."""
    if dtype is torch.float16:
        return False  # processors sum it in different orders, and some do not support it; plain tiles are consistent
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    x = torch.randn(8, 40, generator=generator).to(dtype)
    try:
        packed = pack(weight)
        operator = torch.ops.mkldnn._linear_pointwise
        found = [
            operator(x, packed, bias, "none", [], ""),
            operator(x, packed, bias, "swish", [], ""),
        ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    plain = F.linear(x, weight, bias).float()
    wanted = [plain, F.silu(plain)]
    return all(torch.allclose(a.float(), b, rtol=2e-2, atol=2e-2) for a, b in zip(found, wanted, strict=True))
