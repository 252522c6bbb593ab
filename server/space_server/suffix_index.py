"""Where the end of a text stood before: runs of ids, hashed, with the place that follows each. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

RUNS = (8, 4, 2)
"""Lengths of the runs that are remembered, longest first; a match is then measured id by id."""

LONGEST = 32
"""Ids up to which a match is measured: beyond it no difference in worth was seen."""

_BASE, _SPREAD = 0x01000193, 0x9E3779B1
_WORD = (1 << 32) - 1
_POWERS = tuple(pow(_BASE, run, 1 << 32) for run in RUNS)


class SuffixIndex:
    """A text that grows, and for each run of 2, 4 and 8 of its ids the latest place behind it.

    A place is found by a hash and then compared, so a collision costs a match and never invents one. 24 to 48 bytes per
    id; about a microsecond to push one, as much to look up.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._build()

    def push(self, id_: int) -> None:
        """The text goes on. The run that ends here is known from now on: there is something behind it."""
        ids, num_ids = self.ids, len(self.ids)
        if num_ids >= self._capacity:
            self._build()
        for number, run in enumerate(RUNS):
            hashed = self._hashes[number]
            left = 0
            if num_ids >= run:
                self._tables[number][(hashed * _SPREAD & _WORD) >> self._shift] = num_ids
                left = ids[num_ids - run] * _POWERS[number]
            self._hashes[number] = (hashed * _BASE + id_ - left) & _WORD
        ids.append(id_)

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """The place in the text behind the longest known run that ends `tail`, and the length of the match.

        At least one id stands at the place. Of equally long remembered runs the latest counts.
        """
        hashes = []
        for run in RUNS:
            hashed = 0
            for id_ in tail[-run:]:
                hashed = hashed * _BASE + id_
            hashes.append(hashed & _WORD)
        return self._find(hashes, tail)

    def find_end(self) -> tuple[int, int] | None:
        """The place behind the longest known run that ends the text itself, and the length of the match."""
        return self._find(self._hashes, self.ids)

    def _find(self, hashes: Sequence[int], tail: Sequence[int]) -> tuple[int, int] | None:
        for run, table, hashed in zip(RUNS, self._tables, hashes, strict=True):
            place = table[(hashed * _SPREAD & _WORD) >> self._shift]
            if place and len(tail) >= run and (length := match_length(self.ids, place, tail)) >= run:
                return place, length
        return None

    def _build(self) -> None:
        """Tables with room for as many ids again."""
        num_ids = len(self.ids)
        bits = max(8, (4 * num_ids).bit_length())
        self._capacity, self._shift = (1 << bits) // 2, 32 - bits
        self._hashes = [0] * len(RUNS)
        self._tables = []
        known = np.array(self.ids, dtype=np.uint64)
        for number, run in enumerate(RUNS):
            table = np.zeros(1 << bits, dtype=np.int32)  # places; 0: none
            # Hashes of all runs, the last of which has nothing behind it and only waits for it; the first `run` ids
            # make shorter ones, which are no runs but what the next is reckoned from.
            if num_ids >= run:
                hashes = np.zeros(num_ids - run + 1, dtype=np.uint64)
                for i in range(run):
                    hashes = (hashes * np.uint64(_BASE) + known[i : num_ids - run + 1 + i]) & np.uint64(_WORD)
                slots = ((hashes * np.uint64(_SPREAD)) & np.uint64(_WORD)) >> np.uint64(self._shift)
                table[slots[:-1].astype(np.int64)] = np.arange(run, num_ids, dtype=np.int32)  # of equal ones the last
                self._hashes[number] = int(hashes[-1])
            else:
                for id_ in self.ids:
                    self._hashes[number] = (self._hashes[number] * _BASE + id_) & _WORD
            self._tables.append(array("i", table.tobytes()))


def match_length(ids: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """How many ids before `place` are the last ones of `tail`, up to LONGEST."""
    most = min(place, len(tail), LONGEST)
    length = 0
    while length < most and ids[place - 1 - length] == tail[-1 - length]:
        length += 1
    return length
