"""The sampling parameters of a running batch as tensors, one entry per batch index."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from space_kernels.sampling.sampling_params import SamplingParams

NO_ID = -1
"""Padding of id lists."""
IN_PROMPT = 1 << 30
"""Bit of a token count: the id occurs in the prompt. The lower bits count how often it was generated."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The sampling stages that a launch contains. Logits pass a stage unchanged where a sequence does not use it.

    Known on the host; CUDA graphs are captured per set of stages.
    """

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
    def _of_one(cls, sampling_params: SamplingParams) -> Stages:
        return cls(
            edits=bool(sampling_params.bias or sampling_params.min_tokens or sampling_params.bad_words),
            bounds=bool(sampling_params.allowed_ids),
            penalises=sampling_params.penalises,
            samples=not sampling_params.greedy,
            cuts=not sampling_params.greedy
            and (sampling_params.top_k > 0 or sampling_params.top_p < 1.0 or sampling_params.typical_p < 1.0),
            floors=not sampling_params.greedy and sampling_params.min_p > 0.0,
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

    def holds(self, sampling_params: SamplingParams) -> bool:
        """Whether these parameters' lists fit. Grammars never do: their allowed ids change at every position."""
        return (
            not sampling_params.grammar
            and len(sampling_params.bias) <= self.num_biases
            and len(sampling_params.end_ids) <= self.num_ends
            and len(sampling_params.bad_words) <= self.num_words
            and max(map(len, sampling_params.bad_words), default=0) <= self.word_length
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
            num_biases=max([0, *(len(sampling_params.bias) for sampling_params in batch_params)]),
            num_ends=max([0, *(len(sampling_params.end_ids) for sampling_params in batch_params)]),
            num_words=max([0, *(len(sampling_params.bad_words) for sampling_params in batch_params)]),
            word_length=max(
                [1, *(len(word) for sampling_params in batch_params for word in sampling_params.bad_words)]
            ),
        )
        bounds = any(sampling_params.allowed_ids for sampling_params in batch_params)
        tensors = cls.empty(len(batch_params), vocab_size, room=room, bounds=bounds, device=device)
        for batch_index, sampling_params in enumerate(batch_params):
            tensors.put(batch_index, sampling_params)
        return tensors

    def put(self, batch_index: int, sampling_params: SamplingParams) -> None:
        """Write one sequence's parameters. Raises ValueError if its lists do not fit (`SamplingCapacity.holds`)."""
        if not self.room.holds(sampling_params) or (sampling_params.allowed_ids and not self.allowed.shape[1]):
            raise ValueError(
                f"Sampling parameters with {len(sampling_params.bias)} biases, {len(sampling_params.end_ids)} end ids, "
                f"{len(sampling_params.bad_words)} bad words and "
                f"{len(sampling_params.allowed_ids)} allowed ids do not fit {self.room}, with "
                f"{'all' if self.allowed.shape[1] else 'no'} allowed ids: make more room or step it on the host."
            )
        neutral = sampling_params.greedy
        values: list[tuple[Tensor, float]] = [
            (self.key, sampling_params.key),
            (self.greedy, sampling_params.greedy),
            (self.divisor, sampling_params.divisor),
            (self.top_k, sampling_params.top_k if sampling_params.top_k > 0 and not neutral else self.vocab_size),
            (self.top_p, 1.0 if neutral else sampling_params.top_p),
            (
                self.log_min_p,
                math.log(sampling_params.min_p) if sampling_params.min_p > 0.0 and not neutral else -math.inf,
            ),
            (self.typical_p, 1.0 if neutral else sampling_params.typical_p),
            (self.repetition, sampling_params.repetition_penalty),
            (self.presence, sampling_params.presence_penalty),
            (self.frequency, sampling_params.frequency_penalty),
            (self.min_tokens, sampling_params.min_tokens),
        ]
        for tensor, value in values:
            tensor[batch_index].fill_(value)
        biased = [id_ for id_, _ in sampling_params.bias]
        send(self.bias_ids[batch_index], _list(biased, self.room.num_biases))
        send(self.bias[batch_index], _list([value for _, value in sampling_params.bias], self.room.num_biases, 0.0))
        send(self.end_ids[batch_index], _list(sampling_params.end_ids, self.room.num_ends))
        words = [[NO_ID] * (self.room.word_length - len(word)) + list(word) for word in sampling_params.bad_words]
        words += [[NO_ID] * self.room.word_length] * (self.room.num_words - len(words))
        send(
            self.words[batch_index],
            torch.tensor(words, dtype=torch.int64).view(self.room.num_words, self.room.word_length),
        )
        if self.allowed.shape[1]:
            send(self.allowed[batch_index], _bits(sampling_params.allowed_ids, self.allowed.shape[1]))


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
