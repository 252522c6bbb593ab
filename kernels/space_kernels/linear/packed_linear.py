"""Linear layers whose weights are packed once for the CPU's matrix units, row-invariant bitwise."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROW_TILE = 4
"""Rows of a product are a multiple of this: fewer take another order of summation (measured on torch 2.13)."""

PLAIN_TILE = 32
"""Plain products are of exactly so many rows each: which counts take other orders of summation depends on the processor
(on an x86-64 of model 207 those below 16 do, and with several threads some up to 64; torch 2.13)."""

_TYPICAL_ROWS = 16
"""Row count the packed layout is chosen for: that of a SPACE step of one sequence."""


class PackedLinear(nn.Module):
    """x·Wᵀ + b with W in the CPU library's own layout: about twice as fast as the plain one for few rows.

    A row's result does not depend on the other rows, bitwise, for row counts that are multiples of ROW_TILE; other
    counts are padded here.
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
            return self._product(flat)[:rows].view(*x.shape[:-1], self.out_features)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if self.packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        flat = x.reshape(-1, self.in_features)
        tiles = torch.split(pad_rows(flat, PLAIN_TILE), PLAIN_TILE)
        whole = torch.cat([F.linear(tile, self.weight, self.bias) for tile in tiles])[: len(flat)]
        return whole.view(*x.shape[:-1], self.out_features)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x·Wᵀ + b), rounded once; packed only, rows a multiple of ROW_TILE."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return product

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x·Wᵀ + b)·other; packed only, rows a multiple of ROW_TILE.

        Two operations: the library's product with a product or a sum fused behind it gives a row of bfloat16 other bits
        beside some numbers of rows (20 to 64) than beside 128, on a processor with AMX (torch 2.13).
        """
        return self._product(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x·Wᵀ + b + other, in two operations as `times`; packed only, rows a multiple of ROW_TILE."""
        return self._product(x).add_(other)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """[N, …] -> [N', …]: rows of zeros up to the next multiple; x itself where none are needed."""
    missing = -len(x) % multiple
    return x if not missing else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> the same numbers in the layout that products of a few rows read fastest."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)
    return packed


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the packed product and it computes what it should: the operators are private ones."""
    if dtype is torch.float16:
        return False  # only some processors multiply it, in other orders each: plain tiles have one
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
