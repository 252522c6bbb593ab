"""Products by integers in numpy, as the linears in groups define them: what the kernels must equal bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


WIDTH = 384


@dataclass(frozen=True)
class PackedCase:
    """A weight as a quantised checkpoint packs it."""

    layout: Enum
    group_size: int | None = 32
    acts: bool = False  # act-order
    width: int = WIDTH

    def __str__(self) -> str:
        return f"{self.layout.value}, {self.group_size or 'one group'}{', act-order' * self.acts}, {self.width}"


def draw_rows(width: int, count: int = 70) -> Tensor:
    """[count, width] bfloat16; rows 40 to 59 are of very different sizes"""
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(1))
    x[40:60] *= torch.logspace(-30, 30, 20)[:, None]
    return x[:count].bfloat16()


def rounded_groups(rows: Array) -> tuple[Array, Array]:
    """Round inputs [R, in] float32, 32 at a time: codes [R, groups, 32] int64 and their scales [R, groups] float32."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32))).reshape(len(rows), -1, 32)
    most = np.abs(padded).max(axis=2)
    is_some = most > np.float32(2.0**-100)
    inverse = np.where(is_some, np.float32(127) / np.where(is_some, most, np.float32(1)), np.float32(0))
    scale = np.where(is_some, most * (np.float32(1) / np.float32(127)), np.float32(0)).astype(np.float32)
    return np.rint(padded * inverse[:, :, None]).astype(np.int64), scale


def fused(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of float32 numbers, rounded once: the float64 sum is rounded to odd first, so that rounding it again is
    right."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    whole = product + addend
    part = whole - product
    error = (product - (whole - part)) + (addend - part)
    is_even = whole.view(np.int64) % 2 == 0
    whole = np.where((error != 0) & is_even, np.nextafter(whole, np.where(error > 0, np.inf, -np.inf)), whole)
    found: Array = whole.astype(np.float32)
    return found
