"""Sampling on a GPU: `device_sampling.sample` in passes over tiles of the vocabulary, without sorting, host transfers
or a copy of the logits.

    kernel    launched if                          one program   work
    _edit     any bias or ban, or banned ids       per row       scatters sparse lists into the logits
    _temper   always                               per tile      allowed ids, penalties, ÷ temperature; the tile's peak
    _weigh    any truncation                       per tile      the tile's probability mass and a histogram
    _cut      any truncation                       per row       the thresholds of top-k, top-p and typical-p
    _loudest  any sampling                         per tile      noise for the remaining ids; the tile's best
    _winner   always                               per row       the best of the tiles

Stages that no sequence of the batch needs are not launched (`Stages`); rows that do not need a stage skip it.

**Order.** Candidates are compared as 52-bit integers: the float as an integer of the same order, then the inverted id.
All keys differ and larger comes first, so "the first n candidates" is one threshold, and so is a cut by top-k or top-p,
ties included. The threshold is found by bisection; each step sums over the candidates above it.

**Sums** are integers: a candidate's weight is exp(z - max z) in units of 2^-44 (2^-45 below 2^17 ids), rounded. Integer
sums do not depend on order, so a cut does not depend on tiles, warps or launch shapes. The reference sums float64; both
find the same cut unless a sum is within V·2^-45 of the bound (4e-9 at 128k ids).

**Few candidates.** Bisection over a whole vocabulary would read it twenty times. Nearly always a few hundred ids hold
all the relevant probability. The histogram (128 bins of ¼ below the peak) shows how far down the first `FEW` candidates
reach; these are copied out in ascending order and searched instead. If they do not suffice, which is checked, the
search reads the whole row. The result is the same.

**Noise** in float64 is expensive. A tile computes it approximately in float32 (`nearly_gumbel`), then exactly for the
ids within the error of the tile's best, usually one. Tiles whose peak is too far below the row's for any noise to
compensate draw none.

A row reads only its own logits, parameters and counts, so its result does not depend on the launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.sampling.device_sampling import IN_PROMPT, Prefixes, SamplingTensors, Stages
from space_kernels.sampling.noise import GUMBEL_MAX, GUMBEL_MIN
from space_kernels.sampling.noise_kernels import gumbel_of_bits, nearly_gumbel, random_bits, row_stream
from space_kernels.sampling.sampler import SampledTokens

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
def _edit(logits, bias_ids, biases, banned, bans, J, V, num_biases, num_banned, num_bans, BLOCK: tl.constexpr):
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


# The helpers take the candidates of a row as one tuple:
# logits, few_logits, few_ids, few_weights, row, count, is_few, peak, V


@triton.jit
def _candidates(source, first, FEW: tl.constexpr):
    """Load FEW candidates of a row from `first` on: values and ids; -inf after the last."""
    logits, few_logits, few_ids, _, row, count, is_few, _, V = source
    at = first + tl.arange(0, FEW)
    in_few, in_row = at < tl.where(is_few, count, 0), at < tl.where(is_few, 0, count)
    z = tl.load(few_logits + row * FEW + at, in_few, other=float("-inf"))
    z = tl.maximum(z, tl.load(logits + row * V + at, in_row, other=float("-inf")))
    ids = tl.where(in_few, tl.load(few_ids + row * FEW + at, in_few, other=0), at)
    return z, ids


@triton.jit
def _sums(source, least, WEIGHTS: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr):
    """Return the sum of weights (1 each without WEIGHTS) and the number of candidates of order `least` or above."""
    _, _, _, few_weights, row, count, is_few, peak, _ = source
    total = tl.zeros([FEW], tl.int64)
    number = tl.zeros([FEW], tl.int32)
    for first in range(0, count, FEW):
        z, ids = _candidates(source, first, FEW)
        counted = (_order(z, ids) >= least) & (z > float("-inf"))
        number += counted.to(tl.int32)
        if WEIGHTS:
            if is_few:
                at = first + tl.arange(0, FEW)
                weight = tl.load(few_weights + row * FEW + at, at < count, other=0)
            else:
                weight = _weight(z, peak, SCALE)
            total += tl.where(counted, weight, 0)
    found = tl.sum(number, 0)
    reached = found.to(tl.int64)
    if WEIGHTS:
        reached = tl.sum(total, 0)
    return reached, found


@triton.jit
def _search(source, least, lowest, target, WEIGHTS: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr):
    """Return the largest order >= `least` whose candidates reach the target (or an order with the same candidates).
    The candidates from `least` on must reach it, and so must those with a value of at least `lowest`."""
    _, _, _, _, _, count, _, peak, _ = source
    low = tl.maximum(least, _order(lowest, tl.full([], _ID_MASK, tl.int32)))
    high = _order(peak, tl.zeros([], tl.int32)) + 1  # above every candidate
    num_low = count
    num_high = 0
    while (high - low > 1) & (num_low - num_high > 1):
        middle = low + (high - low) // 2
        total, number = _sums(source, middle, WEIGHTS, SCALE, FEW)
        reaches = total >= target
        low = tl.where(reaches, middle, low)
        num_low = tl.where(reaches, number, num_low)
        high = tl.where(reaches, high, middle)
        num_high = tl.where(reaches, num_high, number)
    return low


@triton.jit
def _kept(z, ids, peak, cut, log_floor):
    """Return which candidates top-k, top-p and min-p keep."""
    kept = (_order(z, ids) >= cut) & (z > float("-inf"))
    return kept & (z.to(tl.float64) - peak.to(tl.float64) >= log_floor)


@triton.jit
def _typical_sums(source, cut, log_floor, centre, nearest, below_id, SCALE: tl.constexpr, FEW: tl.constexpr):
    """Return the sum of weights and number of kept candidates nearer than `nearest`, or as near with a lower id."""
    _, _, _, _, _, count, _, peak, _ = source
    total = tl.zeros([FEW], tl.int64)
    number = tl.zeros([FEW], tl.int32)
    for first in range(0, count, FEW):
        z, ids = _candidates(source, first, FEW)
        near = _nearness(z, peak, centre)
        counted = _kept(z, ids, peak, cut, log_floor) & ((near > nearest) | ((near == nearest) & (ids < below_id)))
        number += counted.to(tl.int32)
        total += tl.where(counted, _weight(z, peak, SCALE), 0)
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit(do_not_specialize=["J"])
def _cut(
    logits,
    top_ks,
    top_ps,
    log_floors,
    typical_ps,
    peaks,
    faults,
    masses,
    histograms,
    few_logits,  # [N, FEW]
    few_ids,  # [N, FEW] int32
    few_weights,  # [N, FEW] int64
    cuts,  # [N] int64: order of the last candidate that top-k and top-p keep
    centres,  # [N] float64: entropy minus the information of the peak, for typical-p
    nearests,  # [N] int64: nearness of the last typical candidate; -1: typical-p is off
    near_ids,  # [N] int32: among candidates of that nearness, lower ids than this are kept
    J,
    V,
    T,
    SCALE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // J
    peak, valid = _row_peak(peaks, faults, row, T, TILES)
    top_k = tl.load(top_ks + sequence)
    top_p = tl.load(top_ps + sequence)
    log_floor = tl.load(log_floors + sequence)
    typical_p = tl.load(typical_ps + sequence)
    by_count, by_mass, by_type = top_k < V, top_p < 1.0, typical_p < 1.0
    tl.store(cuts + row, tl.zeros([], tl.int64))
    tl.store(nearests + row, tl.full([], -1, tl.int64))
    if valid & (by_count | by_mass | by_type):
        # Count the bins below the peak that together hold at most FEW candidates.
        bins = tl.arange(0, _BINS)
        histogram = tl.zeros([_BINS], tl.int32)
        mass = tl.zeros([], tl.int64)
        for tile in range(0, T):
            histogram += tl.load(histograms + (row * T + tile) * _BINS + bins)
            mass += tl.load(masses + row * T + tile)
        fits = (tl.cumsum(histogram, 0) <= FEW) & (bins < _BINS - 1)
        num_bins = tl.sum(fits.to(tl.int32), 0)
        num_few = tl.sum(tl.where(fits, histogram, 0), 0)

        # Copy these candidates out in order of their ids.
        num_copied = tl.zeros([], tl.int32)
        few_mass = tl.zeros([], tl.int64)
        for tile in range(0, T):
            if _bin(tl.load(peaks + row * T + tile), peak) < num_bins:
                ids = tile * TILE + tl.arange(0, TILE)
                z = tl.load(logits + row * V + ids, ids < V, other=float("-inf"))
                taken = _bin(z, peak) < num_bins
                at = row * FEW + num_copied + tl.cumsum(taken.to(tl.int32), 0) - 1
                weight = _weight(z, peak, SCALE)
                tl.store(few_logits + at, z, taken)
                tl.store(few_ids + at, ids, taken)
                tl.store(few_weights + at, weight, taken)
                num_copied += tl.sum(taken.to(tl.int32), 0)
                few_mass += tl.sum(tl.where(taken, weight, 0), 0)
        tl.debug_barrier()

        # They suffice if they include the first k, or have all the weight, or the weight that top-p requires.
        has_all = few_mass == mass
        wanted = tl.math.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
        is_few = has_all | (by_mass & (few_mass >= wanted))
        if by_count:
            is_few = (num_few >= top_k) | (has_all & (by_mass | by_type))
        count = tl.where(is_few, num_few, V)
        # a value below every candidate that is copied or has weight
        lowest = peak - tl.where(is_few, num_bins * 0.25, 32.0) - 1.0 - tl.abs(peak) * 1e-6

        source = (logits, few_logits, few_ids, few_weights, row, count, is_few, peak, V)
        cut = tl.zeros([], tl.int64)
        if by_count & (num_few >= top_k):
            cut = _search(source, cut, lowest, top_k, False, SCALE, FEW)
        if by_count & (num_few < top_k):
            # If fewer than k ids are possible, all are kept.
            copied = num_few < 0  # always False: search the whole row
            whole = (logits, few_logits, few_ids, few_weights, row, V, copied, peak, V)
            _, possible = _sums(whole, cut, False, SCALE, FEW)
            if possible >= top_k:
                cut = _search(whole, cut, tl.full([], float("-inf"), tl.float32), top_k, False, SCALE, FEW)
        if by_mass:
            if by_count:
                mass, _ = _sums(source, cut, True, SCALE, FEW)
            wanted = tl.maximum(tl.math.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
            cut = _search(source, cut, lowest, wanted, True, SCALE, FEW)
        tl.store(cuts + row, cut)

        if by_type:
            # information - entropy = (peak - z) - (mean of peak - z): the normalisation cancels
            total = tl.zeros([FEW], tl.int64)
            moment = tl.zeros([FEW], tl.int64)
            number = tl.zeros([FEW], tl.int32)
            for first in range(0, count, FEW):
                z, ids = _candidates(source, first, FEW)
                kept = _kept(z, ids, peak, cut, log_floor)
                below = tl.where(kept, peak.to(tl.float64) - z.to(tl.float64), 0.0)
                total += tl.where(kept, _weight(z, peak, SCALE), 0)
                moment += tl.where(kept, (tl.exp(-below) * below * SCALE + 0.5).to(tl.int64), 0)
                number += kept.to(tl.int32)
            mass = tl.sum(total, 0)
            centre = tl.sum(moment, 0).to(tl.float64) / mass.to(tl.float64)
            wanted = tl.maximum(tl.math.ceil(typical_p * mass.to(tl.float64)).to(tl.int64), 1)
            # invariant: candidates of nearness >= `low` reach the wanted weight, those >= `high` do not
            low = tl.zeros([], tl.int64)
            high = tl.full([], _NEAREST, tl.int64)
            num_low = tl.sum(number, 0)
            num_high = 0
            while (high - low > 1) & (num_low - num_high > 1):
                middle = low + (high - low) // 2
                reached, found = _typical_sums(source, cut, log_floor, centre, middle, _NO_WINNER, SCALE, FEW)
                reaches = reached >= wanted
                low = tl.where(reaches, middle, low)
                num_low = tl.where(reaches, found, num_low)
                high = tl.where(reaches, high, middle)
                num_high = tl.where(reaches, num_high, found)
            below_id = tl.full([], _NO_WINNER, tl.int32)
            if num_low - num_high > 1:  # several are equally near: keep the lower ids
                last = tl.zeros([], tl.int32)
                bit = tl.full([], (_ID_MASK + 1) // 2, tl.int32)
                while bit > 0:
                    above = last + bit
                    bit = bit // 2
                    reached, _ = _typical_sums(source, cut, log_floor, centre, low, above, SCALE, FEW)
                    last = tl.where(reached < wanted, above, last)
                below_id = last + 1
            tl.store(centres + row, centre)
            tl.store(nearests + row, low)
            tl.store(near_ids + row, below_id)


MAX_VOCAB = 1 << 20
"""Largest supported vocabulary: the sort keys have 20 bits for the id."""


@dataclass(frozen=True, slots=True)
class LogitsShape:
    """How the passes divide the vocabulary. The sampled ids do not depend on it."""

    tile: int  # ids per program
    few: int  # candidates copied out for the search of a cut
    num_warps: int

    @classmethod
    def of(cls, vocab_size: int) -> LogitsShape:
        """Choose by vocabulary size. Raises ValueError beyond MAX_VOCAB.

        Tiles are large enough that a row's peaks fit a warp's registers, and small enough that 11 rows fill a GPU: 32
        to 64 tiles for 128k to 256k ids, 16 to 32 values per thread.
        """
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"A vocabulary of {vocab_size} ids is too large; at most {MAX_VOCAB} are ordered.")
        if vocab_size >= 1 << 15:
            return cls(4096, 2048, 8)
        return cls(1024, 1024, 4)


def scale(vocab_size: int) -> float:
    """Return the integer weight of the largest logit, such that sums stay below 2^62."""
    return float(1 << (62 - max(17, (vocab_size - 1).bit_length())))


def sample(
    logits: Tensor,
    batch_params: SamplingTensors,
    stages: Stages,
    prefixes: Prefixes,
    banned_ids: Tensor,
    counts: Tensor | None = None,
    *,
    shape: LogitsShape | None = None,
) -> SampledTokens:
    """As `device_sampling.sample`, in place on contiguous logits [S, J, V] float32.
    `shape`: tile sizes; None: chosen by the size of the vocabulary."""
    S, J, V = logits.shape
    shape = shape or LogitsShape.of(V)
    N, T = S * J, triton.cdiv(V, shape.tile)
    TILES = triton.next_power_of_2(T)
    device = logits.device

    def empty(*of: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*of, dtype=dtype, device=device)

    chosen, valid = empty(S, J, dtype=torch.int64), empty(S, J, dtype=torch.bool)
    if not N:
        return SampledTokens(chosen, valid)
    warps = {"num_warps": shape.num_warps}
    peaks, peak_ids, faults = (empty(N, T, dtype=kind) for kind in (torch.float32, torch.int32, torch.int32))
    row_peaks = peaks, peak_ids, faults
    _edit_and_temper(logits, batch_params, stages, prefixes, banned_ids, counts, batch_params.divisor, row_peaks, shape)
    cuts, nearests = empty(N, dtype=torch.int64), empty(N, dtype=torch.int64)
    centres, near_ids = empty(N, dtype=torch.float64), empty(N, dtype=torch.int32)
    greedy = batch_params.greedy.view(torch.uint8)
    if stages.cuts:
        masses, histograms = empty(N, T, dtype=torch.int64), empty(N, T, _BINS.value, dtype=torch.int32)
        _weigh[(N, T)](
            logits,
            batch_params.top_k,
            batch_params.top_p,
            batch_params.typical_p,
            peaks,
            faults,
            masses,
            histograms,
            J,
            V,
            T,
            SCALE=scale(V),
            TILES=TILES,
            TILE=shape.tile,
            **warps,
        )
        few_logits, few_ids = empty(N, shape.few, dtype=torch.float32), empty(N, shape.few, dtype=torch.int32)
        _cut[(N,)](
            logits,
            batch_params.top_k,
            batch_params.top_p,
            batch_params.log_min_p,
            batch_params.typical_p,
            peaks,
            faults,
            masses,
            histograms,
            few_logits,
            few_ids,
            empty(N, shape.few, dtype=torch.int64),
            cuts,
            centres,
            nearests,
            near_ids,
            J,
            V,
            T,
            SCALE=scale(V),
            TILES=TILES,
            TILE=shape.tile,
            FEW=shape.few,
            **warps,
        )
    scores, winners = empty(N, T, dtype=torch.float64), empty(N, T, dtype=torch.int32)
    if stages.samples:
        _loudest[(N, T)](
            logits,
            batch_params.key,
            greedy,
            batch_params.log_min_p,
            prefixes.positions,
            peaks,
            faults,
            cuts,
            centres,
            nearests,
            near_ids,
            scores,
            winners,
            J,
            V,
            T,
            CUTS=stages.cuts,
            FLOORS=stages.floors,
            TILES=TILES,
            TILE=shape.tile,
            **warps,
        )
    _winner[(N,)](
        greedy,
        peaks,
        peak_ids,
        faults,
        scores,
        winners,
        chosen,
        valid.view(torch.uint8),
        J,
        V,
        T,
        SAMPLES=stages.samples,
        TILES=TILES,
        num_warps=1,
    )
    return SampledTokens(chosen, valid)


def edit(
    logits: Tensor,
    batch_params: SamplingTensors,
    stages: Stages,
    prefixes: Prefixes,
    banned_ids: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """As `device_sampling.edit`, in place."""
    S, J, V = logits.shape
    shape = LogitsShape.of(V)
    T = triton.cdiv(V, shape.tile)
    peaks = tuple(
        torch.empty(S * J, T, dtype=kind, device=logits.device) for kind in (torch.float32, torch.int32, torch.int32)
    )
    neutral = torch.ones_like(batch_params.divisor)
    _edit_and_temper(logits, batch_params, stages, prefixes, banned_ids, counts, neutral, peaks, shape)
    return logits


def _edit_and_temper(
    logits: Tensor,
    batch_params: SamplingTensors,
    stages: Stages,
    prefixes: Prefixes,
    banned_ids: Tensor,
    counts: Tensor | None,
    divisor: Tensor,
    peaks: tuple[Tensor, ...],
    shape: LogitsShape,
) -> None:
    """Run the first two passes; writes peaks: each tile's greatest value, its id, and whether it has NaN or +inf."""
    S, J, V = logits.shape
    N, T = S * J, triton.cdiv(V, shape.tile)
    if not logits.is_contiguous() or logits.dtype != torch.float32:
        raise ValueError(f"Logits must be contiguous float32; got {logits.dtype}, strides {logits.stride()}.")
    if stages.penalises and counts is None:
        raise ValueError("Penalties need `counts`.")
    if not N:
        return
    if stages.edits or len(banned_ids):
        bans = prefixes.bans.contiguous() if stages.edits and prefixes.bans is not None else None
        num_biases = batch_params.bias_ids.shape[1] if stages.edits else 0
        _edit[(N,)](
            logits,
            batch_params.bias_ids,
            batch_params.bias,
            banned_ids,
            bans if bans is not None else banned_ids,
            J,
            V,
            num_biases,
            len(banned_ids),
            bans.shape[2] if bans is not None else 0,
            BLOCK=_LIST_BLOCK,
            num_warps=1,
        )
    _temper[(N, T)](
        logits,
        batch_params.allowed,
        counts if counts is not None and stages.penalises else logits,
        prefixes.tails,
        prefixes.num_tail.contiguous(),
        batch_params.repetition,
        batch_params.presence,
        batch_params.frequency,
        divisor,
        *peaks,
        J,
        V,
        T,
        batch_params.allowed.shape[1],
        prefixes.tails.stride(0),
        BOUNDS=stages.bounds,
        PENALISES=stages.penalises,
        TILE=shape.tile,
        enable_fp_fusion=False,  # round product and difference separately, as the reference does
        num_warps=shape.num_warps,
    )


_LIST_BLOCK = 64


_TYPES = {
    "logits biases repetition presence frequency divisor peaks few_logits": "*fp32",
    "top_ps typical_ps log_floors scores centres": "*fp64",
    "bias_ids banned bans tails num_tail top_ks keys positions masses cuts nearests few_weights chosen": "*i64",
    "allowed counts peak_ids faults histograms few_ids winners near_ids": "*i32",
    "greedy valids": "*u8",
    "J V T num_biases num_banned num_bans num_words tail_stride": "i32",
}


def _tuned(vocab_size: int) -> list[Tuned]:
    shape = LogitsShape.of(vocab_size)
    tiles = {"TILES": triton.next_power_of_2(triton.cdiv(vocab_size, shape.tile))}
    tile = tiles | {"TILE": shape.tile}
    weighed = tile | {"SCALE": scale(vocab_size)}
    both = ((False, False), (True, True))
    tempered = [{"BOUNDS": bounds, "PENALISES": penalises, "TILE": shape.tile} for bounds, penalises in both]
    loudest = [{"CUTS": cuts, "FLOORS": floors, **tile} for cuts, floors in both]
    return [
        *(Tuned.of(_temper, _TYPES, constants, shape.num_warps) for constants in tempered),
        Tuned.of(_weigh, _TYPES, weighed, shape.num_warps),
        Tuned.of(_cut, _TYPES, weighed | {"FEW": shape.few}, shape.num_warps),
        *(Tuned.of(_loudest, _TYPES, constants, shape.num_warps) for constants in loudest),
        Tuned.of(_winner, _TYPES, tiles | {"SAMPLES": True}, 1),
    ]


TUNED = (Tuned.of(_edit, _TYPES, {"BLOCK": _LIST_BLOCK}, 1), *_tuned(32_000), *_tuned(256_000))
