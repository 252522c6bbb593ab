"""Sampling on the host: every stage of SPACE §3 in order, applied to rows of logits with the state of their prefixes.

    raw logits -> bias, allowed and banned ids, grammar, min_tokens, bad words
               -> repetition, presence, frequency penalties
               -> ÷ temperature -> top-k -> top-p -> min-p -> typical-p -> argmax, or argmax with keyed Gumbel noise

A chain row's prefix is hypothetical: the known ids, then the drafts before it. Every stage treats each row separately,
so a row's result does not depend on the other rows. Stages that no row uses cost nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, LogitsStruct, SamplingStruct, cpu_library
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_of_bits, random_bits, row_streams
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow, SamplingRows, TokenListTensors
from space_kernels.sampling.sampling_params import TokenCounts as TokenCounts

_NEVER = -math.inf
_FIRST_CANDIDATES = 256
"""Candidates sorted first for top-p; rows that need more are sorted deeper. The result does not depend on it."""

_CEILINGS = torch.where((torch.arange(256)[:, None] >> torch.arange(8) & 1).bool(), math.inf, -math.inf)
"""[256, 8]: for each byte, infinity for a set bit and -infinity for a clear one, lowest bit first."""


def process(logits: Tensor, rows: Sequence[SamplingRow] | SamplingRows, banned_ids: Tensor) -> Tensor:
    """Apply all stages to each row, in place; impossible ids become -inf.
    logits [N, V] float32 (overwritten and returned), N rows, banned_ids [B] int64 (impossible in every row)."""
    runs = SamplingRows.of(rows)
    edit(logits, runs, banned_ids)
    divide(logits, runs)
    if runs.run_params.truncates:
        truncate(logits, runs.batch_params())
    return logits


def edit(logits: Tensor, rows: Sequence[SamplingRow] | SamplingRows, banned_ids: Tensor) -> None:
    """Apply bias, allowed and banned ids, grammar, min_tokens, bad words and penalties, in place."""
    runs = SamplingRows.of(rows)
    edited = runs.rows(_edits) if runs.run_params.edits else []
    if edited:
        _add_bias(logits, edited)
        _keep_allowed(logits, edited)
    if len(banned_ids):
        logits.index_fill_(1, banned_ids, _NEVER)
    if edited:
        _keep_possible(logits, edited)
        _ban(logits, edited)
        _penalise(logits, edited)


def _cells(cells: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Convert (row, id) pairs to two index tensors."""
    pairs = torch.tensor(cells, dtype=torch.int64, device=device)
    return pairs[:, 0], pairs[:, 1]


def _places(found: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Convert rows with several ids each to two index tensors."""
    numbers = np.repeat([number for number, _ in found], [len(ids) for _, ids in found])
    ids = torch.cat([ids for _, ids in found])
    return torch.from_numpy(numbers).to(ids.device), ids


def _add_bias(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    biased = [
        (number, TokenListTensors.of(row.sampling_params, logits)) for number, row in edited if row.sampling_params.bias
    ]
    if biased:
        at = _places([(number, lists.bias_ids) for number, lists in biased])
        logits[at] += torch.cat([lists.biases for _, lists in biased])


def _keep_allowed(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    bounded = [(number, row.sampling_params) for number, row in edited if row.sampling_params.allowed_ids]
    together = groupby(enumerate(bounded), key=lambda one: (id(one[1][1]), one[1][0] - one[0]))
    for _, group in together:  # consecutive rows with the same parameters
        rows = [row for _, row in group]
        forbidden = TokenListTensors.of(rows[0][1], logits).forbidden
        if forbidden is not None:
            logits[rows[0][0] : rows[-1][0] + 1].masked_fill_(forbidden, _NEVER)


def _keep_possible(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    found = [(number, row.possible) for number, row in edited if row.possible is not None]
    if found:
        words = torch.from_numpy(np.stack([bits for _, bits in found])).to(logits.device)  # [P, ceil(V / 32)]
        numbers = [number for number, _ in found]
        first, behind = numbers[0], numbers[-1] + 1
        rows = logits[first:behind] if behind - first == len(numbers) else logits[numbers]
        torch.minimum(rows, _ceilings(words, logits.shape[1]), out=rows)
        if behind - first > len(numbers):
            logits[numbers] = rows


def _ceilings(words: Tensor, num_ids: int) -> Tensor:
    """Return infinity for the ids in a set, -infinity for the others. words [P, ceil(V / 32)] int32 -> [P, V] float32
    The minimum of these and the logits masks without branches, and keeps the bits of allowed logits."""
    P, W = words.shape
    in_bytes = words.view(torch.uint8)  # [P, 4·W], little-endian: byte b holds ids 8·b, 8·b + 1, …
    of_bits = _CEILINGS.to(words.device).index_select(0, in_bytes.flatten().int())  # [4·P·W, 8]
    return of_bits.view(P, 32 * W)[:, :num_ids]


def _ban(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    bans: list[tuple[int, Tensor]] = []
    behind: list[tuple[int, int]] = []
    for number, row in edited:
        params = row.sampling_params
        if params.end_ids and row.num_generated < params.min_tokens:
            bans.append((number, TokenListTensors.of(params, logits).end_ids))
        if params.bad_words:
            lists = TokenListTensors.of(params, logits)
            bans.append((number, lists.banned))
            words = () if row.last_id is None else lists.bad_behind.get(row.last_id, ())
            behind += [(number, word[-1]) for word in words if row.ends_with(word[:-1])]
    if bans:
        logits[_places(bans)] = _NEVER
    if behind:
        logits[_cells(behind, logits.device)] = _NEVER


def _penalise(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    penalised = [(number, row) for number, row in edited if row.sampling_params.penalises]
    if not penalised:
        return
    known: dict[int, tuple[TokenCounts, Tensor, Tensor]] = {}  # of each sequence: its ids, and how often each came out
    of_known: list[tuple[int, SamplingRow, Tensor, Tensor]] = []
    of_ahead: list[tuple[int, SamplingRow, Tensor, Tensor]] = []
    for number, row in penalised:
        key = id(row if row.counts is None else row.counts)
        if key not in known:
            counts = row.counts or TokenCounts(row.ids, row.num_prompt, logits.shape[1], logits.device)
            ids = counts.seen.nonzero()[:, 0]  # the others stay as they are
            known[key] = counts, ids, counts.output[ids]
        counts, ids, output = known[key]
        of_known.append((number, row, ids, output))
        if row.tail:
            drafts = Counter(row.tail)
            ids, more = torch.tensor([list(drafts), list(drafts.values())], device=logits.device)
            of_ahead.append((number, row, ids, counts.output[ids] + more))
    changes = [_penalised(logits, entries) for entries in (of_known, of_ahead) if entries]
    for places, z in changes:  # drafts last: of an id that is known, too, they count both
        logits[places] = z


def _penalised(
    logits: Tensor, entries: list[tuple[int, SamplingRow, Tensor, Tensor]]
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Rows with several ids each, and how often each id came out -> two index tensors, and what these logits become."""
    every = [row.sampling_params for _, row, _, _ in entries]
    factors = np.array(
        [(params.repetition_penalty, params.presence_penalty, params.frequency_penalty) for params in every],
        dtype=np.float32,
    )
    of_ids = torch.from_numpy(factors.repeat([len(ids) for _, _, ids, _ in entries], axis=0))
    repetition, presence, frequency = of_ids.to(logits.device, logits.dtype).unbind(1)
    places = _places([(number, ids) for number, _, ids, _ in entries])
    z, count = logits[places], torch.cat([count for _, _, _, count in entries])
    z = torch.where(z > 0, z / repetition, z * repetition)
    z = z - presence * (count > 0)
    return places, z - frequency * count


def divide(logits: Tensor, rows: SamplingRows) -> None:
    """Divide by the temperature, in place; rows at temperature 0 stay unchanged."""
    if rows.run_params.divides:
        logits /= _divisors(rows.batch_params(), logits)


def _divisors(batch_params: Sequence[SamplingParams], logits: Tensor) -> Tensor:
    """[N, 1], of the logits' dtype"""
    divisors = [params.divisor for params in batch_params]
    return torch.tensor(divisors, dtype=logits.dtype, device=logits.device)[:, None]


def truncate(z: Tensor, batch_params: Sequence[SamplingParams]) -> None:
    """Apply top-k, top-p, min-p and typical-p, in place, to logits already divided by the temperature: z [N, V]."""
    if nucleus := [number for number, params in enumerate(batch_params) if _has_nucleus(params)]:
        z[nucleus] = _keep_first(z[nucleus], [batch_params[number] for number in nucleus])
    if floored := [number for number, params in enumerate(batch_params) if _has_floor(params)]:
        z[floored] = _keep_probable(z[floored], [batch_params[number].min_p for number in floored])
    if typical := [number for number, params in enumerate(batch_params) if _is_typical(params)]:
        typical_p = [batch_params[number].typical_p for number in typical]
        z[typical] = keep_typical(z[typical], torch.tensor(typical_p, dtype=torch.float64, device=z.device)[:, None])


_edits = attrgetter("edits")


def _has_nucleus(params: SamplingParams) -> bool:
    return params.truncates and (params.top_k > 0 or params.top_p < 1.0)


def _has_floor(params: SamplingParams) -> bool:
    return params.truncates and params.min_p > 0.0


def _is_typical(params: SamplingParams) -> bool:
    return params.truncates and params.typical_p < 1.0


def _keep_first(z: Tensor, batch_params: list[SamplingParams]) -> Tensor:
    """Keep the top_k candidates, then of those the first that together reach top_p (at least one).

    A candidate stays if the probability before it, renormalised over the top-k, is below top_p. Sums are float64,
    starting from the most probable candidate, so they do not depend on how many candidates were sorted.
    """
    V = z.shape[1]
    top_k = [min(params.top_k, V) if params.top_k > 0 else V for params in batch_params]
    k = torch.tensor(top_k, device=z.device)[:, None]
    p = torch.tensor([params.top_p for params in batch_params], dtype=torch.float64, device=z.device)[:, None]
    probability = torch.softmax(z.to(torch.float64), dim=1)  # [n, V]
    kept = torch.full_like(z, _NEVER)
    todo = torch.arange(len(batch_params), device=z.device)
    count = min(V, max([_FIRST_CANDIDATES, *(bound for bound in top_k if bound < V)]))
    while len(todo):
        columns = first_columns(z[todo], count)  # [n, count]
        reached = probability[todo].gather(1, columns).cumsum(dim=1)
        within_k = torch.arange(count, device=z.device) < k[todo]
        total = reached.gather(1, (k[todo] - 1).clamp(max=count - 1))
        total = torch.where(k[todo] < V, total, 1.0)
        before = torch.nn.functional.pad(reached, (1, 0))[:, :-1]
        stays = within_k & ((before < p[todo] * total) | (p[todo] >= 1.0))
        kept[todo] = torch.full_like(kept[todo], _NEVER).scatter(
            1, columns, torch.where(stays, z[todo].gather(1, columns), _NEVER)
        )
        # If the last sorted candidate stays, more may have to be kept, unless top-k is reached.
        todo = todo[stays[:, -1] & (k[todo][:, 0] > count)]
        count = min(V, count * 8)
    return kept


def _keep_probable(z: Tensor, min_p: list[float]) -> Tensor:
    """Keep candidates at least min_p times as probable as the most probable one."""
    log_floor = torch.tensor([math.log(fraction) for fraction in min_p], dtype=torch.float64, device=z.device)
    below_best = z.to(torch.float64) - z.amax(dim=1, keepdim=True)
    return torch.where(below_best >= log_floor[:, None], z, _NEVER)


def keep_typical(z: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the candidates closest in information to the entropy until they reach typical_p (at least one); all
    where it is 1. z [..., V], typical_p [..., 1] float64"""
    log_p = torch.log_softmax(z.to(torch.float64), dim=-1)
    probability = log_p.exp()
    possible = z > _NEVER
    information = torch.where(possible, -log_p, 0.0)
    entropy = (probability * information).cumsum(dim=-1)[..., -1:]
    distance = torch.where(possible, (information - entropy).abs(), math.inf)
    columns = torch.sort(distance, dim=-1, stable=True).indices  # equal distances: the lower id first
    reached = probability.gather(-1, columns).cumsum(dim=-1)
    before = torch.nn.functional.pad(reached, (1, 0))[..., :-1]
    stays = torch.zeros_like(possible).scatter(-1, columns, before < typical_p)
    return torch.where(stays | (typical_p >= 1.0), z, _NEVER)


_LOW_WORD = 0xFFFFFFFF


def order_keys(values: Tensor) -> Tensor:
    """Return distinct int64 sort keys, larger for entries that come earlier in the order. values [N, V] float32 without
    NaN -> [N, V]. High word: the float as an integer of the same order; low word: the column, inverted."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    return ordered.mul_(1 << 32).add_(_LOW_WORD - columns)


def first_columns(values: Tensor, count: int) -> Tensor:
    """Return the first `count` columns of each row in order. values [N, V] float32 without NaN -> [N, count] int64"""
    keys = torch.topk(order_keys(values), count, dim=1).values
    return _LOW_WORD - (keys & _LOW_WORD)


_LOUD_NOISE = 6.0
_LOUD_BITS = math.ceil(2.0**32 * math.exp(-math.exp(-_LOUD_NOISE)))
"""Random bits below this give noise below _LOUD_NOISE (399 of 400 cells)."""
_CELLS_AT_ONCE = 1 << 18
"""Cells drawn at a time, to stay in a core's cache."""
_NO_IDS = torch.empty(0, dtype=torch.int64)
_NO_ID = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SampledTokens:
    """The sampled ids of N rows."""

    ids: Tensor  # [N] int64; undefined where not `valid`
    valid: Tensor  # [N] bool: the row had no NaN and at least one possible id


def sample_rows(logits: Tensor, rows: Sequence[SamplingRow] | SamplingRows, banned_ids: Tensor) -> SampledTokens:
    """Sample one id per row with the row's sampling parameters.
    logits [N, V] float32 raw (overwritten), banned_ids [B] int64: never sampled."""
    runs = SamplingRows.of(rows)
    if (library := library_for_logits(logits)) is not None:
        if runs.run_params.is_plain_argmax:
            return SampledTokens(*argmax(library, logits, banned_ids))
        edit(logits, runs, banned_ids)
        return SampledTokens(*_sample(library, logits, runs.batch_params(), runs.positions()))
    process(logits, runs, banned_ids)
    first = logits.argmax(dim=1, keepdim=True)  # the first of equal values; a NaN if there is one
    valid = logits.gather(1, first)[:, 0].isfinite()
    chosen = first[:, 0]
    if runs.run_params.samples:
        batch_params = runs.batch_params(_is_sampled)
        keys = torch.tensor([params.key for params in batch_params], device=logits.device)
        positions = torch.tensor(runs.positions(_is_sampled), device=logits.device)
        if len(batch_params) == len(runs):
            chosen = gumbel_argmax(logits, keys, positions)
        else:
            sampled = runs.numbers(_is_sampled)
            chosen[sampled] = gumbel_argmax(logits[sampled], keys, positions)
    return SampledTokens(chosen, valid)


def _is_sampled(params: SamplingParams) -> bool:
    return not params.greedy


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
    Most probable first, ties by the lower id."""
    logprobs = torch.log_softmax(raw.to(torch.float32), dim=1)
    columns = _top_columns(logprobs, min(num_top, raw.shape[1]))
    chosen = logprobs.gather(1, torch.tensor(ids, dtype=torch.int64, device=raw.device)[:, None])[:, 0]
    top = logprobs.gather(1, columns)
    return [
        IdLogprobs(id_, logprob, tuple(top_ids), tuple(top_logprobs))
        for id_, logprob, top_ids, top_logprobs in zip(
            ids, chosen.tolist(), columns.tolist(), top.tolist(), strict=True
        )
    ]


def _top_columns(values: Tensor, count: int) -> Tensor:
    """Return what `first_columns` does, without sort keys of every column where the compiled library is there."""
    library = library_for_logits(values) if count else None
    if library is None:
        return first_columns(values, count) if count else values.new_empty((len(values), 0), dtype=torch.int64)
    ids, _ = best_of(library, values, _NO_IDS, count)  # ascending: a stable sort keeps the lower of equal ones first
    order = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def library_for_logits(logits: Tensor) -> CpuLibrary | None:
    """Return the compiled library if it supports these logits, else None."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    return cpu_library()


def argmax(library: CpuLibrary, logits: Tensor, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest id [N] int64, ties to the lower id, and whether it is valid [N] bool.
    logits [N, V], overwritten at the banned ids. A row is valid if it has no NaN and its greatest logit is finite."""
    ids, valid = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.argmax(byref(_struct(logits, banned_ids)), ids.data_ptr(), valid.data_ptr(), torch.get_num_threads())
    return ids, valid


def _sample(
    library: CpuLibrary, logits: Tensor, batch_params: list[SamplingParams], positions: list[int]
) -> tuple[Tensor, Tensor]:
    """Return each row's sampled id [N] int64, and whether it is valid [N] bool, from edited logits [N, V] (overwritten
    where typical-p, which has no compiled form, is on)."""
    if typical := [number for number, params in enumerate(batch_params) if params.truncates and _is_typical(params)]:
        some = [batch_params[number] for number in typical]
        z = logits[typical] / _divisors(some, logits)
        truncate(z, some)
        logits[typical] = z
        batch_params = list(batch_params)
        for number in typical:
            batch_params[number] = SamplingParams(key=batch_params[number].key)  # only the noise is left to add
    at = np.array(positions, dtype=np.int64)
    struct, _arrays = sampling_struct(batch_params, at)
    ids, valid = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.sample(
        byref(_struct(logits, _NO_IDS)), byref(struct), ids.data_ptr(), valid.data_ptr(), torch.get_num_threads()
    )
    return ids, valid


def sampling_struct(
    batch_params: Sequence[SamplingParams], positions: Ints
) -> tuple[SamplingStruct, tuple[np.ndarray, ...]]:
    """Return the C struct of each row's parameters, none of them with typical-p, and the arrays that it points to.
    positions [N] int64, contiguous: of the sampled tokens; the struct points to it."""
    sampled = np.array([not params.greedy for params in batch_params])
    divisors = np.array([params.divisor for params in batch_params], dtype=np.float32)
    top_k = np.array([params.top_k for params in batch_params], dtype=np.int64)
    top_p = np.array([params.top_p for params in batch_params], dtype=np.float64)
    log_min_p = np.array([math.log(p.min_p) if p.min_p > 0 else _NEVER for p in batch_params], dtype=np.float64)
    keys = np.array([params.key for params in batch_params], dtype=np.int64)
    arrays = (sampled, divisors, top_k, top_p, log_min_p, keys, positions)
    return SamplingStruct(*(array.ctypes.data for array in arrays)), arrays


def best_of(library: CpuLibrary, logits: Tensor, banned_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's best M = min(count, V) ids, ascending, [N, M] int64, and offsets [N, M] float32.
    logits [N, V], overwritten at the banned ids. An offset is -inf where the logit is, else 0. Ties: the lower ids."""
    count = min(count, logits.shape[1])
    ids, offsets = torch.empty(len(logits), count, dtype=torch.int64), torch.empty(len(logits), count)
    here = byref(_struct(logits, banned_ids))
    library.best_of(here, count, ids.data_ptr(), offsets.data_ptr(), torch.get_num_threads())
    return ids, offsets


def _struct(logits: Tensor, banned_ids: Tensor) -> LogitsStruct:
    rows, vocabulary = logits.shape
    return LogitsStruct(logits.data_ptr(), rows, logits.stride(0), vocabulary, banned_ids.data_ptr(), len(banned_ids))
