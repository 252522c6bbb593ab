"""The rows of mask training are the decoder's rows."""

import numpy as np
import pytest
import torch
from space_model.draft_layout import DraftLayout
from space_train.anchors import anchor_rows, choose_anchors, keep_counts
from space_train.network import Network, NetworkShape

ANCHORS = [(1, 2), (3, 3), (4, 1)]
LENGTH = 8


def small_network() -> Network:
    network = Network(NetworkShape(20, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
    network.initialise(torch.Generator().manual_seed(0))
    return network


def test_each_mask_sees_the_tokens_before_its_anchor_and_the_masks_of_its_group_up_to_itself() -> None:
    rows = anchor_rows(LENGTH, ANCHORS)
    masks = [(m, j) for m, depth in ANCHORS for j in range(1, depth + 1)]
    for row in range(LENGTH + len(masks)):
        for key in range(LENGTH + len(masks)):
            if row < LENGTH:
                expected = key <= row
            elif key < LENGTH:
                expected = key < masks[row - LENGTH][0]
            else:
                (m, j), (other_m, other_j) = masks[row - LENGTH], masks[key - LENGTH]
                expected = m == other_m and other_j <= j
            assert bool(rows.visible[row, key]) == expected, (row, key)


def test_masks_stand_where_group_0_of_the_decoder_stands_and_learn_the_tokens_behind_the_bonus() -> None:
    rows = anchor_rows(LENGTH, ANCHORS)
    positions = [position for m, depth in ANCHORS for position in DraftLayout(0, (depth,)).mask_positions(m - 1)]
    assert rows.positions.tolist() == [*range(LENGTH), *positions]
    masks = [(m, j) for m, depth in ANCHORS for j in range(1, depth + 1)]
    assert rows.depth.tolist() == [j for _, j in masks]
    assert rows.target.tolist() == [m + j for m, j in masks]
    assert rows.source.tolist() == [m + j - 1 for m, j in masks]


def test_a_training_pass_gives_every_mask_the_hidden_row_of_a_decoding_step_and_leaves_the_real_rows_alone() -> None:
    network = small_network()
    ids, mask_ids = torch.tensor([[9, 3, 12, 7, 15, 11, 2, 18]]), torch.tensor([4, 5, 6])
    rows = anchor_rows(LENGTH, ANCHORS)
    with torch.no_grad():
        packed = network(torch.cat((ids, mask_ids[rows.depth - 1][None]), dim=1), rows.positions, rows.visible)
        torch.testing.assert_close(packed[:, :LENGTH], network(ids))
        row = LENGTH
        for m, depth in ANCHORS:
            # A step with root x_{m-1} and no drafts: the masks follow the root as if they were the text.
            step = network(torch.cat((ids[:, :m], mask_ids[None, :depth]), dim=1))
            torch.testing.assert_close(packed[:, row : row + depth], step[:, m:])
            row += depth


def test_every_choice_of_anchors_has_the_same_number_of_rows_and_all_targets_inside() -> None:
    counts = keep_counts(num_anchors=10, num_masks=4)
    assert counts == [10, 7, 5, 3]
    for seed in range(5):
        anchors = choose_anchors(24, counts, np.random.default_rng(seed))
        assert len({m for m, _ in anchors}) == 10
        rows = anchor_rows(24, anchors)
        assert [int((rows.depth == j).sum()) for j in (1, 2, 3, 4)] == counts
        assert min(m for m, _ in anchors) >= 1
        assert int(rows.target.max()) < 24


def test_more_anchors_than_places_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"10 anchors of 2 masks do not fit 8 tokens; 5 do"):
        choose_anchors(8, [10, 5], np.random.default_rng(0))
