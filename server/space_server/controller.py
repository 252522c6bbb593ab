"""Who decides how much a step lays out. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from space_model.draft_layout import DraftLayout


@dataclass(frozen=True, slots=True)
class Room:
    """What one sequence could lay out in this step."""

    seq_id: int
    num_drafts: int  # drafts it has that its slots and limits allow
    max_masks: int  # most masks per group that its bound and the checkpoint allow
    num_left: int  # ids it may still emit, this step's included

    def fit(self, layout: DraftLayout) -> DraftLayout:
        """The layout without what this sequence has not, or could not use.

        With g drafts accepted this step emits g+1 ids, and the next one verifies at most num_left - (g+1) - 1 drafts.
        """
        drafts = min(layout.num_drafts, self.num_drafts)
        masks = (min(layout.masks[g], self.max_masks, self.num_left - g - 2) for g in range(drafts + 1))
        return DraftLayout(drafts, tuple(max(0, count) for count in masks))


class Controller(Protocol):
    """Chooses the layouts of a step; the step makes them fit."""

    def layouts(self, rooms: Sequence[Room]) -> list[DraftLayout]:
        """One layout per sequence that reaches its root in this step, in their order."""
        ...


class FixedLayout:
    """Each sequence by itself, by a rule: for tests, for measuring, and where the operator insists on one k."""

    def __init__(self, rule: Callable[[Room], DraftLayout]) -> None:
        self._rule = rule

    @classmethod
    def full(cls, num_drafts: int) -> FixedLayout:
        """All drafts there are up to num_drafts, every group whole: (k+1)² rows."""
        return cls(lambda room: DraftLayout.full(min(room.num_drafts, num_drafts), num_drafts))

    def layouts(self, rooms: Sequence[Room]) -> list[DraftLayout]:
        """The rule's layout for each."""
        return [self._rule(room) for room in rooms]


_REACH = (1.0, 0.60, 0.36, 0.22, 0.13, 0.08)
"""A_j assumed: the chance that j drafts are all accepted, at an acceptance of 0.6 per draft."""


class RowBudget:
    """As many drafts as a fixed number of rows has room for, shared evenly; plain decoding where that is none.

    A step's cost is flat up to some number of rows (the ridge) and rises with them beyond it. A layout of k drafts
    takes about 3k+1 rows here: of its groups, only the most valuable masks.
    """

    def __init__(self, num_rows: int) -> None:
        """`num_rows`: chain and mask rows of a step, over all sequences."""
        self._num_rows = num_rows

    @classmethod
    def for_device(cls, device_type: str) -> RowBudget:
        """24 rows on a CPU (two cores leave the ridge at 16 to 24), 128 on anything else."""
        return cls(24 if device_type == "cpu" else 128)

    def layouts(self, rooms: Sequence[Room]) -> list[DraftLayout]:
        """The same k for all."""
        rows = self._num_rows // max(len(rooms), 1)
        k = (rows - 1) // 3
        if k < 1:
            return [DraftLayout.plain()] * len(rooms)
        return [self._pruned(min(k, room.num_drafts), min(k, room.max_masks), rows) for room in rooms]

    @staticmethod
    def _pruned(num_drafts: int, num_masks: int, rows: int) -> DraftLayout:
        if num_masks < 1:
            return DraftLayout(num_drafts, (0,) * (num_drafts + 1))
        return DraftLayout.pruned(num_drafts, num_masks, rows - 1 - num_drafts, _REACH)
