"""The integers of a step."""

from __future__ import annotations

import pytest
from space_model.geometry.draft_layout import DraftLayout, GroupChoice


@pytest.mark.parametrize("k", range(9))
def test_a_full_layout_has_the_papers_rows(k: int) -> None:
    assert DraftLayout.full(k, k).num_rows == (k + 1) ** 2


def test_masks_stand_where_the_worked_example_puts_them() -> None:
    assert DraftLayout.full(2, 2).mask_positions(root_position=2) == [3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize("k", range(1, 9))
def test_the_accepted_group_gives_the_next_drafts(k: int) -> None:
    layout = DraftLayout.full(k, k)
    for accepted in range(k + 1):
        assert layout.next_drafts(accepted) == GroupChoice(group=accepted, first_mask=1, num_drafts=k)


def test_an_earlier_group_stands_in_for_one_not_laid_out() -> None:
    layout = DraftLayout(num_drafts=3, masks=(5, 0, 4, 0))
    assert layout.next_drafts(1) == GroupChoice(group=0, first_mask=2, num_drafts=4)
    assert layout.next_drafts(2) == GroupChoice(group=2, first_mask=1, num_drafts=4)
    assert layout.next_drafts(3) == GroupChoice(group=2, first_mask=2, num_drafts=3)
    assert list(layout.next_drafts(3).masks) == [2, 3, 4]  # type: ignore[union-attr]


def test_a_group_too_short_to_reach_behind_the_bonus_gives_nothing() -> None:
    assert DraftLayout(3, (2, 0, 0, 0)).next_drafts(1) == GroupChoice(group=0, first_mask=2, num_drafts=1)
    assert DraftLayout(3, (2, 0, 0, 0)).next_drafts(2) is None
    assert DraftLayout.plain().next_drafts(0) is None


@pytest.mark.parametrize("k", range(1, 9))
def test_every_choice_predicts_the_positions_behind_the_bonus(k: int) -> None:
    """Mask j of group g predicts n+g+j; the bonus stands at n+a, so the first mask used must predict n+a+1."""
    for num_kept in range(k * (k + 1) + 1):
        layout = DraftLayout.pruned(k, k, num_kept, [0.7**j for j in range(k + 1)])
        assert layout.num_masks == num_kept
        for accepted in range(k + 1):
            choice = layout.next_drafts(accepted)
            if choice is not None:
                assert choice.group + choice.first_mask == accepted + 1
                assert choice.masks[-1] == layout.masks[choice.group]
                assert choice.num_drafts >= 1


def test_the_window_cuts_what_would_reach_it() -> None:
    """Root at 7 of a window of 10: positions 8 and 9 are left."""
    assert DraftLayout.full(3, 3).within(7, 10) == DraftLayout(2, (2, 1, 0))
    assert DraftLayout.full(3, 3).within(9, 10) == DraftLayout.plain()
    assert DraftLayout.full(3, 3).within(3, 10) == DraftLayout.full(3, 3)
    for root in range(10):
        cut = DraftLayout.full(4, 4).within(root, 10)
        assert all(position < 10 for position in cut.mask_positions(root))
        assert root + cut.num_drafts < 10


def test_fewer_live_drafts_drop_the_groups_behind_them() -> None:
    assert DraftLayout(3, (5, 0, 2, 4)).with_drafts(1) == DraftLayout(1, (5, 0))
    assert DraftLayout.full(1, 1).with_drafts(4) == DraftLayout.full(1, 1)


def test_pruning_keeps_the_masks_worth_most() -> None:
    """Drafts that are nearly always refused: group 0 is the one that will be drafted from."""
    assert DraftLayout.pruned(2, 2, 2, [1.0, 0.1, 0.01]).masks == (2, 0, 0)
    assert DraftLayout.pruned(2, 2, 3, [1.0, 0.9, 0.81]).masks == (1, 0, 2)


def test_a_layout_names_what_is_wrong_with_its_groups() -> None:
    with pytest.raises(ValueError, match="A layout of 2 drafts has 3 groups"):
        DraftLayout(2, (1, 1))
