"""The one order of candidates: larger values first, and of equal values the lower id first."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_WORD = 0xFFFFFFFF


def order_keys(values: Tensor) -> Tensor:
    """An int64 per entry that is larger where the entry comes earlier; all keys of a row differ.

    values [N, V] float32 without NaN -> [N, V]. High word: the float as an integer of the same order; low word: the
    column counted down.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    return ordered.mul_(1 << 32).add_(_LOW_WORD - columns)


def first_columns(values: Tensor, count: int) -> Tensor:
    """The first `count` columns of each row in that order. values [N, V] float32 without NaN -> [N, count] int64"""
    keys = torch.topk(order_keys(values), count, dim=1).values
    return _LOW_WORD - (keys & _LOW_WORD)
