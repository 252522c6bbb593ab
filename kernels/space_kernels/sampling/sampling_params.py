"""The sampling parameters of one request (SPACE §3), parsed and frozen, and its lists as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-6
"""Smaller positive temperatures are raised to this, so that dividing by them does not overflow a finite logit."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. Stages apply in the order of the field groups; defaults are neutral."""

    key: int = 0  # noise key (noise.request_key), an int64

    bias: tuple[tuple[int, float], ...] = ()  # (id, added to its raw logit), ids distinct
    allowed_ids: tuple[int, ...] = ()  # if not empty: every other id is impossible
    grammar: str = ""  # name of the grammar that limits the ids of each row (SamplingRow.possible); "": none
    min_tokens: int = 0  # end_ids are impossible before this many generated ids
    end_ids: tuple[int, ...] = ()  # EOS and stop ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # a word's last id is impossible after its other ids

    repetition_penalty: float = 1.0  # ids of prompt and output: logit ÷ penalty if positive, × penalty if negative
    presence_penalty: float = 0.0  # ids of the output: logit - penalty
    frequency_penalty: float = 0.0  # ids of the output: logit - penalty·count

    temperature: float = 1.0  # 0: greedy; the parameters below then have no effect
    top_k: int = 0  # keep the k most probable ids; 0: off
    top_p: float = 1.0  # keep the most probable ids that together reach this probability; 1: off
    min_p: float = 0.0  # keep ids at least this fraction as probable as the most probable one; 0: off
    typical_p: float = 1.0  # keep the ids of most typical information that together reach this probability; 1: off

    @cached_property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without noise."""
        return self.temperature == 0.0

    @cached_property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, or 1 if greedy."""
        return 1.0 if self.greedy else max(self.temperature, MIN_TEMPERATURE)

    @cached_property
    def penalises(self) -> bool:
        """Whether any penalty is on, so that counts of earlier ids are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def ending(self) -> SamplingParams:
        """These parameters for a complete grammar, after which only an end id can follow: nothing forbids the end."""
        return replace(self, allowed_ids=(), min_tokens=0, bad_words=())

    @cached_property
    def lists(self) -> dict[tuple[int, torch.dtype, torch.device], TokenListTensors]:
        """Cache of the lists as tensors, by vocabulary size, dtype and device of the logits."""
        return {}

    @cached_property
    def edits(self) -> bool:
        """Whether any stage before the temperature is on."""
        listed = self.bias or self.allowed_ids or self.min_tokens or self.bad_words
        return bool(listed or self.grammar or self.penalises)

    @cached_property
    def truncates(self) -> bool:
        """Whether any stage after the temperature is on."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenListTensors:
    """Biases, allowed ids, end ids and bad words of one request, on the device of the logits."""

    bias_ids: Tensor  # [B] int64
    biases: Tensor  # [B], dtype of the logits
    forbidden: Tensor | None  # [V] bool: every id that is not allowed; None: all are
    end_ids: Tensor  # [E] int64
    banned: Tensor  # [W] int64: bad words of one id
    bad_behind: Mapping[int, Sequence[tuple[int, ...]]]  # longer bad words, by their second-last id

    @classmethod
    def of(cls, params: SamplingParams, logits: Tensor) -> TokenListTensors:
        """Return the tensors for logits [N, V], built on first use and cached in the parameters."""
        kind = (logits.shape[1], logits.dtype, logits.device)
        found = params.lists.get(kind)
        if found is None:
            found = params.lists[kind] = cls._made(params, logits)
        return found

    @classmethod
    def _made(cls, params: SamplingParams, logits: Tensor) -> TokenListTensors:
        def of_ids(ids: Sequence[int]) -> Tensor:
            return torch.tensor(ids, dtype=torch.int64, device=logits.device)

        forbidden = None
        if params.allowed_ids:
            forbidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            forbidden[of_ids(params.allowed_ids)] = False
        behind: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                behind.setdefault(word[-2], []).append(word)
        return cls(
            bias_ids=of_ids([id_ for id_, _ in params.bias]),
            biases=torch.tensor([value for _, value in params.bias], dtype=logits.dtype, device=logits.device),
            forbidden=forbidden,
            end_ids=of_ids(params.end_ids),
            banned=of_ids([word[0] for word in params.bad_words if len(word) == 1]),
            bad_behind=behind,
        )


IdBits = npt.NDArray[np.int32]
"""A set of ids as bits [ceil(V / 32)]: id v is bit v % 32 of word v // 32."""


class TokenCounts:
    """Occurrences of each id in one sequence, for penalties; updated incrementally."""

    def __init__(
        self, ids: Sequence[int], num_prompt: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        known = torch.tensor(ids, dtype=torch.int64, device=device)
        self.output = torch.bincount(known[num_prompt:], minlength=vocab_size)  # [V] int64
        self.seen = torch.bincount(known, minlength=vocab_size) > 0  # [V] bool

    def extend(self, ids: Sequence[int]) -> None:
        """Count newly generated ids."""
        new = torch.tensor(ids, dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, new, torch.ones_like(new))
        self.seen[new] = True


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row to be sampled: its sampling parameters and its prefix."""

    sampling_params: SamplingParams
    ids: Sequence[int]  # known ids of the sequence: prompt, then output
    num_prompt: int
    tail: Sequence[int] = ()  # hypothetical ids after them: drafts
    counts: TokenCounts | None = field(default=None)  # of `ids`; None: counted on demand
    num_unknown: int = 0  # ids between prefix and sampled id that are not known yet (for a mask's draft)
    possible: IdBits | None = None  # ids that the grammar allows after the prefix; None: all

    @property
    def position(self) -> int:
        """Absolute position of the token being sampled."""
        return len(self.ids) + len(self.tail) + self.num_unknown

    @property
    def num_generated(self) -> int:
        """Number of generated ids before this one."""
        return self.position - self.num_prompt

    @property
    def last_id(self) -> int | None:
        """The id before the sampled one, or None if it is not known."""
        if self.num_unknown or not self.position:
            return None
        return self.tail[-1] if self.tail else self.ids[-1]

    def ends_with(self, head: Sequence[int]) -> bool:
        """Whether the prefix ends with these ids; False while ids before the sampled one are unknown."""
        if not head:
            return True
        if self.num_unknown or len(head) > self.position:
            return False
        missing = len(head) - len(self.tail)
        behind = self.tail[len(self.tail) - len(head) :] if missing <= 0 else self.tail
        before = self.ids[len(self.ids) - missing :] if missing > 0 else ()
        return [*before, *behind] == list(head)


class BatchSamplingParams(tuple[SamplingParams, ...]):
    """The sampling parameters of a step's sequences, with properties of the whole batch. Immutable."""

    def __init__(self, batch_params: Sequence[SamplingParams]) -> None:
        self.edits = any(params.edits for params in batch_params)
        self.divides = any(params.divisor != 1.0 for params in batch_params)
        self.truncates = any(params.truncates for params in batch_params)
        self.is_typical = any(params.truncates and params.typical_p < 1.0 for params in batch_params)
        self.samples = not all(params.greedy for params in batch_params)
        self.keys = np.array([params.key for params in batch_params], dtype=np.int64)

    @property
    def is_plain_argmax(self) -> bool:
        """Whether every row samples the greatest logit that is not banned."""
        return not (self.edits or self.divides or self.truncates or self.samples)

    @classmethod
    def of(cls, batch_params: Sequence[SamplingParams]) -> BatchSamplingParams:
        """Wrap a sequence of parameters; a BatchSamplingParams is returned unchanged."""
        return batch_params if isinstance(batch_params, BatchSamplingParams) else cls(batch_params)


class SamplingRows:
    """The rows of a step: one run of consecutive positions per sequence.
    Queries work run by run; a `SamplingRow` is created only where its parameters need the prefix."""

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        positions: Sequence[int],
        counts: Sequence[int],
        row: Callable[[int, int], SamplingRow],
    ) -> None:
        """Per run: sampling parameters, absolute position of the first sampled token, and number of rows.
        row(run, number): creates row `number` of run `run`, both from 0."""
        self.run_params = BatchSamplingParams.of(batch_params)
        self.run_positions, self.run_counts, self._row = positions, counts, row
        self._count = sum(counts)

    @classmethod
    def of(cls, rows: Sequence[SamplingRow] | SamplingRows) -> SamplingRows:
        """Wrap rows, each as its own run; a SamplingRows is returned unchanged."""
        if isinstance(rows, SamplingRows):
            return rows
        return cls(
            [row.sampling_params for row in rows],
            [row.position for row in rows],
            [1] * len(rows),
            lambda run, _: rows[run],
        )

    def __len__(self) -> int:
        return self._count

    def positions(self, wanted: Callable[[SamplingParams], bool] = lambda params: True) -> list[int]:
        """Return the absolute positions sampled by rows with matching parameters."""
        runs = zip(self.run_params, self.run_positions, self.run_counts, strict=True)
        return list(chain.from_iterable(range(first, first + count) for params, first, count in runs if wanted(params)))

    def batch_params(self, wanted: Callable[[SamplingParams], bool] = lambda params: True) -> list[SamplingParams]:
        """Return the parameters of each row with matching parameters."""
        runs = zip(self.run_params, self.run_counts, strict=True)
        return list(chain.from_iterable([params] * count for params, count in runs if wanted(params)))

    def numbers(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        """Return the numbers of rows with matching parameters."""
        found: list[int] = []
        first = 0
        for params, count in zip(self.run_params, self.run_counts, strict=True):
            if wanted(params):
                found.extend(range(first, first + count))
            first += count
        return found

    def rows(self, wanted: Callable[[SamplingParams], bool]) -> list[tuple[int, SamplingRow]]:
        """Return the rows with matching parameters, each with its number."""
        runs = enumerate(zip(self.run_params, self.run_counts, strict=True))
        made = (self._row(run, number) for run, (params, count) in runs if wanted(params) for number in range(count))
        return list(zip(self.numbers(wanted), made, strict=True))
