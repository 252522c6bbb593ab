"""The choice itself: the largest logit, or the largest logit plus keyed Gumbel noise; and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_of_bits, random_bits, row_streams
from space_kernels.ordering import first_columns
from space_kernels.processors import Row, process

_MODEST_NOISE = 6.0
_MODEST_BITS = math.ceil(2.0**32 * math.exp(-math.exp(-_MODEST_NOISE)))
"""Fewer bits than these mean noise below _MODEST_NOISE (399 of 400 cells)."""


@dataclass(frozen=True)
class Choice:
    """What N rows chose."""

    ids: Tensor  # [N] int64; without meaning where not `usable`
    usable: Tensor  # [N] bool: the row had no NaN, and at least one possible id


def choose_rows(logits: Tensor, rows: Sequence[Row], banned_ids: Tensor) -> Choice:
    """What each row chooses under its law.

    logits [N, V] float32 raw (overwritten), N rows, banned_ids [B] int64: never chosen.
    """
    process(logits, rows, banned_ids)
    first = logits.argmax(dim=1, keepdim=True)  # the first of equal values; a NaN if there is one
    usable = logits.gather(1, first)[:, 0].isfinite()
    chosen = first[:, 0]
    sampled = [number for number, row in enumerate(rows) if not row.law.greedy]
    if sampled:
        keys = torch.tensor([rows[n].law.key for n in sampled], device=logits.device)
        positions = torch.tensor([rows[n].position for n in sampled], device=logits.device)
        z = logits if len(sampled) == len(rows) else logits[sampled]
        chosen[sampled] = sample(z, keys, positions)
    return Choice(chosen, usable)


def sample(z: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """argmax_v(z_v + gumbel(key, position, v)), equal sums: the lower id.

    z [N, V] float32 (÷ temperature, impossible ids -inf), keys [N] int64, positions [N] int64 -> [N] int64

    Noise is bounded: z_v + GUMBEL_MAX must reach max(z) + GUMBEL_MIN for v to win. Ids that cannot are left out, first
    by this bound, then, far below the maximum, by their bits alone; the winner is the same.
    """
    N = z.shape[0]
    best = z.amax(dim=1, keepdim=True)
    row, id_ = (z >= best - (GUMBEL_MAX - GUMBEL_MIN + 0.01)).nonzero(as_tuple=True)  # row-major: ids ascend in a row
    bits = random_bits(row_streams(keys, positions)[row], id_)
    below = best[:, 0][row] - z[row, id_]
    live = ((bits >= _MODEST_BITS) | (below <= _MODEST_NOISE - GUMBEL_MIN + 0.01)).nonzero(as_tuple=True)[0]
    row, id_ = row[live], id_[live]
    score = z[row, id_].to(torch.float64) + gumbel_of_bits(bits[live])
    highest = torch.full((N,), -math.inf, dtype=torch.float64, device=z.device)
    highest.scatter_reduce_(0, row, score, "amax")
    wins = score == highest[row]
    winner = torch.full((N,), z.shape[1], dtype=torch.int64, device=z.device)
    winner.scatter_reduce_(0, row[wins], id_[wins], "amin")
    return winner.clamp_(max=z.shape[1] - 1)  # only a row without any candidate reaches the clamp


@dataclass(frozen=True, slots=True)
class IdLogprobs:
    """Log-probability of one id, and the most probable ids of its row with theirs."""

    id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def log_probabilities(raw: Tensor, ids: Sequence[int], num_top: int) -> list[IdLogprobs]:
    """float32 log-softmax of raw logits [N, V] at `ids` (N of them), with the `num_top` most probable ids.

    Most probable first, equal values: the lower id first.
    """
    logprobs = torch.log_softmax(raw.to(torch.float32), dim=1)
    columns = first_columns(logprobs, min(num_top, raw.shape[1]))
    chosen = logprobs.gather(1, torch.tensor(ids, dtype=torch.int64, device=raw.device)[:, None])[:, 0]
    top = logprobs.gather(1, columns)
    return [
        IdLogprobs(id_, logprob, tuple(top_ids), tuple(top_logprobs))
        for id_, logprob, top_ids, top_logprobs in zip(
            ids, chosen.tolist(), columns.tolist(), top.tolist(), strict=True
        )
    ]
