"""The choices that rows of logits make: by which law each of them is made, and behind which ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from space_kernels.law import Law

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
class Row:
    """One choice to be made: by which law, and behind which ids."""

    law: Law
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


@dataclass(slots=True)
class RowRun:
    """Choices of one sequence at consecutive positions, without their prefixes: few laws look at those."""

    law: Law
    position: int  # absolute index of the first token being chosen
    count: int
    row: Callable[[int], Row]  # the choice of that number, from 0

    @classmethod
    def of_one(cls, row: Row) -> RowRun:
        """A single choice."""
        return cls(row.law, row.position, 1, lambda _: row)


class RowRuns(Sequence[Row]):
    """The choices of a step, sequence after sequence. What is asked of all of them is answered run by run."""

    def __init__(self, runs: Sequence[RowRun]) -> None:
        self.runs = runs
        self._count = sum(run.count for run in runs)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowRuns:
        """These choices; each is a run of its own where nothing else is known."""
        return rows if isinstance(rows, RowRuns) else cls([RowRun.of_one(row) for row in rows])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        return (run.row(number) for run in self.runs for number in range(run.count))

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Row]: ...

    def __getitem__(self, number: int | slice) -> Row | Sequence[Row]:
        if isinstance(number, slice):
            return list(self)[number]
        behind = number if number >= 0 else number + self._count
        for run in self.runs:
            if 0 <= behind < run.count:
                return run.row(behind)
            behind -= run.count
        raise IndexError(f"There are {self._count} rows; asked for row {number}.")

    def positions(self, wanted: Callable[[Law], bool] = lambda law: True) -> list[int]:
        """Absolute indices of the tokens that rows with such a law choose."""
        places = (range(run.position, run.position + run.count) for run in self.runs if wanted(run.law))
        return list(chain.from_iterable(places))

    def laws(self, wanted: Callable[[Law], bool] = lambda law: True) -> list[Law]:
        """The law of each row whose law is such a one."""
        return list(chain.from_iterable([run.law] * run.count for run in self.runs if wanted(run.law)))

    def numbers(self, wanted: Callable[[Law], bool]) -> list[int]:
        """Rows with such a law."""
        found: list[int] = []
        first = 0
        for run in self.runs:
            if wanted(run.law):
                found.extend(range(first, first + run.count))
            first += run.count
        return found

    def rows(self, wanted: Callable[[Law], bool]) -> list[tuple[int, Row]]:
        """Rows with such a law, and their numbers."""
        made = (run.row(number) for run in self.runs if wanted(run.law) for number in range(run.count))
        return list(zip(self.numbers(wanted), made, strict=True))
