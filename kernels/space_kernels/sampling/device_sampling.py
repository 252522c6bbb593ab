"""Sampling for a whole step by tensor operations alone: the reference of the Triton kernels.

The stages are those of `logits_processors` and `choice`, with parameters in tensors instead of Python objects. Nothing
reads a tensor's value on the host, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.sampling.logits_processors import first_columns, order_keys
from space_kernels.sampling.noise import gumbel
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.sampling.sampling_tensors import IN_PROMPT, SamplingTensors, Stages

_NEVER = -math.inf
_LOW_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of J rows per sequence. Row j follows the known ids and the first num_tail[s, j] ids of the tail."""

    positions: Tensor  # [S] int64: absolute position of the token sampled by the first row; later rows follow
    tails: Tensor  # [S, T] int64: drafts for a chain row, emitted ids for a mask
    num_tail: Tensor  # [S, J] int64
    bans: Tensor | None  # [S, J, X] int64: ids impossible in single rows, padded with NO_ID; used if `stages.edits`


def sample(
    logits: Tensor,
    batch_params: SamplingTensors,
    stages: Stages,
    prefixes: Prefixes,
    banned_ids: Tensor,
    counts: Tensor | None = None,
) -> SampledTokens:
    """Sample J rows of each of S sequences: ids and valid, [S, J] each.

    logits [S, J, V] float32 raw (overwritten); banned_ids [M] int64: never sampled; counts [S, V] int32:
    `sampling_tensors.token_counts` of the known ids, required if `stages.penalises`.
    """
    S, J, V = logits.shape
    z = edit(logits, batch_params, stages, prefixes, banned_ids, counts)
    z = z / batch_params.divisor[:, None, None]
    if stages.cuts:
        z = _first(z, batch_params)
    if stages.floors:
        best = z.amax(dim=2, keepdim=True)
        z = torch.where(z.to(torch.float64) - best >= batch_params.log_min_p[:, None, None], z, _NEVER)
    if stages.cuts:
        z = _typical(z, batch_params)
    first = z.argmax(dim=2, keepdim=True)
    valid = z.gather(2, first)[..., 0].isfinite()
    chosen = first[..., 0]
    if stages.samples:
        places = prefixes.positions[:, None] + torch.arange(J, device=logits.device)
        ids = torch.arange(V, device=z.device).expand(S * J, V)
        noise = gumbel(batch_params.key.repeat_interleave(J), places.flatten(), ids)
        sampled = (z.to(torch.float64) + noise.view(S, J, V)).argmax(dim=2)
        chosen = torch.where(batch_params.greedy[:, None], chosen, sampled)
    return SampledTokens(chosen, valid)


def edit(
    logits: Tensor,
    batch_params: SamplingTensors,
    stages: Stages,
    prefixes: Prefixes,
    banned_ids: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """Apply the stages before the temperature; arguments as in `sample`. Returns [S, J, V], possibly in place."""
    z = logits
    if stages.edits:
        z = _biased(z, batch_params)
    if stages.bounds:
        z = torch.where(_allowed(batch_params)[:, None], z, _NEVER)
    if len(banned_ids):
        z = z.index_fill(2, banned_ids, _NEVER)
    if stages.edits and prefixes.bans is not None and prefixes.bans.shape[2]:
        z = _without(z, prefixes.bans)
    if stages.penalises:
        if counts is None:
            raise ValueError("Penalties need `counts`.")
        z = _penalised(z, batch_params, counts, prefixes.tails, prefixes.num_tail)
    return z


def end_bans(batch_params: SamplingTensors, num_generated: Tensor) -> Tensor:
    """Return the end ids banned by min_tokens. num_generated [S, J] -> [S, J, num_ends], NO_ID elsewhere."""
    early = num_generated < batch_params.min_tokens[:, None]  # [S, J]
    return torch.where(early[..., None], batch_params.end_ids[:, None], -1)


def word_bans(
    batch_params: SamplingTensors,
    history: Tensor,
    num_known: Tensor,
    tails: Tensor,
    num_tail: Tensor,
    num_unknown: Tensor,
) -> Tensor:
    """Return the last id of each bad word whose other ids end the row's prefix; [S, J, num_words], NO_ID elsewhere.

    history [S, window] int64: known ids, the first num_known [S] of each; tails, num_tail: as in `sample`;
    num_unknown [J] int64: ids between prefix and sampled id that are not known yet (earlier drafts, for a mask).
    """
    S, J = num_tail.shape
    length = batch_params.words.shape[2]
    back = torch.arange(length - 1, 0, -1, device=history.device)  # [L-1] the last one is 1 back
    place = (num_known[:, None] + num_tail)[..., None] - back  # [S, J, L-1]
    in_tail = place - num_known[:, None, None]
    before = history[:, None].expand(S, J, -1).gather(2, place.clamp(0, history.shape[1] - 1))
    if tails.shape[1]:
        behind = tails[:, None].expand(S, J, -1).gather(2, in_tail.clamp(0, tails.shape[1] - 1))
        before = torch.where(in_tail >= 0, behind, before)
    before = torch.where(place >= 0, before, -2)  # [S, J, L-1]: -2 is neither an id nor NO_ID
    heads, last = batch_params.words[:, None, :, :-1], batch_params.words[:, None, :, -1]
    ends_so = ((heads == before[:, :, None]) | (heads < 0)).all(dim=3)  # [S, J, words]
    known = num_unknown[:, None] == 0
    alone = (heads < 0).all(dim=3)
    return torch.where(ends_so & (known | alone), last, -1)


def log_probabilities(raw: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 log-probabilities [N] of raw logits [N, V] at ids [N], and the num_top most probable ids with
    their log-probabilities, [N, num_top] int64 and float32: most probable first, ties by the lower id."""
    logprobs = torch.log_softmax(raw.to(torch.float32), dim=1)
    columns = first_columns(logprobs, min(num_top, raw.shape[1]))
    return logprobs.gather(1, ids[:, None])[:, 0], columns, logprobs.gather(1, columns)


def _biased(z: Tensor, batch_params: SamplingTensors) -> Tensor:
    S, J, _ = z.shape
    at, values = _columns(batch_params.bias_ids, z), torch.where(batch_params.bias_ids >= 0, batch_params.bias, 0.0)
    wide = torch.nn.functional.pad(z, (0, 1))  # an extra column receives the lists' padding
    shape = (S, J, at.shape[1])
    return wide.scatter_add(2, at[:, None].expand(shape), values[:, None].expand(shape))[..., :-1]


def _without(z: Tensor, bans: Tensor) -> Tensor:
    wide = torch.nn.functional.pad(z, (0, 1))
    return wide.scatter(2, _columns(bans, z), _NEVER)[..., :-1]


def _columns(ids: Tensor, z: Tensor) -> Tensor:
    """Return the target columns of listed ids; padding goes to the extra column after the vocabulary."""
    return torch.where(ids >= 0, ids, z.shape[2])


def _allowed(batch_params: SamplingTensors) -> Tensor:
    ids = torch.arange(batch_params.vocab_size, device=batch_params.allowed.device)
    return (batch_params.allowed[:, ids // 32] >> (ids % 32)) & 1 != 0  # [S, V]


def _penalised(z: Tensor, batch_params: SamplingTensors, counts: Tensor, tails: Tensor, num_tail: Tensor) -> Tensor:
    S, J, V = z.shape
    output = (counts & (IN_PROMPT - 1))[:, None].expand(S, J, V)
    if tails.shape[1]:
        counted = torch.arange(tails.shape[1], device=z.device) < num_tail[..., None]  # [S, J, T]
        at = tails[:, None].expand(counted.shape)
        output = output.scatter_add(2, at, counted.to(output.dtype))
    seen = (output > 0) | (counts >= IN_PROMPT)[:, None]

    def column(values: Tensor) -> Tensor:
        return values[:, None, None]

    repetition = column(batch_params.repetition)
    z = torch.where(seen, torch.where(z > 0, z / repetition, z * repetition), z)
    z = z - column(batch_params.presence) * (output > 0)
    return z - column(batch_params.frequency) * output


def _first(z: Tensor, batch_params: SamplingTensors) -> Tensor:
    """Apply top-k, then top-p among those: `logits_processors._keep_first` with every candidate sorted."""
    S, J, V = z.shape
    k, p = batch_params.top_k.clamp(max=V)[:, None, None], batch_params.top_p[:, None, None]
    keys = order_keys(z.reshape(S * J, V)).sort(dim=1, descending=True).values.view(S, J, V)
    columns = _LOW_WORD - (keys & _LOW_WORD)
    reached = torch.softmax(z.to(torch.float64), dim=2).gather(2, columns).cumsum(dim=2)
    total = torch.where(k < V, reached.gather(2, (k - 1).expand(S, J, 1)), 1.0)
    before = torch.nn.functional.pad(reached, (1, 0))[..., :-1]
    stays = (torch.arange(V, device=z.device) < k) & ((before < p * total) | (p >= 1.0))
    kept = torch.zeros_like(stays).scatter(2, columns, stays)
    return torch.where(kept | ((k >= V) & (p >= 1.0)), z, _NEVER)


def _typical(z: Tensor, batch_params: SamplingTensors) -> Tensor:
    """As `logits_processors._keep_typical`."""
    log_p = torch.log_softmax(z.to(torch.float64), dim=2)
    probability = log_p.exp()
    possible = z > _NEVER
    information = torch.where(possible, -log_p, 0.0)
    entropy = (probability * information).cumsum(dim=2)[..., -1:]
    distance = torch.where(possible, (information - entropy).abs(), math.inf)
    columns = torch.sort(distance, dim=2, stable=True).indices  # equal distances: the lower id first
    reached = probability.gather(2, columns).cumsum(dim=2)
    before = torch.nn.functional.pad(reached, (1, 0))[..., :-1]
    mass = batch_params.typical_p[:, None, None]
    stays = torch.zeros_like(possible).scatter(2, columns, before < mass)
    return torch.where(stays | (mass >= 1.0), z, _NEVER)
