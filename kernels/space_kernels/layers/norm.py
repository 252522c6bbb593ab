"""RMS norm, alone or fused with the residual sum before it: the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension: x [..., D], weight [D] -> [..., D].
    Computed in float32 and rounded to x's dtype once, at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum: x, residual [R, D] -> (normed, sum), [R, D] each.
    The sum is rounded to x's dtype, because it becomes the next residual; the rounded sum is normed."""
    total = x + residual
    return rms_norm(total, weight, eps), total
