"""The recurrent head: its function, its vocabulary, and what it learns from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.training import random_ids, read_model, rows_for, tiny_plan
from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, anchor_rows, train_batch
from space_train.networks.recurrent_head import RecurrentHeadModule
from space_train.networks.trainee import Trainee
from space_train.train_plan import HeadForm, Method, TrainPlan
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor
from torch.nn import functional

LENGTH, VOCAB, HIDDEN = 24, 128, 64
ANCHORS = [[(3, 1), (4, 4), (9, 2), (20, 4)], [(2, 2), (7, 4), (8, 1), (12, 4)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=0)


def alone(**changes: object) -> TrainPlan:
    """The recurrent head alone."""
    return tiny_plan(Method.HEAD, head=HeadForm.NONE, **{"recurrent_head": 8, "recurrent_drafts": 4} | changes)


def trainee_of(folder: Path, plan: TrainPlan, draft_ids: Tensor | None = None) -> Trainee:
    trainee = Trainee(read_model(folder), plan, [], draft_ids)
    if trainee.recurrent is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in (trainee.recurrent.w1, trainee.recurrent.w2):
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return trainee


def texts() -> Texts:
    ids = torch.tensor([random_ids(LENGTH, seed) for seed in (1, 2)])
    every = torch.ones_like(ids, dtype=torch.bool)
    return Texts(ids, every, torch.zeros_like(ids), torch.ones(2, dtype=torch.bool))


def anchors_of(given: Texts) -> AnchorRows:
    return anchor_rows(ANCHORS, given.learned.numpy())


def states_by_hand(
    head: RecurrentHeadModule, real: Tensor, ids: list[int], embedding: Tensor, m: int, depth: int
) -> Tensor:
    """The states behind root m - 1, by the formula: [depth, E]"""
    state, found = real[m - 1], []
    for j in range(1, depth + 1):
        both = torch.cat((state, head.embedding_scale * embedding[ids[min(m + j - 1, LENGTH - 1)]]))
        state = state + head.w2 @ functional.silu(head.w1 @ both)
        found.append(state)
    return torch.stack(found)


def test_states_follow_from_the_root_and_the_tokens_behind_it(folder: Path) -> None:
    trainee, given = trainee_of(folder, alone()), texts()
    anchors, head, decoder = anchors_of(given), trainee.recurrent, trainee.decoder
    with torch.no_grad():
        real = trainee.real_rows(given)
        states = head.unroll(real, given.ids, anchors, decoder.embed)
        for text, ids in enumerate(given.ids.tolist()):
            for group, (m, depth) in enumerate(ANCHORS[text]):
                wanted = states_by_hand(head, real[text], ids, decoder.embedding, m, depth)
                torch.testing.assert_close(states[text][anchors.group[text] == group], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [None, [3, 17, 18, 40, 99, 101, 120]])
def test_the_loss_is_the_cross_entropy_to_the_model_over_the_draft_vocabulary(
    ids: list[int] | None, folder: Path
) -> None:
    """Draft j behind root m - 1 learns what the model predicts behind the text's own token m + j - 1."""
    trainee, given = trainee_of(folder, alone(), None if ids is None else torch.tensor(ids)), texts()
    anchors, head, decoder = anchors_of(given), trainee.recurrent, trainee.decoder
    found = trainee(TrainBatch(None, given, None, recurrent=anchors))
    some, wanted, count = list(range(VOCAB)) if ids is None else ids, torch.zeros(()), 0
    with torch.no_grad():
        logits = read_model(folder)(given.ids).logits
        real = trainee.real_rows(given)
        for text, own in enumerate(given.ids.tolist()):
            for m, depth in ANCHORS[text]:
                for j, state in enumerate(states_by_hand(head, real[text], own, decoder.embedding, m, depth), start=1):
                    if m + j < LENGTH:
                        p = logits[text, m + j - 1, some].softmax(-1)
                        wanted -= (p * decoder.logits(state)[some].log_softmax(-1)).sum()
                        count += 1
    assert int(anchors.learns.sum()) == count
    torch.testing.assert_close(found.recurrent, wanted, rtol=1e-4, atol=1e-4)
    assert found.masks == found.head == found.next_token == 0


def test_only_the_recurrent_head_gets_a_gradient_from_its_loss(folder: Path) -> None:
    for plan in (alone(), tiny_plan(recurrent_head=8)):
        trainee = trainee_of(folder, plan)
        trainee(train_batch(rows_for(plan), plan, 0, 4)).recurrent.backward()
        learnt = {name for name, p in trainee.named_parameters() if p.grad is not None and p.grad.any()}
        assert learnt == {"recurrent.w1", "recurrent.w2"}


def test_masks_stand_where_they_stood_and_learn_what_they_learnt_bit_by_bit(folder: Path) -> None:
    sums = []
    for recurrent in (0, 8):
        plan = tiny_plan(recurrent_head=recurrent)
        trainee = trainee_of(folder, plan)
        trainee.adapters.initialise(torch.Generator().manual_seed(0), torch.zeros(HIDDEN), 1.0)
        trainee.head.initialise(torch.Generator().manual_seed(0))
        losses = trainee(train_batch(rows_for(plan), plan, 0, 4))
        (losses.masks + losses.head + losses.recurrent).backward()
        grads = {name: p.grad for name, p in trainee.named_parameters() if p.grad is not None}
        sums.append((losses.masks, losses.head, grads))
    (masks, head, grads), (masks_beside, head_beside, grads_beside) = sums
    assert torch.equal(masks, masks_beside)
    assert torch.equal(head, head_beside)
    assert all(torch.equal(grad, grads_beside[name]) for name, grad in grads.items())
    assert grads_beside.keys() - grads.keys() == {"recurrent.w1", "recurrent.w2"}


def test_rows_without_anchors_give_the_head_a_gradient_of_nothing(folder: Path) -> None:
    trainee = trainee_of(folder, alone())
    losses = trainee(TrainBatch(texts(), None, None))
    (losses.head + losses.recurrent).backward()
    assert all(p.grad is not None and not p.grad.any() for p in trainee.trained.values())


def test_the_vocabulary_is_the_ids_that_are_targets_most_often() -> None:
    data = rows_for(tiny_plan())
    counts = np.zeros(VOCAB, dtype=np.int64)
    rows = data.rows(0, len(data.streams[0].rows))
    np.add.at(counts, rows.ids[rows.learned].numpy(), 1)
    most = sorted(range(VOCAB), key=lambda number: (-counts[number], number))
    assert data.frequent_ids(9, VOCAB).tolist() == sorted(most[:9])
    assert data.frequent_ids(9, VOCAB, never=most[:2]).tolist() == sorted(most[2:11])
    assert data.frequent_ids(VOCAB, VOCAB) is None
