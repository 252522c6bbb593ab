"""The compiled elementwise operations of training compute what torch and its autograd do, on bfloat16 operands."""

from __future__ import annotations

import pytest
import torch
from space_kernels import training
from space_kernels.training import (
    DraftLoss,
    attention_backward,
    distill,
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
)
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
    acceptance, cross_entropy = torch.minimum(p, q).sum(-1), -(p * (0.5 * leaf).log_softmax(-1)).sum(-1)
    values = loss.entropy * cross_entropy + loss.rejection * (1 - acceptance) - loss.surprisal * acceptance.log()
    (expected,) = torch.autograd.grad(values.sum(), leaf)
    found = distill(teacher, student.clone(), loss, 0.5, needs_gradient=True)
    torch.testing.assert_close(found[0], cross_entropy.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], acceptance.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.of(*found[:2]), values.detach(), rtol=1e-4, atol=1e-4)
    assert found[2] is not None
    assert_close(0.5 * found[2].float(), expected)
    exact = distill(teacher.float(), student.float(), loss, 0.5, needs_gradient=True)
    assert exact[2] is not None
    torch.testing.assert_close(0.5 * exact[2], expected, rtol=1e-4, atol=1e-6)


def test_a_logit_that_is_no_number_shows_in_the_loss_and_in_every_gradient() -> None:
    student = random(2, 32)
    student[0, 5] = torch.nan
    cross_entropy, _, gradient = distill(random(2, 32, seed=1), student, DraftLoss(), needs_gradient=True)
    assert gradient is not None
    assert cross_entropy.isnan().tolist() == gradient.isnan().any(1).tolist() == [True, False]


@pytest.mark.parametrize("keys", [64, 75])
def test_attention_weights_and_their_gradients_are_those_of_softmax(keys: int) -> None:
    scores, grad_weights = random(3, 7, keys), random(3, 7, keys, seed=1)
    scores[:, :, 3::4] = -torch.inf
    wide = scores.float().requires_grad_()
    weights = wide.softmax(-1)
    (expected,) = torch.autograd.grad(weights, wide, grad_weights.float())
    logsumexp = scores.float().logsumexp(-1)
    found = attention_backward(scores.clone(), grad_weights.clone(), logsumexp, 0.25)
    assert_close(found[0], weights.detach())
    assert_close(found[1], 0.25 * expected)
    assert not bool(found[1][:, :, 3::4].any())


def test_norms_and_gates_are_those_of_torch() -> None:
    x, weight, grad_output = random(40, 96), random(96, seed=1), random(40, 96, seed=2)
    wide = x.float().requires_grad_()
    normed = torch.nn.functional.rms_norm(wide, (96,), weight.float(), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), normed.detach())
    assert_close(
        rms_norm_backward(x, weight, grad_output, 1e-5), torch.autograd.grad(normed, wide, grad_output.float())[0]
    )
    gate, up = random(40, 96, seed=3), random(40, 96, seed=4)
    gate_leaf, up_leaf = gate.float().requires_grad_(), up.float().requires_grad_()
    product = torch.nn.functional.silu(gate_leaf) * up_leaf
    assert_close(swiglu(gate, up), product.detach())
    expected = torch.autograd.grad(product, (gate_leaf, up_leaf), grad_output.float())
    for found, one in zip(swiglu_backward(gate, up, grad_output), expected, strict=True):
        assert_close(found, one)
