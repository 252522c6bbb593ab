"""The choices that rows of logits make: by which law each of them is made, and behind which ids."""

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
"""A set of ids, [ceil(V / 32)]: bit v % 32 of word v // 32 is set for the ids v in it."""


class TokenCounts:
    """How often each id occurs in one sequence: what penalties need, kept up to date instead of counted again."""

    def __init__(
        self, ids: Sequence[int], num_prompt: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        known = torch.tensor(ids, dtype=torch.int64, device=device)
        self.output = torch.bincount(known[num_prompt:], minlength=vocab_size)  # [V] int64
        self.seen = torch.bincount(known, minlength=vocab_size) > 0  # [V] bool

    def extend(self, ids: Sequence[int]) -> None:
        """Count ids that were generated."""
        new = torch.tensor(ids, dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, new, torch.ones_like(new))
        self.seen[new] = True


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One choice to be made: by which law, and behind which ids."""

    sampling_params: SamplingParams
    ids: Sequence[int]  # known ids of the sequence: prompt, then output
    num_prompt: int
    tail: Sequence[int] = ()  # hypothetical ids behind them: drafts
    counts: TokenCounts | None = field(default=None)  # of `ids`; where None, they are counted again
    num_unknown: int = 0  # ids not known yet between the prefix and the choice (for a mask's draft)
    possible: IdBits | None = None  # what the law's grammar allows behind the prefix; None: everything

    @property
    def position(self) -> int:
        """Absolute index of the token being chosen."""
        return len(self.ids) + len(self.tail) + self.num_unknown

    @property
    def num_generated(self) -> int:
        """Generated ids before this choice."""
        return self.position - self.num_prompt

    @property
    def last_id(self) -> int | None:
        """Of the prefix; None where it is not known."""
        if self.num_unknown or not self.position:
            return None
        return self.tail[-1] if self.tail else self.ids[-1]

    def ends_with(self, head: Sequence[int]) -> bool:
        """Whether the prefix is known to end with these ids."""
        if not head:
            return True
        if self.num_unknown or len(head) > self.position:
            return False
        missing = len(head) - len(self.tail)
        behind = self.tail[len(self.tail) - len(head) :] if missing <= 0 else self.tail
        before = self.ids[len(self.ids) - missing :] if missing > 0 else ()
        return [*before, *behind] == list(head)


class BatchSamplingParams(Sequence[SamplingParams]):
    """The laws of a step's sequences, and what of all of them together is asked at each step. Not to be changed."""

    def __init__(self, batch_params: Sequence[SamplingParams]) -> None:
        self._batch_params = batch_params
        self.edits = any(sampling_params.edits for sampling_params in batch_params)
        self.divides = any(sampling_params.divisor != 1.0 for sampling_params in batch_params)
        self.truncates = any(sampling_params.truncates for sampling_params in batch_params)
        self.samples = not all(sampling_params.greedy for sampling_params in batch_params)
        self.keys = np.array([sampling_params.key for sampling_params in batch_params], dtype=np.int64)

    @classmethod
    def of(cls, batch_params: Sequence[SamplingParams]) -> BatchSamplingParams:
        """These laws."""
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
    """The choices of a step: runs of consecutive positions, one for each sequence, sequence after sequence.

    Questions about all rows are answered run by run; a `SamplingRow` is made only where its parameters need its prefix.
    """

    def __init__(
        self,
        batch_params: Sequence[SamplingParams],
        positions: Sequence[int],
        counts: Sequence[int],
        row: Callable[[int, int], SamplingRow],
    ) -> None:
        """By run: the law, the absolute index of the first token being chosen, and how many choices.

        row(run, number): that choice of that run, both from 0.
        """
        self.run_laws = BatchSamplingParams.of(batch_params)
        self.run_positions, self.run_counts, self._row = positions, counts, row
        self._count = sum(counts)

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> SamplingRows:
        """These choices; each is a run of its own where nothing else is known."""
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
        """Absolute indices of the tokens that rows with such a law choose."""
        runs = zip(self.run_laws, self.run_positions, self.run_counts, strict=True)
        return list(
            chain.from_iterable(
                range(first, first + count) for sampling_params, first, count in runs if wanted(sampling_params)
            )
        )

    def batch_params(
        self, wanted: Callable[[SamplingParams], bool] = lambda sampling_params: True
    ) -> list[SamplingParams]:
        """The law of each row whose law is such a one."""
        runs = zip(self.run_laws, self.run_counts, strict=True)
        return list(
            chain.from_iterable([sampling_params] * count for sampling_params, count in runs if wanted(sampling_params))
        )

    def numbers(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        """Rows with such a law."""
        found: list[int] = []
        first = 0
        for sampling_params, count in zip(self.run_laws, self.run_counts, strict=True):
            if wanted(sampling_params):
                found.extend(range(first, first + count))
            first += count
        return found

    def rows(self, wanted: Callable[[SamplingParams], bool]) -> list[tuple[int, SamplingRow]]:
        """Rows with such a law, and their numbers."""
        runs = enumerate(zip(self.run_laws, self.run_counts, strict=True))
        made = (
            self._row(run, number)
            for run, (sampling_params, count) in runs
            if wanted(sampling_params)
            for number in range(count)
        )
        return list(zip(self.numbers(wanted), made, strict=True))
