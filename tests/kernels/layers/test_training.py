"""The compiled elementwise parts of training compute what torch's definitions do, on bfloat16 operands."""

from __future__ import annotations

import pytest
import torch
from space_kernels import training
from space_kernels.training import DraftLoss, attention_back, distill, rms_norm, rms_norm_back, swiglu, swiglu_back
from torch import Tensor

pytestmark = pytest.mark.skipif(training.cpu_library() is None, reason="no compiled operations for this processor")


def random(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).bfloat16()


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 0.01


@pytest.mark.parametrize("loss", [DraftLoss(), DraftLoss(0.0, 1.0), DraftLoss(0.0, 0.0, 1.0), DraftLoss(0.5, 2.0, 0.3)])
def test_a_draft_loss_and_its_gradient_are_those_of_autograd(loss: DraftLoss) -> None:
    teacher, student = random(5, 160, scale=3.0), random(5, 160, seed=1, scale=3.0)
    leaf = student.float().requires_grad_()
    p, q = (0.5 * teacher.float()).softmax(-1), (0.5 * leaf).softmax(-1)
    accepted, crosses = torch.minimum(p, q).sum(-1), -(p * (0.5 * leaf).log_softmax(-1)).sum(-1)
    values = loss.entropy * crosses + loss.rejection * (1 - accepted) - loss.surprisal * accepted.log()
    (expected,) = torch.autograd.grad(values.sum(), leaf)
    found = distill(teacher, student.clone(), loss, 0.5, moves=True)
    torch.testing.assert_close(found[0], crosses.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], accepted.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.of(*found[:2]), values.detach(), rtol=1e-4, atol=1e-4)
    assert found[2] is not None
    assert_close(0.5 * found[2].float(), expected)
    exact = distill(teacher.float(), student.float(), loss, 0.5, moves=True)
    assert exact[2] is not None
    torch.testing.assert_close(0.5 * exact[2], expected, rtol=1e-4, atol=1e-6)


def test_a_logit_that_is_no_number_shows_in_the_loss_and_in_every_gradient() -> None:
    student = random(2, 32)
    student[0, 5] = torch.nan
    crosses, _, gradient = distill(random(2, 32, seed=1), student, DraftLoss(), moves=True)
    assert gradient is not None
    assert crosses.isnan().tolist() == gradient.isnan().any(1).tolist() == [True, False]


@pytest.mark.parametrize("keys", [64, 75])
def test_attention_weights_and_their_gradients_are_those_of_softmax(keys: int) -> None:
    scores, moves = random(3, 7, keys), random(3, 7, keys, seed=1)
    scores[:, :, 3::4] = -torch.inf
    wide = scores.float().requires_grad_()
    weights = wide.softmax(-1)
    (expected,) = torch.autograd.grad(weights, wide, moves.float())
    log_sums = scores.float().logsumexp(-1)
    found = attention_back(scores.clone(), moves.clone(), log_sums, 0.25)
    assert_close(found[0], weights.detach())
    assert_close(found[1], 0.25 * expected)
    assert not bool(found[1][:, :, 3::4].any())


def test_norms_and_gates_are_those_of_torch() -> None:
    x, weight, move = random(40, 96), random(96, seed=1), random(40, 96, seed=2)
    wide = x.float().requires_grad_()
    normed = torch.nn.functional.rms_norm(wide, (96,), weight.float(), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), normed.detach())
    assert_close(rms_norm_back(x, weight, move, 1e-5), torch.autograd.grad(normed, wide, move.float())[0])
    gate, up = x.float().requires_grad_(), move.float().requires_grad_()
    product = torch.nn.functional.silu(gate) * up
    assert_close(swiglu(x, move), product.detach())
    expected = torch.autograd.grad(product, (gate, up), 0.5 * move.float())
    for found, one in zip(swiglu_back(x, move, 0.5 * move), expected, strict=True):
        assert_close(found, one)
