"""Triton kernels of the draft head.

The two matmuls of each of the k steps stay torch's: they read W1 and W2 once for the whole batch. The rest is slow in
torch: choosing among 256 candidates takes about forty tensor operations per step, and gathering the candidates' rows
of the output head copies them. Here each of the two is one launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.sampling.noise_kernels import gumbel_of_bits, random_bits, row_stream
from space_kernels.step.draft_head import SamplingColumns

_AT_ONCE = 32
"""Candidates compared with all others at a time."""


@triton.jit
def _sample_candidates(
    logits,
    ids,
    greedy,
    divisors,
    top_ks,
    top_ps,
    min_ps,
    keys,
    positions,
    drafts,
    M,
    logits_stride,
    ids_stride,
    SAMPLES: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < M
    of_row = logits + row * logits_stride
    raw = tl.load(of_row + lanes, inside, other=float("-inf"))
    id_ = tl.load(ids + row * ids_stride + lanes, inside, other=0)
    place = tl.min(tl.where((raw == tl.max(raw, 0)) & inside, lanes, BLOCK), 0)
    if SAMPLES:  # noqa: SIM102
        if tl.load(greedy + row) == 0:
            divisor = tl.load(divisors + row)
            z = raw.to(tl.float64) / divisor
            left = inside
            if CUTS:
                peak = tl.maximum(tl.max(z, 0), -1e300)  # the maximum is -inf if no id is possible
                top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
                rank = tl.zeros([BLOCK], tl.int32)
                before = tl.zeros([BLOCK], tl.float64)  # total weight of the candidates ranked before
                for first in range(0, M, AT_ONCE):
                    others = first + tl.arange(0, AT_ONCE)
                    other = tl.load(of_row + others, others < M, other=float("-inf")).to(tl.float64) / divisor
                    earlier = (other[None, :] == z[:, None]) & (others[None, :] < lanes[:, None])
                    earlier = (earlier | (other[None, :] > z[:, None])) & (others < M)[None, :]
                    rank += tl.sum(earlier.to(tl.int32), 1)
                    before += tl.sum(tl.where(earlier, tl.exp(other - peak)[None, :], 0.0), 1)
                weight = tl.exp(z - peak)
                within = inside & (rank < top_k)
                total = tl.sum(tl.where(within, weight, 0.0), 0)
                bound = tl.where(top_p >= 1.0, float("inf"), top_p * total)
                left = within & (before < bound) & (weight >= tl.load(min_ps + row))
                left = left | (rank == 0)
            bits = random_bits(row_stream(tl.load(keys + row), tl.load(positions + row)), id_)
            score = tl.where(left & inside, z + gumbel_of_bits(bits), float("-inf"))
            place = tl.min(tl.where((score == tl.max(score, 0)) & inside, lanes, BLOCK), 0)
    tl.store(drafts + row, tl.sum(tl.where(lanes == tl.where(place < M, place, 0), id_, 0), 0))


def sample_candidates(
    logits: Tensor, ids: Tensor, batch_params: SamplingColumns, keys: Tensor, positions: Tensor
) -> Tensor:
    """As `draft_head.sample_candidates`. logits and ids [S, M] may have any row stride."""
    S, M = logits.shape
    drafts = torch.empty(S, dtype=torch.int64, device=logits.device)
    samples = batch_params.greedy is not None
    cuts = batch_params.top_k is not None
    if S:
        _sample_candidates[(S,)](
            logits,
            ids,
            batch_params.greedy.contiguous().view(torch.uint8) if batch_params.greedy is not None else keys,
            batch_params.divisor.contiguous(),
            batch_params.top_k.contiguous() if batch_params.top_k is not None else batch_params.divisor,
            batch_params.top_p.contiguous(),
            batch_params.min_p.contiguous(),
            keys,
            positions,
            drafts,
            M,
            logits.stride(0),
            ids.stride(0),
            SAMPLES=samples,
            CUTS=samples and cuts,
            BLOCK=triton.next_power_of_2(M),
            AT_ONCE=_AT_ONCE,
            num_warps=8 if M > 64 else 4,
        )
    return drafts


@triton.jit
def _logits_of(
    hidden,
    weight,
    ids,
    out,
    M,
    hidden_size,
    hidden_stride,
    weight_stride,
    ids_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidates = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = candidates < M
    id_ = tl.load(ids + row * ids_stride + candidates, inside, other=0).to(tl.int64)
    of_row = weight + id_[:, None] * weight_stride
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, hidden_size, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        here = lanes < hidden_size
        h = tl.load(hidden + row * hidden_stride + lanes, here, other=0.0).to(tl.float32)
        w = tl.load(of_row + lanes[None, :], inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        total += w * h[None, :]
    tl.store(out + row * M + candidates, tl.sum(total, 1), inside)


_ROWS, _BLOCK = 8, 512


def logits_of(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Compute logits of a few ids per row: hidden [S, hidden], weight [V, hidden], ids [S, M] -> [S, M] float32.
    Without bias, scale or soft cap. The head's rows are read in place, each once."""
    S, M = ids.shape
    out = torch.empty(S, M, dtype=torch.float32, device=hidden.device)
    if S and M:
        _logits_of[(S, triton.cdiv(M, _ROWS))](
            hidden,
            weight,
            ids,
            out,
            M,
            hidden.shape[1],
            hidden.stride(0),
            weight.stride(0),
            ids.stride(0),
            ROWS=_ROWS,
            BLOCK=min(_BLOCK, triton.next_power_of_2(hidden.shape[1])),
            num_warps=4,
        )
    return out


_CHOICE_TYPES = {
    "logits": "*fp32",
    "greedy": "*u8",
    "divisors top_ks top_ps min_ps": "*fp64",
    "ids keys positions drafts": "*i64",
    "M logits_stride ids_stride": "i32",
}
_LOGITS_TYPES = {
    "ids": "*i64",
    "out": "*fp32",
    "M hidden_size": "i32",
    "hidden_stride weight_stride ids_stride": "i64:16",
}
TUNED = (
    *(
        Tuned.of(
            _sample_candidates, _CHOICE_TYPES, {"SAMPLES": samples, "CUTS": cuts, "BLOCK": 256, "AT_ONCE": _AT_ONCE}, 8
        )
        for samples, cuts in ((False, False), (True, False), (True, True))
    ),
    *(
        Tuned.of(_logits_of, {"hidden weight": f"*{dtype}"} | _LOGITS_TYPES, {"ROWS": _ROWS, "BLOCK": _BLOCK})
        for dtype in ("bf16", "fp16", "fp32")
    ),
)
