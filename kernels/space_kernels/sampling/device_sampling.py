"""Sampling for a whole step by tensor operations alone: the reference of the Triton kernels.

The stages are those of `sampler`, with parameters in tensors instead of Python objects. Nothing reads a tensor's value
on the host, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from space_kernels.sampling.noise import gumbel
from space_kernels.sampling.sampler import SampledTokens, first_columns, keep_typical, order_keys
from space_kernels.sampling.sampling_params import SamplingParams

NO_ID = -1
"""Padding of id lists."""
IN_PROMPT = 1 << 30
"""Bit of a token count: the id occurs in the prompt. The lower bits count how often it was generated."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The sampling stages that a launch contains. Logits pass a stage unchanged where a sequence does not use it.
    Known on the host; CUDA graphs are captured per set of stages."""

    edits: bool = False  # bias, min_tokens, bad words
    bounds: bool = False  # allowed ids
    penalises: bool = False
    samples: bool = False  # some sequence is not greedy
    cuts: bool = False  # top-k, top-p, typical-p
    floors: bool = False  # min-p

    @classmethod
    def of(cls, batch_params: Iterable[SamplingParams]) -> Stages:
        """Return the stages that any of these parameters need."""
        return reduce(cls.__or__, map(cls._of_one, batch_params), cls())

    @classmethod
    def _of_one(cls, params: SamplingParams) -> Stages:
        return cls(
            edits=bool(params.bias or params.min_tokens or params.bad_words),
            bounds=bool(params.allowed_ids),
            penalises=params.penalises,
            samples=not params.greedy,
            cuts=not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.typical_p < 1.0),
            floors=not params.greedy and params.min_p > 0.0,
        )

    def __or__(self, other: Stages) -> Stages:
        """Return the union."""
        return Stages(
            self.edits or other.edits,
            self.bounds or other.bounds,
            self.penalises or other.penalises,
            self.samples or other.samples,
            self.cuts or other.cuts,
            self.floors or other.floors,
        )


@dataclass(frozen=True, slots=True)
class SamplingCapacity:
    """Maximum list lengths of a batch's sampling parameters."""

    num_biases: int = 64
    num_ends: int = 16  # EOS and stop ids
    num_words: int = 16  # bad words
    word_length: int = 8  # ids of a bad word

    def holds(self, params: SamplingParams) -> bool:
        """Whether these parameters' lists fit. Grammars never do: their allowed ids change at every position."""
        return (
            not params.grammar
            and len(params.bias) <= self.num_biases
            and len(params.end_ids) <= self.num_ends
            and len(params.bad_words) <= self.num_words
            and max(map(len, params.bad_words), default=0) <= self.word_length
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of S sequences. `put` writes one batch index in place; addresses never change."""

    vocab_size: int
    room: SamplingCapacity
    key: Tensor  # [S] int64
    greedy: Tensor  # [S] bool
    divisor: Tensor  # [S] float32
    top_k: Tensor  # [S] int64; the whole vocabulary where off
    top_p: Tensor  # [S] float64; 1 where off
    log_min_p: Tensor  # [S] float64; -inf where off
    typical_p: Tensor  # [S] float64; 1 where off
    repetition: Tensor  # [S] float32
    presence: Tensor  # [S] float32
    frequency: Tensor  # [S] float32
    bias_ids: Tensor  # [S, num_biases] int64, then NO_ID
    bias: Tensor  # [S, num_biases] float32
    min_tokens: Tensor  # [S] int64
    end_ids: Tensor  # [S, num_ends] int64, then NO_ID
    words: Tensor  # [S, num_words, word_length] int64, NO_ID before the ids of a bad word
    allowed: Tensor  # [S, ceil(V / 32)] int32: bit v % 32 of word v // 32 allows id v; [S, 0] if not supported

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        vocab_size: int,
        *,
        room: SamplingCapacity | None = None,
        bounds: bool = False,
        device: torch.device | str = "cpu",
    ) -> SamplingTensors:
        """Allocate for S sequences, greedy and neutral. `bounds`: support allowed ids, one bit per vocabulary id."""
        room = room or SamplingCapacity()
        S = num_sequences

        def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        ids, single, double = torch.int64, torch.float32, torch.float64
        return cls(
            vocab_size=vocab_size,
            room=room,
            key=filled((S,), 0, ids),
            greedy=filled((S,), True, torch.bool),
            divisor=filled((S,), 1.0, single),
            top_k=filled((S,), vocab_size, ids),
            top_p=filled((S,), 1.0, double),
            log_min_p=filled((S,), -math.inf, double),
            typical_p=filled((S,), 1.0, double),
            repetition=filled((S,), 1.0, single),
            presence=filled((S,), 0.0, single),
            frequency=filled((S,), 0.0, single),
            bias_ids=filled((S, room.num_biases), NO_ID, ids),
            bias=filled((S, room.num_biases), 0.0, single),
            min_tokens=filled((S,), 0, ids),
            end_ids=filled((S, room.num_ends), NO_ID, ids),
            words=filled((S, room.num_words, room.word_length), NO_ID, ids),
            allowed=filled((S, -(-vocab_size // 32) if bounds else 0), -1, torch.int32),
        )

    @classmethod
    def of(
        cls, batch_params: list[SamplingParams], vocab_size: int, *, device: torch.device | str = "cpu"
    ) -> SamplingTensors:
        """Build from these parameters, with the smallest capacity that holds them."""
        room = SamplingCapacity(
            num_biases=max([0, *(len(params.bias) for params in batch_params)]),
            num_ends=max([0, *(len(params.end_ids) for params in batch_params)]),
            num_words=max([0, *(len(params.bad_words) for params in batch_params)]),
            word_length=max([1, *(len(word) for params in batch_params for word in params.bad_words)]),
        )
        bounds = any(params.allowed_ids for params in batch_params)
        tensors = cls.empty(len(batch_params), vocab_size, room=room, bounds=bounds, device=device)
        for batch_index, params in enumerate(batch_params):
            tensors.put(batch_index, params)
        return tensors

    def put(self, batch_index: int, params: SamplingParams) -> None:
        """Write one sequence's parameters. Raises ValueError if its lists do not fit (`SamplingCapacity.holds`)."""
        if not self.room.holds(params) or (params.allowed_ids and not self.allowed.shape[1]):
            raise ValueError(
                f"Sampling parameters with {len(params.bias)} biases, {len(params.end_ids)} end ids, "
                f"{len(params.bad_words)} bad words and "
                f"{len(params.allowed_ids)} allowed ids do not fit {self.room}, with "
                f"{'all' if self.allowed.shape[1] else 'no'} allowed ids: make more room or step it on the host."
            )
        neutral = params.greedy
        values: list[tuple[Tensor, float]] = [
            (self.key, params.key),
            (self.greedy, params.greedy),
            (self.divisor, params.divisor),
            (self.top_k, params.top_k if params.top_k > 0 and not neutral else self.vocab_size),
            (self.top_p, 1.0 if neutral else params.top_p),
            (self.log_min_p, math.log(params.min_p) if params.min_p > 0.0 and not neutral else -math.inf),
            (self.typical_p, 1.0 if neutral else params.typical_p),
            (self.repetition, params.repetition_penalty),
            (self.presence, params.presence_penalty),
            (self.frequency, params.frequency_penalty),
            (self.min_tokens, params.min_tokens),
        ]
        for tensor, value in values:
            tensor[batch_index].fill_(value)
        biased = [id_ for id_, _ in params.bias]
        send(self.bias_ids[batch_index], _list(biased, self.room.num_biases))
        send(self.bias[batch_index], _list([value for _, value in params.bias], self.room.num_biases, 0.0))
        send(self.end_ids[batch_index], _list(params.end_ids, self.room.num_ends))
        words = [[NO_ID] * (self.room.word_length - len(word)) + list(word) for word in params.bad_words]
        words += [[NO_ID] * self.room.word_length] * (self.room.num_words - len(words))
        send(
            self.words[batch_index],
            torch.tensor(words, dtype=torch.int64).view(self.room.num_words, self.room.word_length),
        )
        if self.allowed.shape[1]:
            send(self.allowed[batch_index], _bits(params.allowed_ids, self.allowed.shape[1]))


def send(target: Tensor, values: Tensor) -> None:
    """Copy host `values` to a device tensor asynchronously, in stream order."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def _list(values: Iterable[float], width: int, fill: float = NO_ID) -> Tensor:
    known = list(values)
    dtype = torch.int64 if isinstance(fill, int) else torch.float32
    return torch.tensor(known + [fill] * (width - len(known)), dtype=dtype)


def _bits(allowed_ids: tuple[int, ...], num_words: int) -> Tensor:
    """Return one bit per id, all set if `allowed_ids` is empty."""
    if not allowed_ids:
        return torch.full((num_words,), -1, dtype=torch.int32)
    allowed = torch.zeros(num_words * 32, dtype=torch.int64)
    allowed[list(allowed_ids)] = 1
    words = (allowed.view(num_words, 32) << torch.arange(32)).sum(dim=1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def token_counts(ids: Iterable[int], num_prompt: int, vocab_size: int) -> Tensor:
    """Return [V] int32: how often each id was generated, plus IN_PROMPT for ids of the prompt."""
    known = torch.tensor(list(ids), dtype=torch.int64)
    counts = torch.bincount(known[num_prompt:], minlength=vocab_size)
    in_prompt = torch.bincount(known[:num_prompt], minlength=vocab_size) > 0
    return (counts + IN_PROMPT * in_prompt).to(torch.int32)


_NEVER = -math.inf
_LOW_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of J rows per sequence. Row j follows the known ids and the first num_tail[s, j] ids of the tail."""

    positions: Tensor  # [S] int64: absolute position of the token sampled by the first row; later rows follow
    tails: Tensor  # [S, T] int64: drafts for a chain row, emitted ids for a mask
    num_tail: Tensor  # [S, J] int64
    bans: Tensor | None  # [S, J, X] int64: ids impossible in single rows, padded with NO_ID; used if `stages.edits`

    def at(self, row: int) -> Prefixes:
        """Return those of this row alone."""
        bans = None if self.bans is None else self.bans[:, row : row + 1]
        return Prefixes(self.positions + row, self.tails, self.num_tail[:, row : row + 1], bans)


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
        z = keep_typical(z, batch_params.typical_p[:, None, None])
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
    """Apply top-k, then top-p among those: `sampler._keep_first` with every candidate sorted."""
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
