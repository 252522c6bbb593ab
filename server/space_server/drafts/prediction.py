"""Drafts from a text that the client expects: followed while the output agrees, found again where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from space_server.drafts.suffix_index import LONGEST, SuffixIndex, match_length

BEHIND, AHEAD = 8, 48
"""Where the output is looked for first after it has strayed, in ids from there: most edits are small."""

AT_ONCE = 4
"""Within so many ids a single id that agrees is taken for the place; elsewhere it takes two."""


class Prediction:
    """A predicted text beside the output, and the place in it where the output stands.

    Nothing here depends on how many ids a step emits: what is counted as predicted is the same with any drafts.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = SuffixIndex(ids)
        self._tail: list[int] = []  # the output's last ids
        self._place = 0  # of the id that may come next; len(ids): nowhere
        self._length = 1  # ids in a row that agree before it; the beginning of both counts as one
        self._strayed_at = 0  # the place where the output was last known to be
        self._appeared = bytearray(len(ids))
        self.num_appeared = 0  # ids of the prediction found in the output, in runs of two or more

    @property
    def match_length(self) -> int:
        """Ids in a row before the proposal that agree; 0 where one id has just been replaced, as it seems."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """The output goes on; how many ids of the prediction appeared with each token."""
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
        """What the prediction goes on with."""
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
        """The place behind the longest end of the output; near where it strayed, the nearest of the longest."""
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
        """The ids of the present run have appeared: the last of them, and those before it that were not counted."""
        for place in range(self._place - 1, max(0, self._place - self._length) - 1, -1):
            if self._appeared[place]:
                break
            self._appeared[place] = 1
            self.num_appeared += 1
