"""Drafts from a text that the client predicts: followed while the output agrees, found again where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from space_server.drafts.suffix_index import LONGEST, SuffixIndex, match_length

BEHIND, AHEAD = 8, 48
"""Where the output is searched first after it has diverged, in ids before and after: most edits are small."""

AT_ONCE = 4
"""Within so many ids one matching id is enough; elsewhere it takes two."""


class Prediction:
    """A predicted text, and the position in it that the output has reached.

    Nothing here depends on how many ids a step emits, so the counts of predicted ids are the same with any drafts.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = SuffixIndex(ids)
        self._tail: list[int] = []  # the output's last ids
        self._place = 0  # index of the id that may come next; len(ids): none
        self._length = 1  # matching ids before it; the beginning of both counts as one
        self._strayed_at = 0  # the last known position of the output
        self._appeared = bytearray(len(ids))
        self.num_appeared = 0  # ids of the prediction found in the output, in runs of two or more

    @property
    def match_length(self) -> int:
        """Matching ids before the proposal; 0 after what looks like one replaced id."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """Append tokens to the output; return how many ids of the prediction appeared with each."""
        appeared = []
        for id_ in tokens:
            before = self.num_appeared
            self._tail.append(id_)
            self._follow(id_)
            appeared.append(self.num_appeared - before)
        if len(self._tail) > 4 * LONGEST:
            del self._tail[:-LONGEST]
        return appeared

    def propose(self, max_drafts: int) -> list[int]:
        """Return how the prediction continues."""
        return self._index.ids[self._place : self._place + max_drafts]

    def _follow(self, id_: int) -> None:
        ids = self._index.ids
        if self._place < len(ids) and ids[self._place] == id_:
            self._place += 1
            self._length += 1
        else:
            has_just_strayed = self._length >= 2
            if has_just_strayed:
                self._strayed_at = self._place
            found = self._find(id_)
            if found is not None:
                self._place, self._length = found
            else:
                self._length = 0
                self._place = self._strayed_at + 1 if has_just_strayed else len(ids)
        if self._length >= 2:
            self._strayed_at = self._place
            self._mark()

    def _find(self, id_: int) -> tuple[int, int] | None:
        """Return the position after the longest match of the output's end; near the divergence, the nearest of the
        longest.
        """
        ids, here = self._index.ids, self._strayed_at
        begin, end = max(0, here - BEHIND), min(len(ids), here + AHEAD)
        near: list[tuple[int, int]] = []  # length of the match, and how far away
        places: list[int] = []
        while begin < end:
            try:
                begin = ids.index(id_, begin, end) + 1
            except ValueError:
                break
            length = match_length(ids, begin, self._tail)
            if length >= 2 or 0 < begin - here <= AT_ONCE:
                near.append((length, -abs(begin - here)))
                places.append(begin)
        best = max(range(len(near)), key=near.__getitem__, default=None)
        anywhere = self._index.find(self._tail[-LONGEST:])
        if anywhere is not None and (best is None or anywhere[1] > near[best][0]):
            return anywhere
        return None if best is None else (places[best], near[best][0])

    def _mark(self) -> None:
        """Count the ids of the current run as appeared."""
        for place in range(self._place - 1, max(0, self._place - self._length) - 1, -1):
            if self._appeared[place]:
                break
            self._appeared[place] = 1
            self.num_appeared += 1
