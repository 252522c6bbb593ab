"""An update's rows: which have masks, where, and what learns. A pure function of plan and row numbers."""

from dataclasses import replace

import pytest
import torch
from doubles.training import random_examples, random_ids, rows_for, tiny_plan
from space_train.data.examples import NOT_LEARNED, Example
from space_train.data.paper_collator import cut_at
from space_train.data.rows import MixedRows, PackedExamples, RowStream
from space_train.data.train_batch import TrainBatch, is_plain, train_batch, within_documents
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
    return found if batch.own_draft_rows is None else [*found, batch.own_draft_rows]


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
    assert batch.plain is not None
    assert batch.masked is not None
    rows = data.rows(0, 8).ids
    assert torch.equal(batch.plain.ids, rows[[3, 7]])
    assert torch.equal(batch.masked.ids, rows[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("plan", [tiny_plan(ar_share=0.25, scheduled_drafting=0.5), replace(ONE, distill=True)])
def test_the_parts_of_an_update_are_its_rows_however_it_is_parted(plan: TrainPlan) -> None:
    plan = replace(plan, anchors=Anchors.MANY)  # one cut gives each part a width of its own
    whole = parts_of(train_batch(rows_for(plan), plan, 8, 8))
    halves = [parts_of(train_batch(rows_for(plan), plan, first, 4)) for first in (8, 12)]
    for number, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([half[number] for half in halves]))


def test_the_control_has_no_masks() -> None:
    plan = tiny_plan(Method.SFT)
    batch = train_batch(rows_for(plan), plan, 0, 4)
    assert batch.plain is not None
    assert len(batch.plain.ids) == 4
    assert batch.masked is batch.anchors is batch.own_draft_rows is None


def test_every_anchor_teaches_within_its_document_and_only_what_is_to_be_learnt() -> None:
    plan = tiny_plan(length=64)
    data = rows_for(plan, random_examples(30, 8, 20))
    batch = train_batch(data, plan, 0, 4)
    assert batch.masked is not None
    assert batch.anchors is not None
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


def test_own_drafts_are_told_to_a_share_of_the_masks_behind_a_first_one() -> None:
    plan = tiny_plan(scheduled_drafting=0.5, length=128)
    batch = train_batch(rows_for(plan), plan, 0, 8)
    assert batch.own_draft_rows is not None
    assert batch.anchors is not None
    behind = batch.anchors.depth > 1
    assert not bool((batch.own_draft_rows & ~behind).any())
    assert 0.4 < float(batch.own_draft_rows[behind].float().mean()) < 0.6
    assert train_batch(rows_for(plan), replace(plan, scheduled_drafting=0.0), 0, 4).own_draft_rows is None


# -------------------------------------------------------------------------------------------------- one cut a text


def cut_of(batch: TrainBatch, text: int) -> int:
    """m: the place of the bonus of the only anchor."""
    assert batch.anchors is not None
    return int(batch.anchors.root[text, 0]) + 1


@pytest.mark.parametrize("distill", [False, True])
def test_a_cut_text_teaches_what_the_papers_collator_teaches_at_the_same_cut(distill: bool) -> None:
    plan = replace(ONE, distill=distill)
    examples = [Example(random_ids(length, length), [place > 4 for place in range(length)]) for length in range(14, 30)]
    batch = train_batch(rows_for(plan, examples), plan, 0, 8)
    assert batch.masked is not None
    assert batch.anchors is not None
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
    for distill, survival, reach in ((False, False, 0), (True, False, 3), (False, True, 3)):
        plan = replace(ONE, distill=distill, survival=survival)
        batch = train_batch(rows_for(plan), plan, 0, 6)
        assert batch.masked is not None
        whole = rows_for(plan).rows(0, 6)
        for text in range(6):
            read = int((batch.masked.document[text] >= 0).sum())
            assert read == min(cut_of(batch, text) + 1 + reach, int((whole.document[text] >= 0).sum()))


def cuts_by_text(plan: TrainPlan, data: MixedRows, epoch: int) -> dict[tuple[int, ...], int]:
    batch = train_batch(data, plan, epoch * len(data), len(data))
    assert batch.masked is not None
    return {tuple(ids): cut_of(batch, text) for text, ids in enumerate(batch.masked.ids[:, :8].tolist())}


def test_fixed_cuts_are_the_same_in_every_epoch_and_others_are_not() -> None:
    plan = replace(ONE, fixed_cuts=True)
    data = rows_for(plan)
    assert cuts_by_text(plan, data, 0) == cuts_by_text(plan, data, 1)
    fresh = replace(ONE, fixed_cuts=False)
    assert cuts_by_text(fresh, data, 0) != cuts_by_text(fresh, data, 1)


def test_fixed_cuts_of_texts_that_begin_alike_are_at_places_of_their_own() -> None:
    """A template's first lines are the same in every text."""
    plan = replace(ONE, fixed_cuts=True)
    begin = random_ids(20, 0)
    examples = [Example(begin + random_ids(12, seed), [True] * 32) for seed in range(1, 17)]
    data = MixedRows([RowStream(PackedExamples(examples, length=32, seed=0, pad_id=0, pack=False), 1.0)], 0)
    batch = train_batch(data, plan, 0, 16)
    assert len({cut_of(batch, text) for text in range(16)}) > 6
