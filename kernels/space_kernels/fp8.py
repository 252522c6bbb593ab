"""Numbers of eight bits with a floating point (e4m3): half the bytes of bfloat16 to read and to hold.

    sign  exponent  fraction        (1 + fraction/8)·2^(exponent - 7)      2^-6 .. 448
      s     eeee      fff           fraction/8·2^-6 for exponent 0         steps of 2^-9

The nearest number is off by at most 1/16 of what it stands for, from 2^-6 on, at every size alike. So a scale does
nothing but move the range to where the numbers are: one for each output of a weight, a power of two, which rounds
nothing itself. What is kept is then a bfloat16 number of four digits, and a product with it is a bfloat16 product.

Keys and values have the scale 1: one that follows the numbers would change what a slot holds with who came before, and
one from calibration needs texts. What is beyond 448 becomes 448; a model with keys beyond it should not be held so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fn

GREATEST = 448.0

NAN = 0x7F
"""The byte of what is no number."""

_OUTPUTS = 1024
"""Outputs whose weights are in memory as float32 at the same time."""

_FRACTION = GREATEST / 2**9

_LEAST_EXPONENT = -100
"""Of a scale: numbers kept are then bfloat16 numbers without exception."""


@dataclass(frozen=True)
class Fp8:
    """W[n, k] ≈ scale[n]·numbers[n, k]"""

    numbers: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [out] float32, powers of two

    @classmethod
    def of(cls, weight: Tensor) -> Fp8:
        """The nearest to a weight [out, in], with the least scale that nothing is cut off by."""
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
            scale[rows] += greatest - greatest  # of what is not finite: NaN
            numbers[rows] = nearest(part / scale[rows, None])
        return cls(numbers, scale)

    @classmethod
    def joined(cls, parts: list[Fp8]) -> Fp8:
        """One weight below the other."""
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(FORMAT)
        return cls(numbers, torch.cat([part.scale for part in parts]))

    def dense(self) -> Tensor:
        """[out, in] float32; each is a bfloat16 number."""
        return self.numbers.float().mul_(self.scale[:, None])


def nearest(x: Tensor) -> Tensor:
    """The nearest number to each (of two, the even one); what is beyond the greatest becomes it, NaN stays."""
    return x.float().clamp(-GREATEST, GREATEST).to(FORMAT)


def float8_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] float8, scale [out] -> [R, out]: the definition. Float32 sums, rounded once."""
    product = (x.float() @ weight.float().T) * scale
    return (product if bias is None else product + bias.float()).to(x.dtype)


# -------------------------------------------------------------------------------------------------- in pages


def as_kept(pages: Tensor) -> Tensor:
    """Pages as what torch's operations and kernels move about: bytes, where they are of eight bits; else themselves."""
    return pages.view(torch.uint8) if pages.dtype is FORMAT else pages


def to_keep(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as pages of the dtype keep them, to be put into `as_kept`: what is not finite counts as 0."""
    finite = new.nan_to_num(0.0, 0.0, 0.0)
    return nearest(finite).view(torch.uint8) if dtype is FORMAT else finite


def widened(kept: Tensor) -> Tensor:
    """What was read from `as_kept`, in float32."""
    return kept.view(FORMAT).float() if kept.dtype is torch.uint8 else kept.float()
