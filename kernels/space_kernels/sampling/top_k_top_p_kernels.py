"""Triton kernel that finds the cuts of top-k, top-p and typical-p by bisection; see `sampling_triton`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from space_kernels.sampling.sampling_kernels import (
    _BINS,
    _ID_MASK,
    _NEAREST,
    _NO_WINNER,
    _bin,
    _nearness,
    _order,
    _row_peak,
    _weight,
)

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

    The candidates from `least` on must reach it, and so must those with a value of at least `lowest`.
    """
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
