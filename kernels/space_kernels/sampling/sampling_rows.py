"""Rows of logits to be sampled, with their sampling parameters and prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from space_kernels.sampling.sampling_params import SamplingParams

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


class BatchSamplingParams(Sequence[SamplingParams]):
    """The sampling parameters of a step's sequences, with properties of the whole batch. Immutable."""

    def __init__(self, batch_params: Sequence[SamplingParams]) -> None:
        self._batch_params = batch_params
        self.edits = any(sampling_params.edits for sampling_params in batch_params)
        self.divides = any(sampling_params.divisor != 1.0 for sampling_params in batch_params)
        self.truncates = any(sampling_params.truncates for sampling_params in batch_params)
        self.samples = not all(sampling_params.greedy for sampling_params in batch_params)
        self.keys = np.array([sampling_params.key for sampling_params in batch_params], dtype=np.int64)

    @property
    def is_plain_argmax(self) -> bool:
        """Whether every row samples the greatest logit that is not banned."""
        return not (self.edits or self.divides or self.truncates or self.samples)

    @classmethod
    def of(cls, batch_params: Sequence[SamplingParams]) -> BatchSamplingParams:
        """Wrap a sequence of parameters; a BatchSamplingParams is returned unchanged."""
        return batch_params if isinstance(batch_params, BatchSamplingParams) else cls(batch_params)

    def __len__(self) -> int:
        return len(self._batch_params)

    def __iter__(self) -> Iterator[SamplingParams]:
        return iter(self._batch_params)

    @overload
    def __getitem__(self, number: int) -> SamplingParams: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[SamplingParams]: ...

    def __getitem__(self, number: int | slice) -> SamplingParams | Sequence[SamplingParams]:
        return self._batch_params[number]


class SamplingRows(Sequence[SamplingRow]):
    """The rows of a step: one run of consecutive positions per sequence.

    Queries work run by run; a `SamplingRow` is created only where its parameters need the prefix.
    """

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        positions: Sequence[int],
        counts: Sequence[int],
        row: Callable[[int, int], SamplingRow],
    ) -> None:
        """Per run: sampling parameters, absolute position of the first sampled token, and number of rows.

        row(run, number): creates row `number` of run `run`, both from 0.
        """
        self.run_params = BatchSamplingParams.of(batch_params)
        self.run_positions, self.run_counts, self._row = positions, counts, row
        self._count = sum(counts)

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> SamplingRows:
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

    def __iter__(self) -> Iterator[SamplingRow]:
        return (self._row(run, number) for run, count in enumerate(self.run_counts) for number in range(count))

    @overload
    def __getitem__(self, number: int) -> SamplingRow: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[SamplingRow]: ...

    def __getitem__(self, number: int | slice) -> SamplingRow | Sequence[SamplingRow]:
        if isinstance(number, slice):
            return list(self)[number]
        behind = number if number >= 0 else number + self._count
        for run, count in enumerate(self.run_counts):
            if 0 <= behind < count:
                return self._row(run, behind)
            behind -= count
        raise IndexError(f"There are {self._count} rows; asked for row {number}.")

    def positions(self, wanted: Callable[[SamplingParams], bool] = lambda sampling_params: True) -> list[int]:
        """Return the absolute positions sampled by rows with matching parameters."""
        runs = zip(self.run_params, self.run_positions, self.run_counts, strict=True)
        return list(
            chain.from_iterable(
                range(first, first + count) for sampling_params, first, count in runs if wanted(sampling_params)
            )
        )

    def batch_params(
        self, wanted: Callable[[SamplingParams], bool] = lambda sampling_params: True
    ) -> list[SamplingParams]:
        """Return the parameters of each row with matching parameters."""
        runs = zip(self.run_params, self.run_counts, strict=True)
        return list(
            chain.from_iterable([sampling_params] * count for sampling_params, count in runs if wanted(sampling_params))
        )

    def numbers(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        """Return the numbers of rows with matching parameters."""
        found: list[int] = []
        first = 0
        for sampling_params, count in zip(self.run_params, self.run_counts, strict=True):
            if wanted(sampling_params):
                found.extend(range(first, first + count))
            first += count
        return found

    def rows(self, wanted: Callable[[SamplingParams], bool]) -> list[tuple[int, SamplingRow]]:
        """Return the rows with matching parameters, each with its number."""
        runs = enumerate(zip(self.run_params, self.run_counts, strict=True))
        made = (
            self._row(run, number)
            for run, (sampling_params, count) in runs
            if wanted(sampling_params)
            for number in range(count)
        )
        return list(zip(self.numbers(wanted), made, strict=True))
