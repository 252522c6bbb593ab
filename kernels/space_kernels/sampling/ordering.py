"""The order of candidates: by descending value, ties by the lower id."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_WORD = 0xFFFFFFFF


def order_keys(values: Tensor) -> Tensor:
    """Return distinct int64 sort keys, larger for entries that come earlier in the order.

    values [N, V] float32 without NaN -> [N, V]. High word: the float as an integer of the same order; low word: the
    column, inverted.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    return ordered.mul_(1 << 32).add_(_LOW_WORD - columns)


def first_columns(values: Tensor, count: int) -> Tensor:
    """Return the first `count` columns of each row in order. values [N, V] float32 without NaN -> [N, count] int64"""
    keys = torch.topk(order_keys(values), count, dim=1).values
    return _LOW_WORD - (keys & _LOW_WORD)
