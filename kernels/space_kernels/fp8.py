"""The fp8 format e4m3: half the bytes of bfloat16 to read and to hold.

    sign  exponent  fraction        (1 + fraction/8)·2^(exponent - 7)      2^-6 .. 448
      s     eeee      fff           fraction/8·2^-6 for exponent 0         steps of 2^-9

From 2^-6 on, rounding changes a number by at most 1/16 of its size, whatever that size. So a scale only has to move the
numbers into the range: weights have one per output, a power of two, which does not round. A stored weight is then a
bfloat16 number with four significant bits, and multiplying by it is a bfloat16 matmul.

Keys and values have scale 1: a dynamic scale would make a slot's contents depend on earlier tokens, and a calibrated
one needs data. Values beyond ±448 are clamped; a model whose keys exceed that should not use an fp8 KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fn

GREATEST = 448.0

NAN = 0x7F
"""The byte that encodes NaN."""

_OUTPUTS = 1024
"""Outputs converted at a time, to bound the float32 copies in memory."""

_FRACTION = GREATEST / 2**9

_LEAST_EXPONENT = -100
"""Smallest exponent of a scale, so that every dequantised weight is a bfloat16 number."""


@dataclass(frozen=True)
class Fp8:
    """W[n, k] ≈ scale[n]·numbers[n, k]"""

    numbers: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [out] float32, powers of two

    @classmethod
    def of(cls, weight: Tensor) -> Fp8:
        """Quantise a weight [out, in] to the nearest numbers, with the smallest scales that clamp nothing."""
        numbers = torch.empty(weight.shape, dtype=FORMAT, device=weight.device)
        scale = torch.empty(len(weight), device=weight.device)
        for begin in range(0, len(weight), _OUTPUTS):
            rows = slice(begin, begin + _OUTPUTS)
            part = weight[rows].detach().float()
            greatest = part.abs().amax(dim=1)
            # greatest ≤ 448·2^e = 7/8·2^(e + 9), from the float's own exponent: greatest = fraction·2^exponent,
            # 1/2 ≤ fraction < 1. No quotient and no power: a GPU rounds both.
            fraction, exponent = torch.frexp(greatest)
            exponent = torch.where(fraction <= _FRACTION, exponent - 9, exponent - 8).clamp_(min=_LEAST_EXPONENT)
            scale[rows] = ((exponent.int() + 127) << 23).view(torch.float32)
            scale[rows] += greatest - greatest  # makes the scale NaN where a weight is not finite
            numbers[rows] = nearest(part / scale[rows, None])
        return cls(numbers, scale)

    @classmethod
    def joined(cls, parts: list[Fp8]) -> Fp8:
        """Concatenate weights along their outputs."""
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(FORMAT)
        return cls(numbers, torch.cat([part.scale for part in parts]))

    def dense(self) -> Tensor:
        """Dequantise: [out, in] float32; each value is a bfloat16 number."""
        return self.numbers.float().mul_(self.scale[:, None])


def nearest(x: Tensor) -> Tensor:
    """Round to the nearest fp8 number, ties to even; values beyond the range are clamped, NaN stays NaN."""
    return x.float().clamp(-GREATEST, GREATEST).to(FORMAT)


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] fp8, scale [out] -> [R, out]: the reference. Float32 sums, rounded once."""
    out = (x.float() @ weight.float().T) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


# -------------------------------------------------------------------------------------------------- in pages


def as_kept(pages: Tensor) -> Tensor:
    """View fp8 pages as bytes, which torch's operations and the kernels can move; return other pages unchanged."""
    return pages.view(torch.uint8) if pages.dtype is FORMAT else pages


def to_keep(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values for storing into `as_kept` pages of this dtype; values that are not finite become 0."""
    finite = new.nan_to_num(0.0, 0.0, 0.0)
    return nearest(finite).view(torch.uint8) if dtype is FORMAT else finite


def widened(kept: Tensor) -> Tensor:
    """Convert keys or values read from `as_kept` pages to float32."""
    return kept.view(FORMAT).float() if kept.dtype is torch.uint8 else kept.float()
