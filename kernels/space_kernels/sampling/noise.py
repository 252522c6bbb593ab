"""Gumbel noise as a function of (request key, absolute position, token id), and of nothing else.

The counter-based generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the n-th output of a stream of seed z is
finalise(z + (n+1)·GOLDEN). A request's key seeds a stream over positions, and each output of that one seeds a stream
over token ids, so that any cell is found without its neighbours: on any device, in any batch, after any restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

GUMBEL_MAX = 22.873856959
"""No noise exceeds -log(-log(1 - 2^-33)), rounded up."""
GUMBEL_MIN = -3.129994641
"""No noise is below -log(-log(2^-33)), rounded down."""


def _signed(word: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    word %= _WORD
    return word - _WORD if word >> 63 else word


_GOLDEN_SIGNED, _MIX_1_SIGNED, _MIX_2_SIGNED = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)


def request_key(seed: int, choice: int) -> int:
    """The key of one choice of a request, as an int64. Choice 0 has the plain seed, 0 <= seed < 2^64."""
    if not 0 <= seed < _WORD or choice < 0:
        raise ValueError(f"A seed lies in 0 .. 2^64-1 and a choice is 0 or more; got seed={seed}, choice={choice}.")
    if choice == 0:
        return _signed(seed)
    word = (seed + choice * _GOLDEN) % _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) % _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) % _WORD
    return _signed(word ^ (word >> 31))


def _fold(word: Tensor, shift: int) -> Tensor:
    """word ^= word >>> shift, in place. int64 has no logical shift: the sign's copies are masked away."""
    shifted = word >> shift
    shifted &= (1 << (64 - shift)) - 1
    word ^= shifted
    return word


def finalise(word: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 words, in place: a bijection; every bit depends on every bit."""
    _fold(word, 30).mul_(_MIX_1_SIGNED)
    _fold(word, 27).mul_(_MIX_2_SIGNED)
    return _fold(word, 31)


def row_streams(keys: Tensor, positions: Tensor) -> Tensor:
    """The stream over token ids that belongs to each row. keys, positions [N] int64 -> [N] int64"""
    return finalise(finalise(keys.clone()) + (positions + 1) * _GOLDEN_SIGNED)


def random_bits(streams: Tensor, ids: Tensor) -> Tensor:
    """32 random bits per cell, as int64 in 0 .. 2^32-1. `streams` (from `row_streams`) and `ids` broadcast."""
    cell = finalise(streams + (ids + 1) * _GOLDEN_SIGNED)
    cell >>= 32
    cell &= 0xFFFFFFFF
    return cell


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """u = (bits + ½)·2^-32, g = -log(-log u), in float64."""
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each cell.

    keys [N] int64, positions [N] int64 (absolute index of the token being chosen), ids [N, M] int64 -> [N, M] float64.
    All of it in float64: neighbouring cells of 32 bits stay apart, so a maximum over logit + noise is free of ties and
    the last bit of a logarithm, which may differ between vector and scalar code, decides nothing.
    """
    return gumbel_of_bits(random_bits(row_streams(keys, positions)[:, None], ids))
