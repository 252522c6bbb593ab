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
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.sampling.device_sampling import Prefixes
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.sampling.sampling_kernels import _BINS, _edit, _loudest, _temper, _weigh, _winner
from space_kernels.sampling.sampling_tensors import SamplingTensors, Stages
from space_kernels.sampling.top_k_top_p_kernels import _cut

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

    `shape`: tile sizes; None: chosen by the size of the vocabulary.
    """
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


def _tuned() -> tuple[Tuned, ...]:
    """Return every kernel with the shapes of a small and a large vocabulary."""
    sizes = {"J": "i32", "V": "i32", "T": "i32"}
    row = {"peaks": "*fp32", "faults": "*i32"}
    sampling_params = {"top_ks": "*i64", "top_ps": "*fp64", "typical_ps": "*fp64"}
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
        shape = LogitsShape.of(vocab_size)
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
        found.append(
            Tuned(_weigh, {"logits": "*fp32"} | sampling_params | row | histograms | sizes, weighed, shape.num_warps)
        )
        found.append(
            Tuned(
                _cut,
                {"logits": "*fp32", "log_floors": "*fp64"}
                | sampling_params
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
                | {"chosen": "*i64", "valids": "*u8"}
                | sizes,
                {"SAMPLES": True, "TILES": tiles},
                1,
            )
        )
    return tuple(found)


TUNED = _tuned()
