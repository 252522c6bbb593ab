"""Gumbel noise as a function of (request key, absolute position, token id) alone.

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a counter: the n-th output of a stream with seed z
is finalise(z + (n+1)·GOLDEN). A request's key seeds a stream over positions, each output of which seeds a stream over
token ids. So any cell can be computed without its neighbours: on any device, in any batch, after any restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

GUMBEL_MAX = 22.873856959
"""Upper bound of the noise: -log(-log(1 - 2^-33)), rounded up."""
GUMBEL_MIN = -3.129994641
"""Lower bound of the noise: -log(-log(2^-33)), rounded down."""


def _signed(word: int) -> int:
    """Reinterpret 64 bits as an int64."""
    word %= _WORD
    return word - _WORD if word >> 63 else word


_GOLDEN_SIGNED, _MIX_1_SIGNED, _MIX_2_SIGNED = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)


def request_key(seed: int, choice: int) -> int:
    """Return the int64 key of one choice (`n`) of a request; that of choice 0 is the seed itself.
    Raises ValueError unless 0 <= seed < 2^64 and choice >= 0."""
    if not 0 <= seed < _WORD or choice < 0:
        raise ValueError(f"A seed lies in 0 .. 2^64-1 and a choice is 0 or more; got seed={seed}, choice={choice}.")
    if choice == 0:
        return _signed(seed)
    word = (seed + choice * _GOLDEN) % _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) % _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) % _WORD
    return _signed(word ^ (word >> 31))


def _fold(word: Tensor, shift: int) -> Tensor:
    """Compute word ^= word >>> shift in place. int64 has no logical shift, so the copied sign bits are masked out."""
    shifted = word >> shift
    shifted &= (1 << (64 - shift)) - 1
    word ^= shifted
    return word


def finalise(word: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser, a bijection, to int64 words in place."""
    _fold(word, 30).mul_(_MIX_1_SIGNED)
    _fold(word, 27).mul_(_MIX_2_SIGNED)
    return _fold(word, 31)


def row_streams(keys: Tensor, positions: Tensor) -> Tensor:
    """Return each row's stream over token ids. keys, positions [N] int64 -> [N] int64"""
    return finalise(finalise(keys.clone()) + (positions + 1) * _GOLDEN_SIGNED)


def random_bits(streams: Tensor, ids: Tensor) -> Tensor:
    """Draw 32 random bits per cell, as int64 in 0 .. 2^32-1. `streams` (from `row_streams`) and `ids` broadcast."""
    cell = finalise(streams + (ids + 1) * _GOLDEN_SIGNED)
    cell >>= 32
    cell &= 0xFFFFFFFF
    return cell


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """Convert bits to noise in float64: u = (bits + ½)·2^-32, g = -log(-log u)."""
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the standard Gumbel noise of each cell.

    keys [N] int64, positions [N] int64 (absolute position of the sampled token), ids [N, M] int64 -> [N, M] float64.
    float64 keeps neighbouring 32-bit values distinct, so logit + noise has no ties, and the last bit of a logarithm,
    which may differ between vector and scalar code, does not change the result.
    """
    return gumbel_of_bits(random_bits(row_streams(keys, positions)[:, None], ids))
