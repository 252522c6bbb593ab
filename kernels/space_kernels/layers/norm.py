"""Root-mean-square norm of rows, alone or behind the sum that a decoder layer ends with: the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: x [..., D], weight [D] -> [..., D].

    In float32, rounded to x's dtype once, at the end.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the sum: x, residual [R, D] -> (normed, sum), [R, D] each.

    The sum is rounded to x's dtype, as it goes on as the residual; what is normed is the rounded sum.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
