"""The measured draft layouts: plain decoding, fixed drafts with full or pruned groups, and the server's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from space_model.geometry.draft_layout import DraftLayout
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout

PLAIN, AUTO = "plain", "auto"

REACH = (1.0, 0.57, 0.33, 0.19, 0.11, 0.06)
"""A_j that select the masks of pruned layouts, for acceptance .57 (SPACE §5)."""

PRUNED = ((2, 3), (3, 6), (5, 12))  # drafts, and masks kept: of 6, 12 and 30


@dataclass(frozen=True)
class Arm:
    """One way to lay out steps."""

    name: str
    num_drafts: int | None  # k; None: chosen by the controller
    rule: Callable[[DraftLimits], DraftLayout] | None  # None: the worker's own controller

    def controller(self) -> Controller | None:
        """Return the controller of a fixed layout, or None for the worker's own."""
        return None if self.rule is None else FixedLayout(self.rule)


def plain() -> Arm:
    return Arm(PLAIN, 0, lambda room: DraftLayout.plain())


def auto() -> Arm:
    return Arm(AUTO, None, None)


def full(k: int) -> Arm:
    """k drafts, k+1 whole groups: (k+1)² rows."""
    return Arm(f"k={k}", k, lambda room: DraftLayout.full(min(k, room.num_drafts), k))


def by_head(k: int) -> Arm:
    """k drafts of the recurrent head: k+1 rows."""
    return Arm(f"head k={k}", k, lambda room: DraftLayout.by_head(min(k, room.num_drafts), k))


def pruned(k: int, num_masks: int) -> Arm:
    """k drafts and the `num_masks` most valuable masks."""
    layout = DraftLayout.pruned(k, k, num_masks, REACH)
    return Arm(f"k={k}, {num_masks} of {k * (k + 1)} masks", k, lambda room: layout.with_drafts(room.num_drafts))


def arms(ks: Iterable[int], pruned_to: Sequence[tuple[int, int]], *, most_masks: int) -> list[Arm]:
    """Return the arms that the checkpoint has masks for, plain decoding first and auto last."""
    fixed = [full(k) for k in sorted(set(ks)) if 1 <= k <= most_masks]
    return [plain(), *fixed, *(pruned(k, kept) for k, kept in pruned_to if k <= most_masks), auto()]
