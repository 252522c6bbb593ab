"""An update's rows: which have masks, where, and what learns. A pure function of plan and row numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles.training import random_examples, random_ids, rows_for, tiny_plan
from space_model.geometry.draft_layout import DraftLayout
from space_train.data.examples import NOT_LEARNED, Example
from space_train.data.paper_collator import cut_at
from space_train.data.rows import MixedRows, PackedExamples, RowStream
from space_train.data.train_batch import (
    TrainBatch,
    anchor_rows,
    causal,
    choose_anchors,
    is_plain,
    keep_counts,
    train_batch,
    within_documents,
)
from space_train.train_plan import Anchors, Method, TrainPlan
from torch import Tensor

MASK_IDS = [4, 5, 6]
ONE = tiny_plan(Method.FULL, anchors=Anchors.ONE, pack=False, keep=1.0, distill=False)


def parts_of(batch: TrainBatch) -> list[Tensor]:
    """Every tensor of a batch."""
    texts = [texts for texts in (batch.plain, batch.masked) if texts is not None]
    found = [part for text in texts for part in (text.ids, text.learned, text.document, text.teaches)]
    if batch.anchors is not None:
        found += [batch.anchors.root, batch.anchors.depth, batch.anchors.group, batch.anchors.learns]
    return found


@pytest.mark.parametrize(
    ("share", "plain"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8), (0.1, 0)], ids=lambda value: str(value)
)
def test_a_share_of_rows_goes_without_masks_evenly_spread(share: float, plain: int) -> None:
    pattern = [is_plain(row, share) for row in range(1000)]
    assert sum(pattern[:8]) == plain
    assert sum(pattern) == round(1000 * share)
    for first in range(0, 1000, 20):
        assert abs(sum(pattern[first : first + 20]) - 20 * share) <= 1


def test_plain_and_masked_rows_are_those_of_the_pattern() -> None:
    plan = tiny_plan(Method.FULL, ar_share=0.25)
    data = rows_for(plan)
    batch = train_batch(data, plan, 0, 8)
    rows = data.rows(0, 8).ids
    assert torch.equal(batch.plain.ids, rows[[3, 7]])
    assert torch.equal(batch.masked.ids, rows[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("plan", [tiny_plan(ar_share=0.25), replace(ONE, distill=True)])
def test_the_parts_of_an_update_are_its_rows_however_it_is_parted(plan: TrainPlan) -> None:
    plan = replace(plan, anchors=Anchors.MANY)  # one cut gives each part a width of its own
    whole = parts_of(train_batch(rows_for(plan), plan, 8, 8))
    halves = [parts_of(train_batch(rows_for(plan), plan, first, 4)) for first in (8, 12)]
    for number, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([half[number] for half in halves]))


def test_the_control_has_no_masks() -> None:
    plan = tiny_plan(Method.SFT)
    batch = train_batch(rows_for(plan), plan, 0, 4)
    assert len(batch.plain.ids) == 4
    assert batch.masked is batch.anchors is None


def test_every_anchor_teaches_within_its_document_and_only_what_is_to_be_learnt() -> None:
    plan = tiny_plan(length=64)
    data = rows_for(plan, random_examples(30, 8, 20))
    batch = train_batch(data, plan, 0, 4)
    masked, anchors = batch.masked, batch.anchors
    for text in range(4):
        document, learned = masked.document[text].tolist(), masked.learned[text].tolist()
        for root, depth, learns in zip(
            anchors.root[text].tolist(), anchors.depth[text].tolist(), anchors.learns[text].tolist(), strict=True
        ):
            target = root + depth + 1
            inside = target < 64 and document[target] == document[root] != -1
            assert learns == (inside and learned[target])
            if depth == 1:
                assert learns, "every anchor has a first mask that learns"
    assert torch.equal(within_documents(anchors, masked).learns, anchors.learns)


def cut_of(batch: TrainBatch, text: int) -> int:
    """m: the place of the bonus of the only anchor."""
    return int(batch.anchors.root[text, 0]) + 1


@pytest.mark.parametrize("distill", [False, True])
def test_a_cut_text_teaches_what_the_papers_collator_teaches_at_the_same_cut(distill: bool) -> None:
    plan = replace(ONE, distill=distill)
    examples = [Example(random_ids(length, length), [place > 4 for place in range(length)]) for length in range(14, 30)]
    batch = train_batch(rows_for(plan, examples), plan, 0, 8)
    by_start = {tuple(example.ids[:5]): example for example in examples}
    for text in range(8):
        ids, cut = batch.masked.ids[text].tolist(), cut_of(batch, text)
        example = by_start[tuple(ids[:5])]
        expected: dict[int, int] = {}  # the row at a position learns an id
        for position in range(len(ids)):
            if bool(batch.masked.is_target[text, position]):
                expected[position - 1] = ids[position]
        depths, learns = batch.anchors.depth[text].tolist(), batch.anchors.learns[text].tolist()
        masks = {cut - 1 + j: example.ids[cut + j] for j, learn in zip(depths, learns, strict=True) if learn}
        # The collator wants k targets behind a cut; ours only keeps those that there are.
        if cut + len(MASK_IDS) >= len(example.ids):
            continue
        labels = cut_at(example, cut, MASK_IDS).labels
        theirs = {position - 1: label for position, label in enumerate(labels) if label != NOT_LEARNED}
        assert theirs == expected | masks
        assert not set(expected) & set(masks)


def test_what_is_behind_a_cut_is_read_only_for_teachers() -> None:
    for distill, reach in ((False, 0), (True, 3)):
        plan = replace(ONE, distill=distill)
        batch = train_batch(rows_for(plan), plan, 0, 6)
        whole = rows_for(plan).rows(0, 6)
        for text in range(6):
            read = int((batch.masked.document[text] >= 0).sum())
            assert read == min(cut_of(batch, text) + 1 + reach, int((whole.document[text] >= 0).sum()))


def cuts_by_text(plan: TrainPlan, data: MixedRows, epoch: int) -> dict[tuple[int, ...], int]:
    batch = train_batch(data, plan, epoch * len(data), len(data))
    return {tuple(ids): cut_of(batch, text) for text, ids in enumerate(batch.masked.ids[:, :8].tolist())}


def test_fixed_cuts_are_the_same_in_every_epoch_and_each_texts_own() -> None:
    plan = replace(ONE, fixed_cuts=True)
    data = rows_for(plan)
    assert cuts_by_text(plan, data, 0) == cuts_by_text(plan, data, 1)
    fresh = replace(ONE, fixed_cuts=False)
    assert cuts_by_text(fresh, data, 0) != cuts_by_text(fresh, data, 1)
    # A template's first lines are the same in every text.
    plan = replace(ONE, fixed_cuts=True)
    begin = random_ids(20, 0)
    examples = [Example(begin + random_ids(12, seed), [True] * 32) for seed in range(1, 17)]
    data = MixedRows([RowStream(PackedExamples(examples, length=32, seed=0, pad_id=0, pack=False), 1.0)], 0)
    batch = train_batch(data, plan, 0, 16)
    assert len({cut_of(batch, text) for text in range(16)}) > 6


ANCHORS = [(1, 2), (3, 3), (4, 1)]
MASKS = [(m, j) for m, depth in ANCHORS for j in range(1, depth + 1)]
LENGTH = 8
EVERYWHERE = np.ones((1, LENGTH), dtype=np.bool_)
ONE_TEXT = torch.zeros(1, LENGTH, dtype=torch.int64)


def test_masks_see_stand_and_learn_as_group_0_of_the_decoder() -> None:
    visible = anchor_rows([ANCHORS], EVERYWHERE).visible(ONE_TEXT)[0]
    for row, (m, j) in enumerate(MASKS):
        for key in range(LENGTH):
            assert bool(visible[row, key]) == (key < m), (m, j, key)
        for key, (other_m, other_j) in enumerate(MASKS):
            assert bool(visible[row, LENGTH + key]) == (m == other_m and other_j <= j), (m, j, other_m, other_j)
    rows = anchor_rows([ANCHORS], EVERYWHERE)
    positions = [position for m, depth in ANCHORS for position in DraftLayout(0, (depth,)).mask_positions(m - 1)]
    assert rows.positions[0].tolist() == positions
    assert rows.depth[0].tolist() == [j for _, j in MASKS]
    assert rows.target[0].tolist() == [m + j for m, j in MASKS]


def test_each_text_has_anchors_of_its_own_and_sees_and_learns_nothing_of_another() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    visible = anchor_rows([[(5, 1)]], EVERYWHERE).visible(document)[0, 0, :LENGTH]
    assert visible.tolist() == [False, False, False, True, True, False, False, False]
    seen = causal(document)[0]
    assert seen[4].tolist() == [False, False, False, True, True, False, False, False]
    two = np.ones((2, LENGTH), dtype=np.bool_)
    rows = anchor_rows([[(1, 2), (4, 1)], [(2, 1), (3, 2)]], two)
    assert rows.positions.tolist() == [[1, 2, 4], [2, 3, 4]]
    assert rows.group.tolist() == [[0, 0, 1], [0, 1, 1]]
    with pytest.raises(ValueError, match=r"as many mask rows; got \[1, 2\]"):
        anchor_rows([[(1, 2)], [(1, 1)]], two)
    learnable = EVERYWHERE.copy()
    learnable[0, 5] = False
    rows = anchor_rows([[(3, 3), (6, 2)]], learnable)  # targets 4 5 6 and 7 8
    assert rows.learns[0].tolist() == [True, False, True, True, False]


def test_every_choice_of_anchors_has_the_same_few_rows_with_targets_inside() -> None:
    assert keep_counts(num_anchors=10, num_masks=4) == [10, 7, 5, 3]
    assert keep_counts(num_anchors=10, num_masks=4, keep=1.0) == [10, 10, 10, 10]
    assert keep_counts(num_anchors=100, num_masks=6) == [100, 70, 49, 34, 24, 20]
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
