"""Scripted right and wrong drafts, because a random model's own drafts are almost never accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Right = Callable[[int, int], int]
"""(known ids, drafts of a whole chain) -> how many drafts are right before the first wrong one."""


def all_right(num_known: int, k: int) -> int:
    """All drafts are right."""
    return k


def half_right(num_known: int, k: int) -> int:
    """A varying number of 1 to k-1 right drafts; for k = 1, every second draft is right."""
    return 1 + num_known % (k - 1) if k > 1 else num_known % 2


def none_right(num_known: int, k: int) -> int:
    """No draft is right."""
    return 0


DRAFTS = ("own", "oracle", "half", "wrong")
"""Kinds of drafts: the masks' own, and the scripted ones."""

RIGHT: dict[str, Right] = {"oracle": all_right, "half": half_right, "wrong": none_right}


@dataclass(frozen=True)
class Future:
    """The whole text of a sequence, known from a plain run."""

    ids: Sequence[int]  # prompt and all of its output
    k: int  # drafts of a whole chain of this sequence


class ScriptedDrafts:
    """A DraftSource that drafts the known plain text for the first `num_right` drafts, then a wrong token.

    After the first wrong draft the rest is right again every second time, to test that only the longest prefix counts.
    """

    def __init__(self, num_right: Right, live_ids: Sequence[int]) -> None:
        self._num_right = num_right
        self._live_ids = list(live_ids)
        self.futures: dict[int, Future] = {}  # by seq_id; a sequence without one gets no drafts

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return `max_drafts` ids, arbitrary ones after the end of the plain text."""
        future = self.futures.get(seq_id)
        if future is None:
            return ()
        n = len(ids)
        drafts = [*future.ids[n : n + max_drafts], *self._live_ids][:max_drafts]
        stray = self._num_right(n, future.k)
        for i in range(stray, max_drafts if n % 2 else min(stray + 1, max_drafts)):
            drafts[i] = self._other(drafts[i])
        return drafts

    def _other(self, id_: int) -> int:
        """Return another id that could be sampled."""
        at = self._live_ids.index(id_) if id_ in self._live_ids else 0
        return self._live_ids[(at + 1) % len(self._live_ids)]
