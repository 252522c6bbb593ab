"""Drafts from text: the sequence's own past, or what the client predicts. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RUNS = (4, 2)
"""Lengths of the runs that are indexed, longest first; a match is then extended id by id.

The pair alone did as well on 60 HumanEval-X prompts of up to 200 tokens (3.15 tokens per step greedy, 1.16 at
temperature 0.8, with 8 drafts; a run of 8 besides, the same). Long texts repeat pairs by chance, so four ids decide.
"""

LONGEST = 32  # longest match measured: beyond it acceptance did not differ
MOST_IDS = 1 << 15  # ids indexed when a text is first read, from its end: 0.3 µs and 300 bytes each


class SuffixIndex:
    """A growing text, with the latest position after each run of 2 and of 4 of its ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        known = self.ids[-MOST_IDS:]
        end = len(self.ids)
        first = end - len(known)
        # Excludes the last run: nothing follows it yet.
        fours = zip(known, known[1:], known[2:], known[3:-1], strict=False)
        self._fours: dict[Sequence[int], int] = dict(zip(fours, range(first + 4, end), strict=True))
        pairs = zip(known, known[1:-1], strict=False)  # noqa: RUF007
        self._pairs: dict[Sequence[int], int] = dict(zip(pairs, range(first + 2, end), strict=True))

    def push(self, id_: int) -> None:
        """Append an id, and index the run that ended before it."""
        ids = self.ids
        num_ids = len(ids)
        if num_ids > 3:
            self._fours[tuple(ids[-4:])] = num_ids
            self._pairs[ids[-2], ids[-1]] = num_ids
        elif num_ids > 1:
            self._pairs[ids[-2], ids[-1]] = num_ids
        ids.append(id_)

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """Return the position after the longest indexed run that ends `tail`, and the length of the match; None if
        there is none. At least one id follows the position. Of equally long indexed runs the latest is used."""
        place = self._pairs.get(tuple(tail[-2:]))
        if place is None:
            return None
        place = self._fours.get(tuple(tail[-4:]), place)
        return place, match_length(self.ids, place, tail)

    def find_end(self) -> tuple[int, int] | None:
        """Return the same for the end of the text itself."""
        return self.find(self.ids)


def match_length(ids: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """Return how many ids before `place` equal the last ones of `tail`, up to LONGEST."""
    most = min(place, len(tail), LONGEST)
    length = 0
    while length < most and ids[place - 1 - length] == tail[-1 - length]:
        length += 1
    return length


SHORTEST_MATCH = RUNS[-1]
"""Ids that must have occurred before, in this order.

Measured with the embedded model on 40 HumanEval-X prompts of 160 tokens, longest match, the latest where there are
several. The chance that the id behind the match is right, greedy (0.40 of the 4-grams distinct) / temperature 0.8
(0.85 distinct): after 1 id .39/.32, 2 ids .50/.44, 3 ids .81/.67, 4 to 7 ids .87/.71, 12 and more 1.00/.90. A match of
one id is worth less than any mask, and is found at every third token.
"""


class Lookup:
    """Follows a text and, where it repeats itself, predicts what comes next. A match is followed while the text
    agrees."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = SuffixIndex(ids)
        self._place = 0  # index of the id that may come next
        self._length = 0  # length of the match before it

    @property
    def num_ids(self) -> int:
        """Ids of the text."""
        return len(self._index.ids)

    @property
    def match_length(self) -> int:
        """Length of the match before the proposal; valid after `propose`."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        ids = self._index.ids
        for id_ in tokens:
            if self._length and ids[self._place] == id_:
                self._place += 1
                self._length = min(self._length + 1, LONGEST)
            else:
                self._length = 0
            self._index.push(id_)

    def propose(self, max_drafts: int) -> list[int]:
        """Return `max_drafts` ids that followed the longest match; none without a match of SHORTEST_MATCH ids.
        If the match reaches the end of the text, it repeats from its own start, as a periodic text would."""
        ids = self._index.ids
        if self._length < RUNS[0]:
            found = self._index.find_end()
            if found is not None and found[1] >= self._length:
                self._place, self._length = found
        if self._length < SHORTEST_MATCH:
            return []
        drafts = ids[self._place : self._place + max_drafts]
        period = len(ids) - self._place
        while len(drafts) < max_drafts:
            drafts.append(drafts[-period])
        return drafts


BEHIND, AHEAD = 8, 48
"""Where the output is searched first after it has diverged, in ids before and after: most edits are small."""

AT_ONCE = 4  # within so many ids one matching id is enough; elsewhere it takes two


class Prediction:
    """A predicted text, and the position in it that the output has reached.
    Nothing here depends on how many ids a step emits, so the counts of predicted ids are the same with any drafts."""

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
            self._advance(id_)
            appeared.append(self.num_appeared - before)
        if len(self._tail) > 4 * LONGEST:
            del self._tail[:-LONGEST]
        return appeared

    def propose(self, max_drafts: int) -> list[int]:
        """Return how the prediction continues."""
        return self._index.ids[self._place : self._place + max_drafts]

    def _advance(self, id_: int) -> None:
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
        longest."""
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
