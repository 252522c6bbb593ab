"""The rows of mask training are the decoder's rows."""

import numpy as np
import pytest
import torch
from space_model.geometry.draft_layout import DraftLayout
from space_train.data.train_batch import anchor_rows, causal, choose_anchors, keep_counts

ANCHORS = [(1, 2), (3, 3), (4, 1)]
MASKS = [(m, j) for m, depth in ANCHORS for j in range(1, depth + 1)]
LENGTH = 8
EVERYWHERE = np.ones((1, LENGTH), dtype=np.bool_)
ONE_TEXT = torch.zeros(1, LENGTH, dtype=torch.int64)


def test_each_mask_sees_the_tokens_before_its_anchor_and_the_masks_of_its_group_up_to_itself() -> None:
    visible = anchor_rows([ANCHORS], EVERYWHERE).visible(ONE_TEXT)[0]
    for row, (m, j) in enumerate(MASKS):
        for key in range(LENGTH):
            assert bool(visible[row, key]) == (key < m), (m, j, key)
        for key, (other_m, other_j) in enumerate(MASKS):
            assert bool(visible[row, LENGTH + key]) == (m == other_m and other_j <= j), (m, j, other_m, other_j)


def test_masks_stand_where_group_0_of_the_decoder_stands_and_learn_the_tokens_behind_the_bonus() -> None:
    rows = anchor_rows([ANCHORS], EVERYWHERE)
    positions = [position for m, depth in ANCHORS for position in DraftLayout(0, (depth,)).mask_positions(m - 1)]
    assert rows.positions[0].tolist() == positions
    assert rows.depth[0].tolist() == [j for _, j in MASKS]
    assert rows.target[0].tolist() == [m + j for m, j in MASKS]
    assert rows.source[0].tolist() == [m + j - 1 for m, j in MASKS]


def test_nothing_is_seen_of_another_text() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    visible = anchor_rows([[(5, 1)]], EVERYWHERE).visible(document)[0, 0, :LENGTH]
    assert visible.tolist() == [False, False, False, True, True, False, False, False]
    seen = causal(document)[0]
    assert seen[4].tolist() == [False, False, False, True, True, False, False, False]


def test_each_text_has_anchors_of_its_own_but_as_many_rows_as_the_others() -> None:
    two = np.ones((2, LENGTH), dtype=np.bool_)
    rows = anchor_rows([[(1, 2), (4, 1)], [(2, 1), (3, 2)]], two)
    assert rows.positions.tolist() == [[1, 2, 4], [2, 3, 4]]
    assert rows.group.tolist() == [[0, 0, 1], [0, 1, 1]]
    with pytest.raises(ValueError, match=r"as many mask rows; got \[1, 2\]"):
        anchor_rows([[(1, 2)], [(1, 1)]], two)


def test_a_mask_learns_only_a_target_that_exists_and_is_to_be_learnt() -> None:
    learnable = EVERYWHERE.copy()
    learnable[0, 5] = False
    rows = anchor_rows([[(3, 3), (6, 2)]], learnable)  # targets 4 5 6 and 7 8
    assert rows.learns[0].tolist() == [True, False, True, True, False]


def test_deep_masks_are_dropped_so_that_rows_stay_few() -> None:
    assert keep_counts(num_anchors=10, num_masks=4) == [10, 7, 5, 3]
    assert keep_counts(num_anchors=10, num_masks=4, keep=1.0) == [10, 10, 10, 10]
    assert keep_counts(num_anchors=100, num_masks=6) == [100, 70, 49, 34, 24, 20]


def test_every_choice_of_anchors_has_the_same_number_of_rows_and_targets_inside_where_there_is_room() -> None:
    counts = keep_counts(num_anchors=10, num_masks=4)
    for seed in range(5):
        anchors = choose_anchors(np.arange(1, 22), 24, counts, np.random.default_rng(seed))
        assert len({m for m, _ in anchors}) == 10
        rows = anchor_rows([anchors], np.ones((1, 24), dtype=np.bool_))
        assert [int((rows.depth == j).sum()) for j in (1, 2, 3, 4)] == counts
        assert bool(rows.learns.all())


@pytest.mark.parametrize("places", [[], [2], [2, 22]])
def test_too_few_places_are_taken_several_times(places: list[int]) -> None:
    counts = keep_counts(num_anchors=4, num_masks=3)
    anchors = choose_anchors(np.array(places, dtype=np.int64), 24, counts, np.random.default_rng(0))
    assert len(anchors) == 4
    assert {m for m, _ in anchors} <= set(places or [1])
    assert sum(depth for _, depth in anchors) == sum(counts)
