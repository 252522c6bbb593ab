"""The interface that chooses the draft layouts of a step. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from space_model.geometry.draft_layout import DraftLayout

from space_server.drafts.acceptance import Acceptance


@dataclass(slots=True)  # not frozen, which would double the cost of making one per sequence and step
class DraftLimits:
    """Bounds on what one sequence can lay out in this step."""

    seq_id: int
    num_drafts: int  # drafts that its slots and limits allow
    max_masks: int  # masks per group that its bound and the checkpoint allow
    num_left: int  # tokens it may still emit, this step's included
    is_noisy: bool = False  # not greedy, so sampling adds noise
    acceptance: Acceptance | None = None  # of drafts from its masks
    chances: Sequence[float] = ()  # acceptance of each draft, given those before; only of drafts from no mask
    is_read: bool = False  # has a drafter that reads its text

    def fit(self, layout: DraftLayout) -> DraftLayout:
        """Return the layout reduced to the drafts and masks that this sequence has and can use.

        With g drafts accepted this step emits g+1 tokens, and the next one verifies at most num_left - (g+1) - 1
        drafts.
        """
        drafts = min(layout.num_drafts, self.num_drafts)
        most = max(layout.masks)
        if drafts == layout.num_drafts and (not most or most <= min(self.max_masks, self.num_left - drafts - 2)):
            return layout
        masks = (min(layout.masks[g], self.max_masks, self.num_left - g - 2) for g in range(drafts + 1))
        return DraftLayout.of(drafts, tuple(max(0, count) for count in masks))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The rest of the step's work."""

    num_prefill_rows: int = 0
    num_prefill_pairs: int = 0  # (prefill row, previously computed id) pairs
    num_context: int = 0  # computed ids, summed over the sequences that reach their root


class Controller(Protocol):
    """Chooses the draft layouts of each step; the scheduler makes them fit."""

    @property
    def row_price(self) -> float:
        """Accepted drafts that one more chain row must bring; sources skip drafts worth less."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether reading texts for drafts is paused because it costs more than it saves; predictions continue."""
        ...

    def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """Return one layout per sequence that reaches its root in this step, in their order."""
        ...

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """Record the tokens and the duration of the step with these layouts.

        `pause`: seconds since the end of the step before, if there was work all along.
        """
        ...


class FixedLayout:
    """Lays out each sequence by a fixed rule: for tests, measurements, and `--speculation K`."""

    row_price = 0.0
    is_paused = False

    def __init__(self, rule: Callable[[DraftLimits], DraftLayout]) -> None:
        self._rule = rule

    @classmethod
    def full(cls, num_drafts: int) -> Self:
        """All drafts up to num_drafts, with every group whole: (k+1)² rows."""
        return cls(lambda limit: DraftLayout.full(min(limit.num_drafts, num_drafts), num_drafts))

    def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """Return the rule's layout for each sequence."""
        return [self._rule(limit) for limit in limits]

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """Do nothing: the rule is fixed."""
