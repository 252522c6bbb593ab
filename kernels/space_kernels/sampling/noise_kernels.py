"""Keyed Gumbel noise in Triton: the numbers of `noise`, drawn in registers inside a kernel.

The 32 random bits of a cell equal those of `noise` exactly: integer arithmetic modulo 2^64. Noise is computed from bits
in float64 as there. A GPU's logarithm may differ from a CPU's in the last bit, so noise agrees within a few units of
2^-53, and a sampled id differs only if two sums are that close (below 1e-14: about one in 10^13). On one device the
same bits always give the same noise.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

NEARLY = 1e-4
"""Error bound of `nearly_gumbel` (tested; most of it comes from CUDA's approximate logarithm)."""


@triton.jit
def finalise(word):
    """Apply SplitMix64's finaliser. uint64 -> uint64"""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def row_stream(key, position):
    """Return one row's stream over token ids. int64 each -> uint64"""
    return finalise(finalise(key.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def random_bits(stream, ids):
    """Draw 32 random bits per cell. uint64, integers -> uint32"""
    return (finalise(stream + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32).to(tl.uint32)


@triton.jit
def gumbel_of_bits(bits):
    """u = (bits + ½)·2^-32, g = -log(-log u). uint32 -> float64"""
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def nearly_gumbel(bits):
    """Approximate the noise in float32, to select the cells that need the exact noise. float32 cannot represent u near
    1. There -log u is a series in w = 1 - u, which is computed from the bits directly."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * 0.25)))
    return -tl.log(tl.where(w < 0.015625, series, -tl.log(tl.minimum(uniform, 0.99))))
