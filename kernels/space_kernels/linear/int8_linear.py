"""int8 weights: half the bytes of bfloat16 to read and to hold.

Each output has its own scale, the greatest absolute weight over 127, so a weight's error is at most half the scale.
Inputs are rounded to whole numbers, too, 32 at a time (see rounded_inputs.py); sums over 32 are exact, those of a row
are added in float32 in ascending order, and the sum is multiplied by the scale once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels.layers.layers import silu
from space_kernels.linear.packed_linear import TILE, pad_rows
from space_kernels.linear.rounded_inputs import rounded

GREATEST = 127
"""Numbers are in the symmetric range -127 .. 127."""

_OUTPUTS = 1024
"""Outputs converted at a time, to bound the float32 copies in memory."""


@dataclass(frozen=True)
class Int8Weights:
    """W[n, k] ≈ scale[n]·numbers[n, k]"""

    numbers: Tensor  # [out, in] int8
    scale: Tensor  # [out] float32; 1 for an output of zeros

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weights:
        """Quantise a weight [out, in] to the nearest numbers."""
        numbers, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        for begin in range(0, len(weight), _OUTPUTS):
            rows = slice(begin, begin + _OUTPUTS)
            part = weight[rows].detach().float()
            greatest = part.abs().amax(dim=1)
            scale[rows] = torch.where(greatest > 0, greatest / GREATEST, 1.0)
            numbers[rows] = (part / scale[rows, None]).round_().clamp_(-GREATEST, GREATEST).to(torch.int8)
        return cls(numbers, scale)

    def dense(self) -> Tensor:
        """Dequantise: [out, in] float32."""
        return self.numbers.float().mul_(self.scale[:, None])


class Int8Linear(nn.Module):
    """x·Wᵀ + b by torch alone, in float32; a row's result does not depend on the other rows or their number.

    The fallback where nothing can be compiled: it uses as little memory as the compiled layer, but is slower than
    bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> None:
        """weight [out, in], bias [out], on the CPU. The weight is copied. `wide`: results are float32."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kept = Int8Weights.of(weight)
        self.bias = None if bias is None else bias.detach().float()
        self._wide = wide

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._rounded(self._matmul(x), x)

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(x·Wᵀ + b), rounded once."""
        return self._rounded(silu(self._matmul(x)), x)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return (x·Wᵀ + b)·other, rounded once."""
        return self._rounded(self._matmul(x).mul_(other), x)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return x·Wᵀ + b + other, rounded once."""
        return self._rounded(self._matmul(x).add_(other), x)

    def _rounded(self, out: Tensor, x: Tensor) -> Tensor:
        return out if self._wide else out.to(x.dtype)

    def _matmul(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] float32, in row tiles of a fixed size, which fixes the order of summation."""
        num_rows = x.numel() // self.in_features
        near = rounded(x.reshape(num_rows, self.in_features).float())
        tiles = torch.split(pad_rows(near, TILE), TILE)
        whole = torch.empty(len(tiles) * TILE, self.out_features)
        for begin in range(0, self.out_features, _OUTPUTS):
            outputs = slice(begin, begin + _OUTPUTS)
            weight, scale = self.kept.numbers[outputs].float(), self.kept.scale[outputs]
            for number, tile in enumerate(tiles):
                rows = slice(number * TILE, (number + 1) * TILE)
                torch.mul(F.linear(tile, weight), scale, out=whole[rows, outputs])
        if self.bias is not None:
            whole += self.bias
        return whole[:num_rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
