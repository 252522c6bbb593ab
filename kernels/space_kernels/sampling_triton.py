"""Choosing on a GPU: `choose.choose` in passes over tiles of the vocabulary. No sort, no transfer, no second copy.

    _edit     (somebody has biases, bans; or ids nobody may choose)   a row      sparse lists into the logits
    _temper                                                           a tile     allowed ids, penalties, ÷ temperature;
                                                                                 each tile's peak and who has it
    _weigh    (somebody truncates)                                    a tile     its probability, and a histogram
    _cut      (somebody truncates)                                    a row      where top-k, top-p, typical-p cut
    _loudest  (somebody samples)                                      a tile     noise for those who are left; the best
    _winner                                                           a row      the best of the tiles

A stage that no law of the batch needs is not launched (`Stages`); rows that do not need one leave it at once.

**Order.** Candidates are compared as integers of 52 bits: the float as an integer of the same order, then the id
counted down. They are all different, larger is earlier, and a set "the first n candidates" is one threshold. So is a
cut by top-k or top-p, ties and all: it is found by bisection, each step of which sums over candidates on one side.

**Sums** are of integers: a candidate's weight is exp(z - max z) in units of 2^-44 (2^-45 for less than 2^17 ids),
rounded. Integers add up to the same in any order, so a cut does not depend on tiles, warps or launch shapes. The
reference sums float64; both find the same cut unless the sums come within V·2^-45 of the bound (4e-9 at 128k ids).

**Few candidates.** Bisection over a whole vocabulary reads it twenty times. Nearly always a few hundred ids hold all
the probability in question; the histogram (128 bins of ¼ below the peak) says how far down the first `FEW` reach, these
are copied out, ascending, and searched instead. Where they do not suffice, which is checked and not assumed, the search
reads the row. The result is the same.

**Noise** is float64 and dear, so a tile draws it nearly, in float32 (`nearly_gumbel`), and exactly for whoever comes
within the error of its best: one id, as a rule. Tiles whose peak is so far below the row's that no noise can make up
for it draw none.

A row reads its own logits, law and counts, and nothing of another row: what it chooses does not depend on the launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.law_tensors import IN_PROMPT, LawTensors, Stages
from space_kernels.noise import GUMBEL_MAX, GUMBEL_MIN
from space_kernels.noise_triton import gumbel_of_bits, nearly_gumbel, random_bits, row_stream
from space_kernels.sampling import Choice
from space_kernels.tuned import Tuned

_BINS: tl.constexpr = tl.constexpr(128)
_ID_BITS: tl.constexpr = tl.constexpr(20)
_ID_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)
_NOBODY: tl.constexpr = tl.constexpr((1 << 31) - 1)
_IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT)
_REACH: tl.constexpr = tl.constexpr(GUMBEL_MAX - GUMBEL_MIN + 0.01)
_NEAREST: tl.constexpr = tl.constexpr((1 << 63) - 1)

MAX_VOCAB = 1 << 20
"""Ids that the order of candidates has bits for."""


@triton.jit
def _order(z, ids):
    """int64 that is larger where a candidate comes earlier. z float32, ids int"""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0.0: minus zero equals zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return (ordered << _ID_BITS) + (_ID_MASK - ids.to(tl.int64))


@triton.jit
def _weight(z, peak, SCALE: tl.constexpr):
    """exp(z - peak) in units of 1 / SCALE. float32 -> int64"""
    return (tl.exp(z.to(tl.float64) - peak.to(tl.float64)) * SCALE + 0.5).to(tl.int64)


@triton.jit
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
    tl.debug_barrier()  # a ban outdoes a bias
    for first in range(0, num_banned, BLOCK):
        at = first + lanes
        ids = tl.load(banned + at, at < num_banned, other=-1)
        tl.store(of_row + ids, tl.full([BLOCK], float("-inf"), tl.float32), ids >= 0)
    for first in range(0, num_bans, BLOCK):
        at = first + lanes
        ids = tl.load(bans + row * num_bans + at, at < num_bans, other=-1)
        tl.store(of_row + ids, tl.full([BLOCK], float("-inf"), tl.float32), ids >= 0)


@triton.jit
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
    tl.store(peak_ids + row * T + tile, tl.min(tl.where((z == peak) & inside, ids, _NOBODY), 0))
    tl.store(faults + row * T + tile, fault)


@triton.jit
def _row_peak(peaks, faults, row, T, TILES: tl.constexpr):
    """The row's largest value, and whether anything can be chosen."""
    lanes = tl.arange(0, TILES)
    peak = tl.max(tl.load(peaks + row * T + lanes, lanes < T, other=float("-inf")), 0)
    fault = tl.max(tl.load(faults + row * T + lanes, lanes < T, other=0), 0)
    return peak, (fault == 0) & (peak > float("-inf"))


@triton.jit
def _bin(z, peak):
    """How many quarters z lies below the peak; the last bin holds the rest."""
    return tl.minimum((peak - z) * 4.0, _BINS - 1.0).to(tl.int32)


@triton.jit
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
    peak, usable = _row_peak(peaks, faults, row, T, TILES)
    cuts = tl.load(top_ks + sequence) < V
    cuts = cuts | (tl.load(top_ps + sequence) < 1.0) | (tl.load(typical_ps + sequence) < 1.0)
    if usable & cuts:
        ids = tile * TILE + tl.arange(0, TILE)
        z = tl.load(logits + row * V + ids, ids < V, other=float("-inf"))
        tl.store(masses + row * T + tile, tl.sum(_weight(z, peak, SCALE), 0))
        histogram = tl.histogram(_bin(z, peak), _BINS)
        bins = tl.arange(0, _BINS)
        tl.store(histograms + (row * T + tile) * _BINS + bins, histogram)


@triton.jit
def _candidates(logits, few_logits, few_ids, row, first, count, is_few, V, FEW: tl.constexpr):
    """Candidates `first` .. of a row: values and ids; -inf behind the last."""
    at = first + tl.arange(0, FEW)
    in_few, in_row = at < tl.where(is_few, count, 0), at < tl.where(is_few, 0, count)
    z = tl.load(few_logits + row * FEW + at, in_few, other=float("-inf"))
    z = tl.maximum(z, tl.load(logits + row * V + at, in_row, other=float("-inf")))
    ids = tl.where(in_few, tl.load(few_ids + row * FEW + at, in_few, other=0), at)
    return z, ids


@triton.jit
def _sums(
    logits,
    few_logits,
    few_ids,
    few_weights,
    row,
    count,
    is_few,
    peak,
    least,
    V,
    WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Over candidates of order `least` and above: the sum of their weights (1 each without WEIGHTS), and how many."""
    total = tl.zeros([FEW], tl.int64)
    number = tl.zeros([FEW], tl.int32)
    for first in range(0, count, FEW):
        z, ids = _candidates(logits, few_logits, few_ids, row, first, count, is_few, V, FEW)
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
def _search(
    logits,
    few_logits,
    few_ids,
    few_weights,
    row,
    count,
    is_few,
    peak,
    least,
    lowest,
    target,
    V,
    WEIGHTS: tl.constexpr,
    SCALE: tl.constexpr,
    FEW: tl.constexpr,
):
    """The largest order, `least` or above, from which on candidates reach the target (or one with the same candidates).

    From `least` on they must reach it, and so those of at least the value `lowest`.
    """
    low = tl.maximum(least, _order(lowest, tl.full([], _ID_MASK, tl.int32)))
    high = _order(peak, tl.zeros([], tl.int32)) + 1  # nobody is there
    num_low = count
    num_high = 0
    while (high - low > 1) & (num_low - num_high > 1):
        middle = low + (high - low) // 2
        total, number = _sums(
            logits,
            few_logits,
            few_ids,
            few_weights,
            row,
            count,
            is_few,
            peak,
            middle,
            V,
            WEIGHTS,
            SCALE,
            FEW,
        )
        reaches = total >= target
        low = tl.where(reaches, middle, low)
        num_low = tl.where(reaches, number, num_low)
        high = tl.where(reaches, high, middle)
        num_high = tl.where(reaches, num_high, number)
    return low


@triton.jit
def _nearness(z, peak, centre):
    """int64 that is larger where a candidate's information lies nearer to the entropy; below _NEAREST."""
    distance = tl.abs(peak.to(tl.float64) - z.to(tl.float64) - centre)
    return _NEAREST - 1 - distance.to(tl.int64, bitcast=True)


@triton.jit
def _kept(z, ids, peak, cut, log_floor):
    """Those whom top-k, top-p and min-p leave."""
    kept = (_order(z, ids) >= cut) & (z > float("-inf"))
    return kept & (z.to(tl.float64) - peak.to(tl.float64) >= log_floor)


@triton.jit
def _typical_sums(
    logits,
    few_logits,
    few_ids,
    row,
    count,
    is_few,
    peak,
    cut,
    log_floor,
    centre,
    nearest,
    below_id,
    V,
    SCALE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Over kept candidates nearer than `nearest`, or as near with an id below: sum of weights, number."""
    total = tl.zeros([FEW], tl.int64)
    number = tl.zeros([FEW], tl.int32)
    for first in range(0, count, FEW):
        z, ids = _candidates(logits, few_logits, few_ids, row, first, count, is_few, V, FEW)
        near = _nearness(z, peak, centre)
        counted = _kept(z, ids, peak, cut, log_floor) & ((near > nearest) | ((near == nearest) & (ids < below_id)))
        number += counted.to(tl.int32)
        total += tl.where(counted, _weight(z, peak, SCALE), 0)
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
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
    cuts,  # [N] int64: order of the last candidate that top-k and top-p leave
    centres,  # [N] float64: information of the peak up to the entropy, for typical-p
    nearests,  # [N] int64: nearness of the last typical candidate; -1: typical-p is off
    near_ids,  # [N] int32: of those as near as that, ids below stay
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
    peak, usable = _row_peak(peaks, faults, row, T, TILES)
    top_k = tl.load(top_ks + sequence)
    top_p = tl.load(top_ps + sequence)
    log_floor = tl.load(log_floors + sequence)
    typical_p = tl.load(typical_ps + sequence)
    by_count, by_mass, by_type = top_k < V, top_p < 1.0, typical_p < 1.0
    tl.store(cuts + row, tl.zeros([], tl.int64))
    tl.store(nearests + row, tl.full([], -1, tl.int64))
    if usable & (by_count | by_mass | by_type):
        # How many quarters below the peak hold at most FEW candidates.
        bins = tl.arange(0, _BINS)
        histogram = tl.zeros([_BINS], tl.int32)
        mass = tl.zeros([], tl.int64)
        for tile in range(0, T):
            histogram += tl.load(histograms + (row * T + tile) * _BINS + bins)
            mass += tl.load(masses + row * T + tile)
        fits = (tl.cumsum(histogram, 0) <= FEW) & (bins < _BINS - 1)
        num_bins = tl.sum(fits.to(tl.int32), 0)
        num_few = tl.sum(tl.where(fits, histogram, 0), 0)

        # Copy them out, by id.
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

        # All candidates in question are among them if the first k are, or if they have all the weight there is, or all
        # that top-p asks for.
        has_all = few_mass == mass
        wanted = tl.math.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
        is_few = has_all | (by_mass & (few_mass >= wanted))
        if by_count:
            is_few = (num_few >= top_k) | (has_all & (by_mass | by_type))
        count = tl.where(is_few, num_few, V)
        # below every candidate that is copied, or has weight
        lowest = peak - tl.where(is_few, num_bins * 0.25, 32.0) - 1.0 - tl.abs(peak) * 1e-6

        cut = tl.zeros([], tl.int64)
        if by_count & (num_few >= top_k):
            cut = _search(
                logits,
                few_logits,
                few_ids,
                few_weights,
                row,
                count,
                is_few,
                peak,
                cut,
                lowest,
                top_k,
                V,
                False,
                SCALE,
                FEW,
            )
        if by_count & (num_few < top_k):
            # All possible ids may be fewer than k: then all of them stay.
            copied = num_few < 0  # never: the whole row is searched
            _, possible = _sums(
                logits, few_logits, few_ids, few_weights, row, V, copied, peak, cut, V, False, SCALE, FEW
            )
            if possible >= top_k:
                cut = _search(
                    logits,
                    few_logits,
                    few_ids,
                    few_weights,
                    row,
                    V,
                    copied,
                    peak,
                    cut,
                    tl.full([], float("-inf"), tl.float32),
                    top_k,
                    V,
                    False,
                    SCALE,
                    FEW,
                )
        if by_mass:
            if by_count:
                mass, _ = _sums(
                    logits, few_logits, few_ids, few_weights, row, count, is_few, peak, cut, V, True, SCALE, FEW
                )
            wanted = tl.maximum(tl.math.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
            cut = _search(
                logits,
                few_logits,
                few_ids,
                few_weights,
                row,
                count,
                is_few,
                peak,
                cut,
                lowest,
                wanted,
                V,
                True,
                SCALE,
                FEW,
            )
        tl.store(cuts + row, cut)

        if by_type:
            # information - entropy = (peak - z) - (mean of peak - z): what normalises the two cancels
            total = tl.zeros([FEW], tl.int64)
            moment = tl.zeros([FEW], tl.int64)
            number = tl.zeros([FEW], tl.int32)
            for first in range(0, count, FEW):
                z, ids = _candidates(logits, few_logits, few_ids, row, first, count, is_few, V, FEW)
                kept = _kept(z, ids, peak, cut, log_floor)
                below = tl.where(kept, peak.to(tl.float64) - z.to(tl.float64), 0.0)
                total += tl.where(kept, _weight(z, peak, SCALE), 0)
                moment += tl.where(kept, (tl.exp(-below) * below * SCALE + 0.5).to(tl.int64), 0)
                number += kept.to(tl.int32)
            mass = tl.sum(total, 0)
            centre = tl.sum(moment, 0).to(tl.float64) / mass.to(tl.float64)
            wanted = tl.maximum(tl.math.ceil(typical_p * mass.to(tl.float64)).to(tl.int64), 1)
            # those as near as `low` and nearer reach what is wanted, those as near as `high` do not
            low = tl.zeros([], tl.int64)
            high = tl.full([], _NEAREST, tl.int64)
            num_low = tl.sum(number, 0)
            num_high = 0
            while (high - low > 1) & (num_low - num_high > 1):
                middle = low + (high - low) // 2
                reached, found = _typical_sums(
                    logits,
                    few_logits,
                    few_ids,
                    row,
                    count,
                    is_few,
                    peak,
                    cut,
                    log_floor,
                    centre,
                    middle,
                    _NOBODY,
                    V,
                    SCALE,
                    FEW,
                )
                reaches = reached >= wanted
                low = tl.where(reaches, middle, low)
                num_low = tl.where(reaches, found, num_low)
                high = tl.where(reaches, high, middle)
                num_high = tl.where(reaches, num_high, found)
            below_id = tl.full([], _NOBODY, tl.int32)
            if num_low - num_high > 1:  # several are equally near: the lower ids first
                last = tl.zeros([], tl.int32)
                bit = tl.full([], (_ID_MASK + 1) // 2, tl.int32)
                while bit > 0:
                    above = last + bit
                    bit = bit // 2
                    reached, _ = _typical_sums(
                        logits,
                        few_logits,
                        few_ids,
                        row,
                        count,
                        is_few,
                        peak,
                        cut,
                        log_floor,
                        centre,
                        low,
                        above,
                        V,
                        SCALE,
                        FEW,
                    )
                    last = tl.where(reached < wanted, above, last)
                below_id = last + 1
            tl.store(centres + row, centre)
            tl.store(nearests + row, low)
            tl.store(near_ids + row, below_id)


@triton.jit
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
    winner = tl.full([], _NOBODY, tl.int32)
    peak, usable = _row_peak(peaks, faults, row, T, TILES)
    tile_peak = tl.load(peaks + row * T + tile)
    if usable & (tl.load(greedy + sequence) == 0) & (tile_peak >= peak - _REACH):
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
            # two errors of nearly_gumbel, and of float32 sums
            close = left & (nearly >= loudest - (3e-4 + tl.abs(loudest) * 5e-7))
            if tl.sum(close.to(tl.int32), 0) == 1:
                winner = tl.max(tl.where(close, ids, 0), 0)
                alone = tl.max(tl.where(close, z, float("-inf")), 0)
                best = alone.to(tl.float64) + gumbel_of_bits(random_bits(stream, winner))
            else:
                score = tl.where(close, z.to(tl.float64) + gumbel_of_bits(bits), float("-inf"))
                best = tl.max(score, 0)
                winner = tl.min(tl.where(close & (score == best), ids, _NOBODY), 0)
    tl.store(scores + row * T + tile, best)
    tl.store(winners + row * T + tile, winner)


@triton.jit
def _winner(
    greedy,
    peaks,
    peak_ids,
    faults,
    scores,
    winners,
    chosen,  # [N] int64
    usables,  # [N] bool
    J,
    V,
    T,
    SAMPLES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    inside = lanes < T
    peak, usable = _row_peak(peaks, faults, row, T, TILES)
    of_tile = tl.load(peaks + row * T + lanes, inside, other=float("-inf"))
    ids = tl.load(peak_ids + row * T + lanes, inside, other=_NOBODY)
    winner = tl.min(tl.where(of_tile == peak, ids, _NOBODY), 0)
    if SAMPLES:  # noqa: SIM102
        if tl.load(greedy + row // J) == 0:
            score = tl.load(scores + row * T + lanes, inside, other=float("-inf"))
            ids = tl.load(winners + row * T + lanes, inside, other=_NOBODY)
            winner = tl.min(tl.where(score == tl.max(score, 0), ids, _NOBODY), 0)
    tl.store(chosen + row, tl.where(usable & (winner < V), winner, 0).to(tl.int64))
    tl.store(usables + row, usable.to(tl.int8))


@dataclass(frozen=True, slots=True)
class Shape:
    """How the passes share a vocabulary out. What is chosen does not depend on it."""

    tile: int  # ids per program
    few: int  # candidates that a cut is searched among
    num_warps: int

    @classmethod
    def of(cls, vocab_size: int) -> Shape:
        """Large enough tiles that a row's peaks fit a warp's registers, small enough that 11 rows fill a device.

        32 to 64 tiles of 128k to 256k ids; 16 to 32 values per thread.
        """
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"A vocabulary of {vocab_size} ids is too large; at most {MAX_VOCAB} are ordered.")
        if vocab_size >= 1 << 15:
            return cls(4096, 2048, 8)
        return cls(1024, 1024, 4)


def scale(vocab_size: int) -> float:
    """Weight of the largest value. Sums stay below 2^62."""
    return float(1 << (62 - max(17, (vocab_size - 1).bit_length())))


def choose(
    logits: Tensor,
    laws: LawTensors,
    stages: Stages,
    positions: Tensor,
    banned_ids: Tensor,
    *,
    tails: Tensor,
    num_tail: Tensor,
    counts: Tensor | None = None,
    bans: Tensor | None = None,
    shape: Shape | None = None,
) -> Choice:
    """What J rows of each of S sequences choose: `choose.choose`, in place on contiguous logits [S, J, V] float32.

    `shape`: how to launch it; None: by the size of the vocabulary.
    """
    S, J, V = logits.shape
    shape = shape or Shape.of(V)
    N, T = S * J, triton.cdiv(V, shape.tile)
    TILES = triton.next_power_of_2(T)
    device = logits.device

    def room(*of: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*of, dtype=dtype, device=device)

    chosen, usable = room(S, J, dtype=torch.int64), room(S, J, dtype=torch.bool)
    if not N:
        return Choice(chosen, usable)
    warps = {"num_warps": shape.num_warps}
    peaks, peak_ids, faults = (room(N, T, dtype=kind) for kind in (torch.float32, torch.int32, torch.int32))
    _edit_and_temper(
        logits,
        laws,
        stages,
        banned_ids,
        tails,
        num_tail,
        counts,
        bans,
        laws.divisor,
        (peaks, peak_ids, faults),
        shape,
    )
    cuts, nearests = room(N, dtype=torch.int64), room(N, dtype=torch.int64)
    centres, near_ids = room(N, dtype=torch.float64), room(N, dtype=torch.int32)
    greedy = laws.greedy.view(torch.uint8)
    if stages.cuts:
        masses, histograms = room(N, T, dtype=torch.int64), room(N, T, _BINS.value, dtype=torch.int32)
        _weigh[(N, T)](
            logits,
            laws.top_k,
            laws.top_p,
            laws.typical_p,
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
        few_logits, few_ids = room(N, shape.few, dtype=torch.float32), room(N, shape.few, dtype=torch.int32)
        _cut[(N,)](
            logits,
            laws.top_k,
            laws.top_p,
            laws.log_min_p,
            laws.typical_p,
            peaks,
            faults,
            masses,
            histograms,
            few_logits,
            few_ids,
            room(N, shape.few, dtype=torch.int64),
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
    scores, winners = room(N, T, dtype=torch.float64), room(N, T, dtype=torch.int32)
    if stages.samples:
        _loudest[(N, T)](
            logits,
            laws.key,
            greedy,
            laws.log_min_p,
            positions,
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
        usable.view(torch.uint8),
        J,
        V,
        T,
        SAMPLES=stages.samples,
        TILES=TILES,
        num_warps=1,
    )
    return Choice(chosen, usable)


def edit(
    logits: Tensor,
    laws: LawTensors,
    stages: Stages,
    banned_ids: Tensor,
    *,
    tails: Tensor,
    num_tail: Tensor,
    counts: Tensor | None = None,
    bans: Tensor | None = None,
) -> Tensor:
    """The stages before the temperature, in place: `choose.edit`."""
    S, J, V = logits.shape
    shape = Shape.of(V)
    T = triton.cdiv(V, shape.tile)
    peaks = tuple(
        torch.empty(S * J, T, dtype=kind, device=logits.device) for kind in (torch.float32, torch.int32, torch.int32)
    )
    neutral = torch.ones_like(laws.divisor)
    _edit_and_temper(logits, laws, stages, banned_ids, tails, num_tail, counts, bans, neutral, peaks, shape)
    return logits


def _edit_and_temper(
    logits: Tensor,
    laws: LawTensors,
    stages: Stages,
    banned_ids: Tensor,
    tails: Tensor,
    num_tail: Tensor,
    counts: Tensor | None,
    bans: Tensor | None,
    divisor: Tensor,
    peaks: tuple[Tensor, ...],
    shape: Shape,
) -> None:
    """The first two passes. peaks: of each tile the value, the id, and whether it has a fault; written."""
    S, J, V = logits.shape
    N, T = S * J, triton.cdiv(V, shape.tile)
    if not logits.is_contiguous() or logits.dtype != torch.float32:
        raise ValueError(f"Logits must be contiguous float32; got {logits.dtype}, strides {logits.stride()}.")
    if stages.penalises and counts is None:
        raise ValueError("Penalties need `counts`.")
    if not N:
        return
    if stages.edits or len(banned_ids):
        bans = bans.contiguous() if stages.edits and bans is not None else None
        num_biases = laws.bias_ids.shape[1] if stages.edits else 0
        _edit[(N,)](
            logits,
            laws.bias_ids,
            laws.bias,
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
        laws.allowed,
        counts if counts is not None and stages.penalises else logits,
        tails,
        num_tail.contiguous(),
        laws.repetition,
        laws.presence,
        laws.frequency,
        divisor,
        *peaks,
        J,
        V,
        T,
        laws.allowed.shape[1],
        tails.stride(0),
        BOUNDS=stages.bounds,
        PENALISES=stages.penalises,
        TILE=shape.tile,
        enable_fp_fusion=False,  # as the reference rounds: a product, then a difference
        num_warps=shape.num_warps,
    )


_LIST_BLOCK = 64


def _tuned() -> tuple[Tuned, ...]:
    """Every kernel at the shapes of a small and a large vocabulary."""
    sizes = {"J": "i32", "V": "i32", "T": "i32"}
    row = {"peaks": "*fp32", "faults": "*i32"}
    law = {"top_ks": "*i64", "top_ps": "*fp64", "typical_ps": "*fp64"}
    found = [
        Tuned(
            _edit,
            {"logits": "*fp32", "bias_ids": "*i64", "biases": "*fp32", "banned": "*i64", "bans": "*i64"}
            | {"J": "i32", "V": "i32", "num_biases": "i32", "num_banned": "i32", "num_bans": "i32"},
            {"BLOCK": _LIST_BLOCK},
            1,
        )
    ]
    for vocab_size in (32_000, 256_000):
        shape = Shape.of(vocab_size)
        tiles = triton.next_power_of_2(triton.cdiv(vocab_size, shape.tile))
        tile = {"TILES": tiles, "TILE": shape.tile}
        weighed = {"SCALE": scale(vocab_size), **tile}
        for bounds, penalises in ((False, False), (True, True)):
            found.append(
                Tuned(
                    _temper,
                    {"logits": "*fp32", "allowed": "*i32", "counts": "*i32", "tails": "*i64", "num_tail": "*i64"}
                    | dict.fromkeys(("repetition", "presence", "frequency", "divisor"), "*fp32")
                    | {"peaks": "*fp32", "peak_ids": "*i32", "faults": "*i32"}
                    | sizes
                    | {"num_words": "i32", "tail_stride": "i32"},
                    {"BOUNDS": bounds, "PENALISES": penalises, "TILE": shape.tile},
                    shape.num_warps,
                )
            )
        histograms = {"masses": "*i64", "histograms": "*i32"}
        cut = {"cuts": "*i64", "centres": "*fp64", "nearests": "*i64", "near_ids": "*i32"}
        found.append(Tuned(_weigh, {"logits": "*fp32"} | law | row | histograms | sizes, weighed, shape.num_warps))
        found.append(
            Tuned(
                _cut,
                {"logits": "*fp32", "log_floors": "*fp64"}
                | law
                | row
                | histograms
                | {"few_logits": "*fp32", "few_ids": "*i32", "few_weights": "*i64"}
                | cut
                | sizes,
                weighed | {"FEW": shape.few},
                shape.num_warps,
            )
        )
        for cuts, floors in ((False, False), (True, True)):
            found.append(
                Tuned(
                    _loudest,
                    {"logits": "*fp32", "keys": "*i64", "greedy": "*u8", "log_floors": "*fp64", "positions": "*i64"}
                    | row
                    | cut
                    | {"scores": "*fp64", "winners": "*i32"}
                    | sizes,
                    {"CUTS": cuts, "FLOORS": floors, **tile},
                    shape.num_warps,
                )
            )
        found.append(
            Tuned(
                _winner,
                {"greedy": "*u8", "peak_ids": "*i32", "scores": "*fp64", "winners": "*i32"}
                | row
                | {"chosen": "*i64", "usables": "*u8"}
                | sizes,
                {"SAMPLES": True, "TILES": tiles},
                1,
            )
        )
    return tuple(found)


TUNED = _tuned()
