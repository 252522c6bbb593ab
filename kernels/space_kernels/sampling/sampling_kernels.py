"""Triton kernels of sampling that edit logits, sum weights and draw noise; see `sampling_triton`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from space_kernels.sampling.noise import GUMBEL_MAX, GUMBEL_MIN
from space_kernels.sampling.noise_kernels import gumbel_of_bits, nearly_gumbel, random_bits, row_stream
from space_kernels.sampling.sampling_tensors import IN_PROMPT

_BINS: tl.constexpr = tl.constexpr(128)
_ID_BITS: tl.constexpr = tl.constexpr(20)
_ID_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)
_NO_WINNER: tl.constexpr = tl.constexpr((1 << 31) - 1)
_IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT)
_REACH: tl.constexpr = tl.constexpr(GUMBEL_MAX - GUMBEL_MIN + 0.01)
_NEAREST: tl.constexpr = tl.constexpr((1 << 63) - 1)


@triton.jit
def _order(z, ids):
    """Return an int64 sort key, larger for candidates that come earlier. z float32, ids int"""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0.0: minus zero equals zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return (ordered << _ID_BITS) + (_ID_MASK - ids.to(tl.int64))


@triton.jit
def _weight(z, peak, SCALE: tl.constexpr):
    """exp(z - peak) in units of 1 / SCALE. float32 -> int64"""
    return (tl.exp(z.to(tl.float64) - peak.to(tl.float64)) * SCALE + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=["J"])
def _edit(
    logits,
    bias_ids,
    biases,
    banned,
    bans,
    J,
    V,
    num_biases,
    num_banned,
    num_bans,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // J
    of_row = logits + row * V
    lanes = tl.arange(0, BLOCK)
    for first in range(0, num_biases, BLOCK):
        at = first + lanes
        ids = tl.load(bias_ids + sequence * num_biases + at, at < num_biases, other=-1)
        z = tl.load(of_row + ids, ids >= 0, other=0.0)
        tl.store(of_row + ids, z + tl.load(biases + sequence * num_biases + at, at < num_biases, other=0.0), ids >= 0)
    tl.debug_barrier()  # bans are applied after biases
    for first in range(0, num_banned, BLOCK):
        at = first + lanes
        ids = tl.load(banned + at, at < num_banned, other=-1)
        tl.store(of_row + ids, tl.full([BLOCK], float("-inf"), tl.float32), ids >= 0)
    for first in range(0, num_bans, BLOCK):
        at = first + lanes
        ids = tl.load(bans + row * num_bans + at, at < num_bans, other=-1)
        tl.store(of_row + ids, tl.full([BLOCK], float("-inf"), tl.float32), ids >= 0)


@triton.jit(do_not_specialize=["J", "num_tail", "tail_stride"])
def _temper(
    logits,
    allowed,
    counts,
    tails,
    num_tail,
    repetition,
    presence,
    frequency,
    divisor,
    peaks,  # [N, T] float32
    peak_ids,  # [N, T] int32
    faults,  # [N, T] int32: 1 where a value is NaN or +inf
    J,
    V,
    T,
    num_words,
    tail_stride,
    BOUNDS: tl.constexpr,
    PENALISES: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // J
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < V
    z = tl.load(logits + row * V + ids, inside, other=float("-inf"))
    if BOUNDS:
        word = tl.load(allowed + sequence * num_words + ids // 32, inside, other=0)
        z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
    if PENALISES:
        count = tl.load(counts + sequence * V + ids, inside, other=0)
        output = count & (_IN_PROMPT - 1)
        for place in range(0, tl.load(num_tail + row).to(tl.int32)):
            output += (ids == tl.load(tails + sequence * tail_stride + place)).to(tl.int32)
        seen = (output > 0) | (count >= _IN_PROMPT)
        factor = tl.load(repetition + sequence)
        factors = tl.zeros([TILE], tl.float32) + factor
        z = tl.where(seen, tl.where(z > 0, tl.math.div_rn(z, factors), z * factor), z)
        z = z - tl.load(presence + sequence) * (output > 0).to(tl.float32)
        z = z - tl.load(frequency + sequence) * output.to(tl.float32)
    z = tl.math.div_rn(z, tl.zeros([TILE], tl.float32) + tl.load(divisor + sequence))
    tl.store(logits + row * V + ids, z, inside)
    peak = tl.max(tl.where(z == z, z, float("-inf")), 0)
    fault = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    tl.store(peaks + row * T + tile, peak)
    tl.store(peak_ids + row * T + tile, tl.min(tl.where((z == peak) & inside, ids, _NO_WINNER), 0))
    tl.store(faults + row * T + tile, fault)


@triton.jit
def _row_peak(peaks, faults, row, T, TILES: tl.constexpr):
    """Return the row's largest value, and whether any id can be sampled."""
    lanes = tl.arange(0, TILES)
    peak = tl.max(tl.load(peaks + row * T + lanes, lanes < T, other=float("-inf")), 0)
    fault = tl.max(tl.load(faults + row * T + lanes, lanes < T, other=0), 0)
    return peak, (fault == 0) & (peak > float("-inf"))


@triton.jit
def _bin(z, peak):
    """Return the histogram bin of z: quarters below the peak; the last bin holds the rest."""
    return tl.minimum((peak - z) * 4.0, _BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["J"])
def _weigh(
    logits,
    top_ks,
    top_ps,
    typical_ps,
    peaks,
    faults,
    masses,  # [N, T] int64
    histograms,  # [N, T, _BINS] int32
    J,
    V,
    T,
    SCALE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // J
    peak, valid = _row_peak(peaks, faults, row, T, TILES)
    cuts = tl.load(top_ks + sequence) < V
    cuts = cuts | (tl.load(top_ps + sequence) < 1.0) | (tl.load(typical_ps + sequence) < 1.0)
    if valid & cuts:
        ids = tile * TILE + tl.arange(0, TILE)
        z = tl.load(logits + row * V + ids, ids < V, other=float("-inf"))
        tl.store(masses + row * T + tile, tl.sum(_weight(z, peak, SCALE), 0))
        histogram = tl.histogram(_bin(z, peak), _BINS)
        bins = tl.arange(0, _BINS)
        tl.store(histograms + (row * T + tile) * _BINS + bins, histogram)


@triton.jit
def _nearness(z, peak, centre):
    """Return an int64 below _NEAREST, larger the closer a candidate's information is to the entropy."""
    distance = tl.abs(peak.to(tl.float64) - z.to(tl.float64) - centre)
    return _NEAREST - 1 - distance.to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["J"])
def _loudest(
    logits,
    keys,
    greedy,
    log_floors,
    positions,
    peaks,
    faults,
    cuts,
    centres,
    nearests,
    near_ids,
    scores,  # [N, T] float64
    winners,  # [N, T] int32
    J,
    V,
    T,
    CUTS: tl.constexpr,
    FLOORS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // J
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], _NO_WINNER, tl.int32)
    peak, valid = _row_peak(peaks, faults, row, T, TILES)
    tile_peak = tl.load(peaks + row * T + tile)
    if valid & (tl.load(greedy + sequence) == 0) & (tile_peak >= peak - _REACH):
        ids = tile * TILE + tl.arange(0, TILE)
        z = tl.load(logits + row * V + ids, ids < V, other=float("-inf"))
        left = z > float("-inf")
        if CUTS:
            left = left & (_order(z, ids) >= tl.load(cuts + row))
        if FLOORS:
            left = left & (z.to(tl.float64) - peak.to(tl.float64) >= tl.load(log_floors + sequence))
        if CUTS:
            nearest = tl.load(nearests + row)
            if nearest >= 0:
                near = _nearness(z, peak, tl.load(centres + row))
                left = left & ((near > nearest) | ((near == nearest) & (ids < tl.load(near_ids + row))))
        stream = row_stream(tl.load(keys + sequence).to(tl.int64), tl.load(positions + sequence).to(tl.int64) + row % J)
        bits = random_bits(stream, ids)
        nearly = tl.where(left, z + nearly_gumbel(bits), float("-inf"))
        loudest = tl.max(nearly, 0)
        if loudest > float("-inf"):
            # the margin covers two errors of nearly_gumbel and of float32 sums
            close = left & (nearly >= loudest - (3e-4 + tl.abs(loudest) * 5e-7))
            if tl.sum(close.to(tl.int32), 0) == 1:
                winner = tl.max(tl.where(close, ids, 0), 0)
                alone = tl.max(tl.where(close, z, float("-inf")), 0)
                best = alone.to(tl.float64) + gumbel_of_bits(random_bits(stream, winner))
            else:
                score = tl.where(close, z.to(tl.float64) + gumbel_of_bits(bits), float("-inf"))
                best = tl.max(score, 0)
                winner = tl.min(tl.where(close & (score == best), ids, _NO_WINNER), 0)
    tl.store(scores + row * T + tile, best)
    tl.store(winners + row * T + tile, winner)


@triton.jit(do_not_specialize=["J"])
def _winner(
    greedy,
    peaks,
    peak_ids,
    faults,
    scores,
    winners,
    chosen,  # [N] int64
    valids,  # [N] bool
    J,
    V,
    T,
    SAMPLES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    inside = lanes < T
    peak, valid = _row_peak(peaks, faults, row, T, TILES)
    of_tile = tl.load(peaks + row * T + lanes, inside, other=float("-inf"))
    ids = tl.load(peak_ids + row * T + lanes, inside, other=_NO_WINNER)
    winner = tl.min(tl.where(of_tile == peak, ids, _NO_WINNER), 0)
    if SAMPLES:  # noqa: SIM102
        if tl.load(greedy + row // J) == 0:
            score = tl.load(scores + row * T + lanes, inside, other=float("-inf"))
            ids = tl.load(winners + row * T + lanes, inside, other=_NO_WINNER)
            winner = tl.min(tl.where(score == tl.max(score, 0), ids, _NO_WINNER), 0)
    tl.store(chosen + row, tl.where(valid & (winner < V), winner, 0).to(tl.int64))
    tl.store(valids + row, valid.to(tl.int8))
