"""Layouts fit what a sequence has and can use; the row budget keeps to its rows and ends in plain decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_model.draft_layout import DraftLayout
from space_server.controller import FixedLayout, Room, RowBudget


def room(num_drafts: int = 5, max_masks: int = 5, num_left: int = 100) -> Room:
    return Room(seq_id=1, num_drafts=num_drafts, max_masks=max_masks, num_left=num_left)


def test_a_layout_is_cut_to_the_drafts_and_masks_there_are() -> None:
    assert room(num_drafts=1, max_masks=2).fit(DraftLayout.full(3, 3)) == DraftLayout(1, (2, 2))


def test_a_group_lays_out_only_what_may_still_be_emitted_behind_its_bonus() -> None:
    assert room(num_drafts=2, num_left=4).fit(DraftLayout.full(2, 5)) == DraftLayout(2, (2, 1, 0))


@given(st.integers(1, 40), st.integers(0, 8), st.integers(0, 8), st.sampled_from([8, 24, 128]))
def test_the_row_budget_is_kept_and_is_the_same_for_all(batch: int, drafts: int, masks: int, rows: int) -> None:
    rooms = [room(num_drafts=drafts, max_masks=masks)] * batch
    layouts = RowBudget(rows).layouts(rooms)
    assert len(layouts) == batch
    assert len(set(layouts)) == 1
    assert sum(layout.num_rows for layout in layouts) <= max(rows, batch)


def test_under_load_decoding_is_plain() -> None:
    assert RowBudget(24).layouts([room()] * 7) == [DraftLayout.plain()] * 7
    assert RowBudget(24).layouts([room()])[0].num_drafts == 5


@pytest.mark.parametrize(("device", "k"), [("cpu", 5), ("cuda", 5)])
def test_alone_a_sequence_drafts_all_it_can(device: str, k: int) -> None:
    assert RowBudget.for_device(device).layouts([room()])[0].num_drafts == k


def test_a_fixed_layout_is_whole() -> None:
    assert FixedLayout.full(3).layouts([room(num_drafts=2)]) == [DraftLayout.full(2, 3)]
