"""Losses by hand."""

import math

import pytest
import torch
from space_train.networks import trainee
from space_train.networks.trainee import best, chances, hard, soft, survival, weighted
from torch import Tensor

E, V, N = 4, 7, 9


def logits(hidden: Tensor) -> Tensor:
    return hidden @ torch.randn(E, V, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(0))


LABELS = torch.arange(N) % V
WEIGHTS = torch.linspace(0.0, 1.0, N)


def test_a_mask_weighs_what_the_teacher_gives_to_the_drafts_before_it_in_its_group() -> None:
    chance = torch.tensor([[0.5, 0.2, 0.9, 0.25, 0.8]]).log()  # two groups: three masks, two masks
    depth = torch.tensor([[1, 2, 3, 1, 2]])
    torch.testing.assert_close(survival(chance, depth), torch.tensor([[1.0, 0.5, 0.1, 1.0, 0.25]]))


def test_weights_of_a_late_group_are_exact_behind_thousands_of_unlikely_tokens() -> None:
    chance = torch.full((1, 4000), -15.0)
    chance[0, -2:] = math.log(0.5)
    depth = torch.tensor([[1, 2] * 2000])
    assert survival(chance, depth)[0, -2:].tolist() == pytest.approx([1.0, 0.5], abs=1e-6)


def test_the_soft_loss_is_the_cross_entropy_to_the_teachers_distribution(hidden: Tensor) -> None:
    teacher = torch.randn(N, E, generator=torch.Generator().manual_seed(1))
    p, log_q = logits(teacher).softmax(-1), logits(hidden).log_softmax(-1)
    nats = [-float((a * b).sum()) for a, b in zip(p, log_q, strict=True)]
    expected = sum(w * n for w, n in zip(WEIGHTS.tolist(), nats, strict=True))
    assert float(soft(logits, hidden, teacher, WEIGHTS)) == pytest.approx(expected, rel=1e-5)


def test_the_soft_loss_is_least_where_the_mask_says_what_the_teacher_says(hidden: Tensor) -> None:
    rows = hidden.clone().requires_grad_()
    every = torch.ones(N)
    soft(logits, rows, hidden, every).backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.zeros(N, E), rtol=0, atol=1e-5)


def test_the_teacher_learns_nothing(hidden: Tensor) -> None:
    teacher = hidden.clone().requires_grad_()
    student = hidden.flip(0).clone().requires_grad_()
    soft(logits, student, teacher, torch.ones(N)).backward()
    assert teacher.grad is None


def test_hard_and_weighted_losses_are_the_nats_of_the_labels(hidden: Tensor) -> None:
    nats = [-float(row[label]) for row, label in zip(logits(hidden).log_softmax(-1), LABELS, strict=True)]
    assert float(hard(logits, hidden, LABELS)) == pytest.approx(sum(nats), rel=1e-5)
    expected = sum(w * n for w, n in zip(WEIGHTS.tolist(), nats, strict=True))
    assert float(weighted(logits, hidden, LABELS, WEIGHTS)) == pytest.approx(expected, rel=1e-5)
    assert chances(logits, hidden, LABELS).tolist() == pytest.approx([-n for n in nats], rel=1e-5)
    assert best(logits, hidden).tolist() == logits(hidden).argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1, 2, 4, N])
def test_losses_and_gradients_do_not_depend_on_how_many_rows_are_held_at_once(
    chunk: int, hidden: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> tuple[Tensor, ...]:
        rows = hidden.clone().requires_grad_()
        total = hard(logits, rows, LABELS) + soft(logits, rows, hidden.flip(0), WEIGHTS)
        total = total + weighted(logits, rows, LABELS, WEIGHTS)
        total.backward()
        assert rows.grad is not None
        return total.detach(), rows.grad, chances(logits, hidden, LABELS), best(logits, hidden)

    whole = found()
    monkeypatch.setattr(trainee, "CHUNK", chunk)
    for one, other in zip(found(), whole, strict=True):
        torch.testing.assert_close(one, other)


def test_no_rows_are_no_loss_and_have_a_gradient_of_nothing() -> None:
    rows = torch.zeros(0, E, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    total = hard(logits, rows, none) + weighted(logits, rows, none, torch.zeros(0))
    (total + soft(logits, rows, rows, torch.zeros(0))).backward()
    assert total.item() == 0.0
    assert rows.grad is not None
