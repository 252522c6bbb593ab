"""Small integers packed into 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The value's index, of eight, that each nibble of a word holds, lowest nibble first."""


def unpack(words: Tensor, bits: int, dim: int, count: int | None = None) -> Tensor:
    """Unpack int32 words to int32 values 0 .. 2^bits-1 along `dim` (0 or 1), 32/bits per word, lowest bits first.

    `count`: number of values along `dim` if the last word is not full.
    """
    words = words.T if dim == 0 else words
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)  # [rows, words, values of a word]
    values = values.flatten(1)[:, :count]
    return values.T if dim == 0 else values


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 [rows, words] to [rows, 8·words] values 0 .. 15, in AWQ's order."""
    values = unpack(words, 4, dim=1).view(len(words), -1, 8)
    back = torch.tensor(AWQ_ORDER).argsort()
    return values[:, :, back].flatten(1)


def halves(packed: Tensor) -> Tensor:
    """Unpack uint8 [n] to [2n] values 0 .. 15, the high half of a byte first."""
    flat = packed.flatten()
    return torch.stack([flat >> 4, flat & 15], dim=1).flatten()
