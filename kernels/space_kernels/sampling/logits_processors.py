"""The logits processors: every stage of SPACE §3 in order, applied to rows of logits with the state of their prefixes.

    raw logits -> bias, allowed and banned ids, grammar, min_tokens, bad words
               -> repetition, presence, frequency penalties
               -> ÷ temperature -> top-k -> top-p -> min-p -> typical-p

A chain row's prefix is hypothetical: the known ids, then the drafts before it. Every stage treats each row separately,
so a row's result does not depend on the other rows. Stages that no row uses cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from space_kernels.sampling.sampling_params import SamplingParams, TokenListTensors
from space_kernels.sampling.sampling_rows import SamplingRow as SamplingRow
from space_kernels.sampling.sampling_rows import SamplingRows
from space_kernels.sampling.sampling_rows import TokenCounts as TokenCounts

_NEVER = -math.inf
_FIRST_CANDIDATES = 256
"""Candidates sorted first for top-p; rows that need more are sorted deeper. The result does not depend on it."""

_CEILINGS = torch.where((torch.arange(256)[:, None] >> torch.arange(8) & 1).bool(), math.inf, -math.inf)
"""[256, 8]: for each byte, infinity for a set bit and -infinity for a clear one, lowest bit first."""


def process(logits: Tensor, rows: Sequence[SamplingRow], banned_ids: Tensor) -> Tensor:
    """Apply all stages to each row, in place; impossible ids become -inf.

    logits [N, V] float32 (overwritten and returned), N rows, banned_ids [B] int64 (impossible in every row).
    """
    runs = SamplingRows.of(rows)
    edit(logits, runs, banned_ids)
    divide(logits, runs)
    truncate(logits, runs)
    return logits


def edit(logits: Tensor, rows: Sequence[SamplingRow], banned_ids: Tensor) -> None:
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

    The minimum of these and the logits masks without branches, and keeps the bits of allowed logits.
    """
    P, W = words.shape
    in_bytes = words.view(torch.uint8)  # [P, 4·W], little-endian: byte b holds ids 8·b, 8·b + 1, …
    of_bits = _CEILINGS.to(words.device).index_select(0, in_bytes.flatten().int())  # [4·P·W, 8]
    return of_bits.view(P, 32 * W)[:, :num_ids]


def _ban(logits: Tensor, edited: list[tuple[int, SamplingRow]]) -> None:
    bans: list[tuple[int, Tensor]] = []
    behind: list[tuple[int, int]] = []
    for number, row in edited:
        sampling_params = row.sampling_params
        if sampling_params.end_ids and row.num_generated < sampling_params.min_tokens:
            bans.append((number, TokenListTensors.of(sampling_params, logits).end_ids))
        if sampling_params.bad_words:
            lists = TokenListTensors.of(sampling_params, logits)
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
    device = logits.device
    counts = [row.counts or TokenCounts(row.ids, row.num_prompt, logits.shape[1], device) for _, row in penalised]
    output = torch.stack([of_row.output for of_row in counts])  # [P, V]
    seen = torch.stack([of_row.seen for of_row in counts])
    ahead = [(p, id_) for p, (_, row) in enumerate(penalised) for id_ in row.tail]
    if ahead:
        at = _cells(ahead, device)
        output.index_put_(at, torch.ones(len(ahead), dtype=output.dtype, device=device), accumulate=True)
        seen[at] = True

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=device)[:, None]

    repetition = column([row.sampling_params.repetition_penalty for _, row in penalised])
    presence = column([row.sampling_params.presence_penalty for _, row in penalised])
    frequency = column([row.sampling_params.frequency_penalty for _, row in penalised])
    numbers = [number for number, _ in penalised]
    z = logits[numbers]
    z = torch.where(seen, torch.where(z > 0, z / repetition, z * repetition), z)
    z = z - presence * (output > 0)
    logits[numbers] = z - frequency * output


def divide(logits: Tensor, rows: SamplingRows) -> None:
    """Divide by the temperature, in place; rows at temperature 0 stay unchanged."""
    if rows.run_params.divides:
        divisors = [sampling_params.divisor for sampling_params in rows.batch_params()]
        logits /= torch.tensor(divisors, dtype=logits.dtype, device=logits.device)[:, None]


def truncate(z: Tensor, rows: SamplingRows) -> None:
    """Apply top-k, top-p, min-p and typical-p, in place, to logits already divided by the temperature."""
    if not rows.run_params.truncates:
        return
    if nucleus := rows.numbers(_has_nucleus):
        z[nucleus] = _keep_first(z[nucleus], rows.batch_params(_has_nucleus))
    if floored := rows.numbers(_has_floor):
        z[floored] = _keep_probable(
            z[floored], [sampling_params.min_p for sampling_params in rows.batch_params(_has_floor)]
        )
    if typical := rows.numbers(_is_typical):
        z[typical] = _keep_typical(
            z[typical], [sampling_params.typical_p for sampling_params in rows.batch_params(_is_typical)]
        )


_edits = attrgetter("edits")


def _has_nucleus(sampling_params: SamplingParams) -> bool:
    return sampling_params.truncates and (sampling_params.top_k > 0 or sampling_params.top_p < 1.0)


def _has_floor(sampling_params: SamplingParams) -> bool:
    return sampling_params.truncates and sampling_params.min_p > 0.0


def _is_typical(sampling_params: SamplingParams) -> bool:
    return sampling_params.truncates and sampling_params.typical_p < 1.0


def _keep_first(z: Tensor, batch_params: list[SamplingParams]) -> Tensor:
    """Keep the top_k candidates, then of those the first that together reach top_p (at least one).

    A candidate stays if the probability before it, renormalised over the top-k, is below top_p. Sums are float64,
    starting from the most probable candidate, so they do not depend on how many candidates were sorted.
    """
    V = z.shape[1]
    top_k = [min(sampling_params.top_k, V) if sampling_params.top_k > 0 else V for sampling_params in batch_params]
    k = torch.tensor(top_k, device=z.device)[:, None]
    p = torch.tensor([sampling_params.top_p for sampling_params in batch_params], dtype=torch.float64, device=z.device)[
        :, None
    ]
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


def _keep_typical(z: Tensor, typical_p: list[float]) -> Tensor:
    """Keep the candidates whose information is closest to the entropy until they reach typical_p (at least one)."""
    log_p = torch.log_softmax(z.to(torch.float64), dim=1)
    probability = log_p.exp()
    possible = z > _NEVER
    information = torch.where(possible, -log_p, 0.0)
    entropy = (probability * information).cumsum(dim=1)[:, -1:]
    distance = torch.where(possible, (information - entropy).abs(), math.inf)
    columns = torch.sort(distance, dim=1, stable=True).indices  # equal distances: the lower id first
    reached = probability.gather(1, columns).cumsum(dim=1)
    before = torch.nn.functional.pad(reached, (1, 0))[:, :-1]
    mass = torch.tensor(typical_p, dtype=torch.float64, device=z.device)[:, None]
    stays = torch.zeros_like(possible).scatter(1, columns, before < mass)
    return torch.where(stays, z, _NEVER)


_LOW_WORD = 0xFFFFFFFF


def order_keys(values: Tensor) -> Tensor:
    """Return distinct int64 sort keys, larger for entries that come earlier in the order.

    values [N, V] float32 without NaN -> [N, V]. High word: the float as an integer of the same order; low word: the
    column, inverted.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    return ordered.mul_(1 << 32).add_(_LOW_WORD - columns)


def first_columns(values: Tensor, count: int) -> Tensor:
    """Return the first `count` columns of each row in order. values [N, V] float32 without NaN -> [N, count] int64"""
    keys = torch.topk(order_keys(values), count, dim=1).values
    return _LOW_WORD - (keys & _LOW_WORD)
