"""Keyed Gumbel noise in Triton: the numbers of `noise`, drawn in registers inside a kernel.

The 32 random bits of a cell equal those of `noise` exactly: integer arithmetic modulo 2^64. Noise is computed from bits
in float64 as there. A GPU's logarithm may differ from a CPU's in the last bit, so noise agrees within a few units of
2^-53, and a sampled id differs only if two sums are that close (below 1e-14: about one in 10^13). On one device the
same bits always give the same noise.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned

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
    """Approximate the noise in float32, to select the cells that need the exact noise.

    float32 cannot represent u near 1. There -log u is a series in w = 1 - u, which is computed from the bits directly.
    """
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * 0.25)))
    return -tl.log(tl.where(w < 0.015625, series, -tl.log(tl.minimum(uniform, 0.99))))


@triton.jit
def _noise(keys, positions, ids, out, M, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stream = row_stream(tl.load(keys + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < M
    bits = random_bits(stream, tl.load(ids + row * M + lanes, inside, other=0))
    if EXACT:
        tl.store(out + row * M + lanes, gumbel_of_bits(bits), inside)
    else:
        tl.store(out + row * M + lanes, nearly_gumbel(bits).to(tl.float64), inside)


@triton.jit
def _bits(keys, positions, ids, out, M, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stream = row_stream(tl.load(keys + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < M
    bits = random_bits(stream, tl.load(ids + row * M + lanes, inside, other=0))
    tl.store(out + row * M + lanes, bits.to(tl.int64), inside)


_BLOCK = 1024


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """As `noise.gumbel`. keys, positions [N], ids [N, M] int64 -> [N, M] float64"""
    return _of_cells(keys, positions, ids, exact=True)


def gumbel_nearly(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """As `gumbel`, by float32 arithmetic with an error below NEARLY."""
    return _of_cells(keys, positions, ids, exact=False)


def _of_cells(keys: Tensor, positions: Tensor, ids: Tensor, *, exact: bool) -> Tensor:
    N, M = ids.shape
    out = torch.empty(N, M, dtype=torch.float64, device=ids.device)
    grid = (N, triton.cdiv(M, _BLOCK))
    _noise[grid](keys, positions, ids.contiguous(), out, M, EXACT=exact, BLOCK=_BLOCK)
    return out


def cell_bits(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the random bits of each cell. keys, positions [N], ids [N, M] int64 -> [N, M] int64"""
    N, M = ids.shape
    out = torch.empty(N, M, dtype=torch.int64, device=ids.device)
    _bits[(N, triton.cdiv(M, _BLOCK))](keys, positions, ids.contiguous(), out, M, BLOCK=_BLOCK)
    return out


_CELLS = {"keys": "*i64", "positions": "*i64", "ids": "*i64", "M": "i32"}
TUNED = (
    Tuned(_noise, _CELLS | {"out": "*fp64"}, {"EXACT": True, "BLOCK": _BLOCK}),
    Tuned(_noise, _CELLS | {"out": "*fp64"}, {"EXACT": False, "BLOCK": _BLOCK}),
    Tuned(_bits, _CELLS | {"out": "*i64"}, {"BLOCK": _BLOCK}),
)
