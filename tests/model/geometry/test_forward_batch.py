"""Packing: which row is which, and what it sees."""

from __future__ import annotations

import pytest
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment

MASKS = (100, 101, 102)


def build(*segments: Segment) -> ForwardBatch:
    return ForwardBatch.build(segments, block_size=4, mask_ids=MASKS)


def test_chain_rows_come_first_then_masks_then_padding() -> None:
    batch = build(Segment([7, 8, 9], 5, [0, 3], DraftLayout(2, (2, 0, 1))), Segment([4], 0, [1], DraftLayout(0, (1,))))
    assert batch.chain_rows == [range(3), range(3, 4)]
    assert batch.mask_rows == [[range(4, 6), range(6, 6), range(6, 7)], [range(7, 8)]]
    assert batch.ids.tolist() == [7, 8, 9, 4, 100, 101, 100, 100]
    assert batch.positions.tolist() == [5, 6, 7, 0, 6, 7, 8, 1]
    assert batch.rows.pattern.reach.tolist() == [1, 2, 3, 1, 1, 1, 3, 1]
    assert (batch.num_chain_rows, batch.num_mask_rows, batch.num_rows) == (4, 4, 8)


def test_rows_are_padded_to_a_multiple_of_four() -> None:
    batch = build(Segment([1, 2, 3, 4, 5], 0, [0, 1]))
    assert (batch.num_rows, len(batch.ids)) == (5, 8)


def test_pending_ids_before_the_root_carry_no_masks() -> None:
    """The last chunk of a prompt: two pending ids, of which the second is the root of one draft."""
    batch = build(Segment([1, 2, 3], 6, [0, 1, 2], DraftLayout.full(1, 1)))
    assert batch.positions.tolist()[:5] == [6, 7, 8, 8, 9]
    assert batch.mask_rows == [[range(3, 4), range(4, 5)]]


def test_chain_rows_write_the_slots_of_their_positions() -> None:
    batch = build(Segment([1, 2, 3], 3, [5, 2]), Segment([1], 0, [7]))
    assert batch.rows.chain_slots().tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 7 * 4]


def test_a_chain_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="Segment 1 has 2 chain rows from position 3, 0 drafts and 1 pages of 4"):
        build(Segment([1], 0, [0]), Segment([1, 2], 3, [1]))


def test_drafts_without_a_root_are_refused() -> None:
    with pytest.raises(ValueError, match="more chain rows than drafts"):
        build(Segment([1, 2], 0, [0], DraftLayout.full(2, 1)))


def test_more_masks_than_the_checkpoint_has_are_refused() -> None:
    with pytest.raises(ValueError, match="Segment 0 lays out 4 masks; the checkpoint has 3"):
        build(Segment([1], 0, [0], DraftLayout(0, (4,))))
