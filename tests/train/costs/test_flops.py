"""Operations are counted as torch counts them, and by document where torch cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import random_ids, read_model, rows_for, tiny_plan
from space_model.testing import tiny_checkpoint
from space_train.data.examples import Example
from space_train.data.train_batch import train_batch
from space_train.estimate import ModelCost, flops_of
from space_train.networks.trainee import Trainee
from space_train.train_plan import HeadForm, Method, TrainPlan
from torch.utils.flop_counter import FlopCounterMode

FULL_ROWS = [Example(random_ids(32, seed), [True] * 32) for seed in range(8)]


def trainee_of(folder: Path, plan: TrainPlan) -> Trainee:
    by_id = plan.method in {Method.FULL, Method.HEAD}
    return Trainee(read_model(folder), plan, [4, 5, 6] if by_id else [])


DEFAULT: dict[str, Any] = {}
CHANGES = [DEFAULT, {"distill": False}, {"survival": True}, {"scheduled_drafting": 0.5}, {"head": HeadForm.LOW_RANK}]


@pytest.mark.parametrize(
    ("method", "changes"),
    [(Method.SFT, DEFAULT), *((method, each) for method in Method if method is not Method.SFT for each in CHANGES)],
)
def test_operations_are_those_that_torch_counts(method: Method, changes: dict[str, Any], tmp_path: Path) -> None:
    """Within a tenth, on a model whose products outweigh its attention.

    Torch counts every pair of row and key, we only pairs that see each other; torch counts the gradient of the draft
    head's inputs only where they learn, we always; and we count the weights' gradient of masks that learn nothing.
    """
    plan = tiny_plan(method, **changes)
    trainee = trainee_of(tiny_checkpoint(tmp_path, num_masks=3, hidden_size=128, head_dim=4), plan)
    batch = train_batch(rows_for(plan, FULL_ROWS), plan, 0, 4)
    counter = FlopCounterMode(display=False)
    with counter:
        losses = trainee(batch)
        (losses.next_token + losses.masks + losses.head).backward()
    assert flops_of(trainee, ModelCost.of(trainee), batch) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_row_of_a_mixture_of_experts_costs_the_few_it_goes_to(tmp_path: Path) -> None:
    trainee = trainee_of(tiny_checkpoint(tmp_path, "mixtral", num_masks=3), tiny_plan(Method.FULL))
    attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)  # of two layers: q, k and v, o
    experts = 2 * 2 * 3 * 64 * 128  # of two layers: two of four experts, each gate, up and down
    assert ModelCost.of(trainee).body == attention + experts


def test_tokens_cost_what_their_own_document_lets_them_see(tmp_path: Path) -> None:
    """Two texts of 16 in a row see half as many pairs as one of 32, and a little more."""
    plan = tiny_plan(Method.SFT)
    trainee = trainee_of(tiny_checkpoint(tmp_path, num_masks=0), plan)
    cost = ModelCost(0, 0, 0, 0, attention=1)
    halves = [Example(random_ids(16, seed), [True] * 16) for seed in range(16)]
    found = [flops_of(trainee, cost, train_batch(rows_for(plan, texts), plan, 0, 1)) for texts in (FULL_ROWS, halves)]
    assert found == [3 * 32 * 33 / 2, 3 * 2 * 16 * 17 / 2]


def test_padding_costs_nothing(tmp_path: Path) -> None:
    plan = tiny_plan(Method.SFT, pack=False)
    trainee = trainee_of(tiny_checkpoint(tmp_path, num_masks=0), plan)
    text = random_ids(10, 1)
    data = rows_for(plan, [Example(text, [True] * 10)])
    cost = ModelCost(body=1, output=0, adapters=0, head=0, attention=0)
    assert flops_of(trainee, cost, train_batch(data, plan, 0, 2)) == 6 * 2 * 10
    assert torch.equal(data.rows(0, 1).ids[0, :10], torch.tensor(text))
