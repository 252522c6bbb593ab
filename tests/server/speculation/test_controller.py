"""Layouts fit what a sequence has and can use."""

from space_model.geometry.draft_layout import DraftLayout
from space_server.speculation.controller import DraftLimits, FixedLayout, StepLoad


def room(num_drafts: int = 5, max_masks: int = 5, num_left: int = 100) -> DraftLimits:
    return DraftLimits(seq_id=1, num_drafts=num_drafts, max_masks=max_masks, num_left=num_left)


def test_a_layout_is_cut_to_the_drafts_and_masks_there_are() -> None:
    assert room(num_drafts=1, max_masks=2).fit(DraftLayout.full(3, 3)) == DraftLayout(1, (2, 2))


def test_a_group_lays_out_only_what_may_still_be_emitted_behind_its_bonus() -> None:
    assert room(num_drafts=2, num_left=4).fit(DraftLayout.full(2, 5)) == DraftLayout(2, (2, 1, 0))


def test_a_fixed_layout_is_whole() -> None:
    assert FixedLayout.full(3).layouts([room(num_drafts=2)], StepLoad()) == [DraftLayout.full(2, 3)]
