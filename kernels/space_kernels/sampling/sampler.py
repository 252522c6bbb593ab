"""Sampling on the host: argmax of the logits, or of logits plus keyed Gumbel noise; and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, LogitsStruct, cpu_library
from space_kernels.sampling.logits_processors import first_columns, process
from space_kernels.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_of_bits, random_bits, row_streams
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_rows import SamplingRow, SamplingRows

_LOUD_NOISE = 6.0
_LOUD_BITS = math.ceil(2.0**32 * math.exp(-math.exp(-_LOUD_NOISE)))
"""Random bits below this give noise below _LOUD_NOISE (399 of 400 cells)."""
_CELLS_AT_ONCE = 1 << 18
"""Cells drawn at a time, to stay in a core's cache."""
_NO_ID = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SampledTokens:
    """The sampled ids of N rows."""

    ids: Tensor  # [N] int64; undefined where not `valid`
    valid: Tensor  # [N] bool: the row had no NaN and at least one possible id


def sample_rows(logits: Tensor, rows: Sequence[SamplingRow], banned_ids: Tensor) -> SampledTokens:
    """Sample one id per row with the row's sampling parameters.

    logits [N, V] float32 raw (overwritten), banned_ids [B] int64: never sampled.
    """
    runs = SamplingRows.of(rows)
    if runs.run_params.is_plain_argmax and (library := library_for_logits(logits)) is not None:
        return SampledTokens(*argmax(library, logits, banned_ids))
    process(logits, runs, banned_ids)
    first = logits.argmax(dim=1, keepdim=True)  # the first of equal values; a NaN if there is one
    valid = logits.gather(1, first)[:, 0].isfinite()
    chosen = first[:, 0]
    if runs.run_params.samples:
        batch_params = runs.batch_params(_is_sampled)
        keys = torch.tensor([sampling_params.key for sampling_params in batch_params], device=logits.device)
        positions = torch.tensor(runs.positions(_is_sampled), device=logits.device)
        if len(batch_params) == len(runs):
            chosen = gumbel_argmax(logits, keys, positions)
        else:
            sampled = runs.numbers(_is_sampled)
            chosen[sampled] = gumbel_argmax(logits[sampled], keys, positions)
    return SampledTokens(chosen, valid)


def _is_sampled(sampling_params: SamplingParams) -> bool:
    return not sampling_params.greedy


def gumbel_argmax(z: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Return argmax_v(z_v + gumbel(key, position, v)), ties to the lower id.

    z [N, V] float32 (÷ temperature, impossible ids -inf), keys [N] int64, positions [N] int64 -> [N] int64

    Noise is bounded: v can win only if z_v + GUMBEL_MAX reaches max(z) + GUMBEL_MIN. If few ids can, as after top-k,
    noise is drawn for these alone; the result is the same.
    """
    N, V = z.shape
    streams = row_streams(keys, positions)
    ids = torch.arange(V, device=z.device)[None]
    possible = z >= z.amax(dim=1, keepdim=True) - (GUMBEL_MAX - GUMBEL_MIN + 0.01)
    counts = possible.sum(dim=1)
    most = max(1, int(counts.max()))  # the maximum is 0 if every row has a NaN
    if most < V // 4:
        row, id_ = possible.nonzero(as_tuple=True)  # row-major: ids ascend in a row
        column = torch.arange(len(row), device=z.device) - (counts.cumsum(dim=0) - counts)[row]
        few = z.new_full((N, most), -math.inf)
        few[row, column] = z[row, id_]
        ids = ids.new_zeros(N, most)
        ids[row, column] = id_
        z = few
    num_rows = max(1, _CELLS_AT_ONCE // z.shape[1])
    parts = [slice(first, first + num_rows) for first in range(0, N, num_rows)]
    return torch.cat([_loudest(z[part], ids if len(ids) == 1 else ids[part], streams[part]) for part in parts])


def _loudest(z: Tensor, ids: Tensor, streams: Tensor) -> Tensor:
    """Return the winning id of each row. z [n, M], ids [n, M] or [1, M], streams [n] -> [n]

    Bits are drawn for every cell, but turned into noise for few: first for the loud cells, one in 400; then for the
    quiet cells that could still beat the best of these.
    """
    n, M = z.shape
    bits = random_bits(streams[:, None], ids)  # [n, M]
    ids = ids.expand(n, M)
    loud = bits >= _LOUD_BITS
    highest = z.amax(dim=1).to(torch.float64) + GUMBEL_MIN  # the winner has at least this
    highest, row, id_, score = _join(highest, loud, z, ids, bits)
    quiet = (z >= (highest - _LOUD_NOISE - 0.01).to(torch.float32)[:, None]) & ~loud
    highest, *others = _join(highest, quiet, z, ids, bits)
    row, id_, score = (torch.cat(pair) for pair in zip((row, id_, score), others, strict=True))
    wins = score == highest[row]
    winner = torch.full((n,), _NO_ID, dtype=torch.int64, device=z.device)
    winner.scatter_reduce_(0, row[wins], id_[wins], "amin")
    return torch.where(winner == _NO_ID, 0, winner)  # a row of NaN has no winner


def _join(
    highest: Tensor, cells: Tensor, z: Tensor, ids: Tensor, bits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score the selected `cells` [n, M]; return each row's new highest score, and the cells' rows, ids and scores."""
    row, column = cells.nonzero(as_tuple=True)
    score = z[row, column].to(torch.float64) + gumbel_of_bits(bits[row, column])
    return highest.scatter_reduce(0, row, score, "amax"), row, ids[row, column], score


@dataclass(frozen=True, slots=True)
class IdLogprobs:
    """The log-probability of one id, and of the most probable ids of its row."""

    id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def log_probabilities(raw: Tensor, ids: Sequence[int], num_top: int) -> list[IdLogprobs]:
    """Return float32 log-probabilities of raw logits [N, V] at `ids` [N], and each row's `num_top` most probable ids.

    Most probable first, ties by the lower id.
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


def library_for_logits(logits: Tensor) -> CpuLibrary | None:
    """Return the compiled library if it supports these logits, else None."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    return cpu_library()


def argmax(library: CpuLibrary, logits: Tensor, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest id [N] int64, ties to the lower id, and whether it is valid [N] bool.

    logits [N, V], overwritten at the banned ids. A row is valid if it has no NaN and its greatest logit is finite.
    """
    ids, valid = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.argmax(byref(_struct(logits, banned_ids)), ids.data_ptr(), valid.data_ptr(), torch.get_num_threads())
    return ids, valid


def best_of(library: CpuLibrary, logits: Tensor, banned_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's best M = min(count, V) ids, ascending, [N, M] int64, and offsets [N, M] float32.

    logits [N, V], overwritten at the banned ids. An offset is -inf where the logit is, else 0. Ties: the lower ids.
    """
    count = min(count, logits.shape[1])
    ids, offsets = torch.empty(len(logits), count, dtype=torch.int64), torch.empty(len(logits), count)
    here = byref(_struct(logits, banned_ids))
    library.best_of(here, count, ids.data_ptr(), offsets.data_ptr(), torch.get_num_threads())
    return ids, offsets


def _struct(logits: Tensor, banned_ids: Tensor) -> LogitsStruct:
    rows, vocabulary = logits.shape
    return LogitsStruct(
        logits.data_ptr(), rows, logits.stride(0), vocabulary, banned_ids.data_ptr(), len(banned_ids)
    )  # fmt: skip
