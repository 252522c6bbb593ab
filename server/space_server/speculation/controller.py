"""Who decides how much a step lays out. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from space_model.geometry.draft_layout import DraftLayout

from space_server.drafts.acceptance import Acceptance


@dataclass(slots=True)  # not frozen: one is made for each sequence and step, and freezing doubles what that takes
class DraftLimits:
    """What one sequence could lay out in this step."""

    seq_id: int
    num_drafts: int  # drafts it has that its slots and limits allow
    max_masks: int  # most masks per group that its bound and the checkpoint allow
    num_left: int  # ids it may still emit, this step's included
    is_noisy: bool = False  # its choices take noise: it is not greedy
    acceptance: Acceptance | None = None  # of drafts from its masks
    chances: Sequence[float] = ()  # that each of its drafts is accepted after those before, where no mask made them
    is_read: bool = False  # its text can be read for what may follow

    def fit(self, layout: DraftLayout) -> DraftLayout:
        """The layout without what this sequence has not, or could not use.

        With g drafts accepted this step emits g+1 ids, and the next one verifies at most num_left - (g+1) - 1 drafts.
        """
        drafts = min(layout.num_drafts, self.num_drafts)
        most = max(layout.masks)
        if drafts == layout.num_drafts and (not most or most <= min(self.max_masks, self.num_left - drafts - 2)):
            return layout
        masks = (min(layout.masks[g], self.max_masks, self.num_left - g - 2) for g in range(drafts + 1))
        return DraftLayout.of(drafts, tuple(max(0, count) for count in masks))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What else the step does."""

    num_prefill_rows: int = 0
    num_prefill_pairs: int = 0  # of a prefill row and an id computed before
    num_context: int = 0  # ids computed before, over the sequences that reach their root


class Controller(Protocol):
    """Chooses the layouts of a step; the step makes them fit."""

    @property
    def row_price(self) -> float:
        """Accepted drafts that a chain row more must bring now: whoever proposes can leave out what cannot."""
        ...

    @property
    def naps(self) -> bool:
        """Reading a text for what may follow it does not pay now, unless its client predicts it."""
        ...

    def layouts(self, rooms: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """One layout per sequence that reaches its root in this step, in their order."""
        ...

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """What the step with these layouts brought, and how long it took.

        `pause`: seconds since the end of the step before, where there was work all along.
        """
        ...


class FixedLayout:
    """Each sequence by itself, by a rule: for tests, for measuring, and where the operator insists on one k."""

    row_price = 0.0
    naps = False

    def __init__(self, rule: Callable[[DraftLimits], DraftLayout]) -> None:
        self._rule = rule

    @classmethod
    def full(cls, num_drafts: int) -> Self:
        """All drafts there are up to num_drafts, every group whole: (k+1)² rows."""
        return cls(lambda room: DraftLayout.full(min(room.num_drafts, num_drafts), num_drafts))

    def layouts(self, rooms: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """The rule's layout for each."""
        return [self._rule(room) for room in rooms]

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """It makes no difference."""
