"""Elementwise operations of training on a CPU, with their gradients.

bfloat16 operands are computed by the compiled library in one pass over memory; all others by torch. Both compute the
same up to rounding.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, DistillationStruct, cpu_library

LANES = 16


@dataclass(frozen=True)
class DraftLoss:
    """Factors of the three terms of a loss between a student's distribution q and a teacher's p."""

    entropy: float = 1.0  # -Σ p·log q
    rejection: float = 0.0  # 1 - Σ min(p, q): the chance that a sampled draft is rejected
    surprisal: float = 0.0  # -log Σ min(p, q)

    def of(self, cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
        """Return the loss of each row from -Σ p·log q and Σ min(p, q), both [N]."""
        found = self.entropy * cross_entropy
        if self.rejection:
            found = found + self.rejection * (1.0 - acceptance)
        return found - self.surprisal * acceptance.clamp(min=1e-9).log() if self.surprisal else found


def distill(
    teacher: Tensor, student: Tensor, loss: DraftLoss, scale: float = 1.0, *, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compare q = softmax(scale·student) with p = softmax(scale·teacher), logits [N, V] each.

    Returns the cross-entropy -Σ p·log q and the acceptance Σ min(p, q), [N] float32 each, and with `needs_gradient` the
    gradient [N, V] of `loss` by scale·student, in the dtype of `student`, which may be overwritten.
    """
    library = _library(teacher, student) if student.shape[1] % LANES == 0 else None
    if library is None:
        return _distill(teacher, student, loss, scale, needs_gradient)
    cross_entropy, acceptance = torch.empty(2, len(student)).unbind()
    struct = DistillationStruct(
        teacher.data_ptr(), student.data_ptr(), *student.shape, scale, loss.entropy, loss.rejection, loss.surprisal,
        needs_gradient, cross_entropy.data_ptr(), acceptance.data_ptr(),
    )  # fmt: skip
    library.distill(byref(struct), torch.get_num_threads())
    return cross_entropy, acceptance, student if needs_gradient else None


def _distill(
    teacher: Tensor, student: Tensor, loss: DraftLoss, scale: float, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    p, log_q = (scale * teacher.float()).softmax(-1), (scale * student.float()).log_softmax(-1)
    q = log_q.exp()
    cross_entropy, acceptance = -(p * log_q).sum(-1), torch.minimum(p, q).sum(-1)
    if not needs_gradient:
        return cross_entropy, acceptance, None
    gradient = (q - p).mul_(loss.entropy)
    if loss.rejection or loss.surprisal:
        factor = loss.rejection + loss.surprisal / acceptance.clamp(min=1e-9)
        below = torch.where(q < p, q, 0.0)
        gradient += factor[:, None] * (q * below.sum(-1, keepdim=True) - below)
    return cross_entropy, acceptance, gradient.to(student.dtype)


def attention_backward(scores: Tensor, grad_weights: Tensor, logsumexp: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention weights P = exp(scores - logsumexp), and the gradient scale·P·(dP - Σ P·dP) of the unscaled
    scores, where dP is `grad_weights`. `scores` and `grad_weights` [..., R, K] may be overwritten; `logsumexp` [..., R]
    float32."""
    library = _library(scores, grad_weights)
    if library is None:
        weights, grad = (scores.float() - logsumexp[..., None]).exp(), grad_weights.float()
        inner = (weights * grad).sum(-1, keepdim=True)
        return weights.to(scores.dtype), (scale * weights * (grad - inner)).to(scores.dtype)
    sums, keys = logsumexp.contiguous(), scores.shape[-1]
    operands = scores.data_ptr(), grad_weights.data_ptr(), sums.data_ptr()
    library.attention_backward(*operands, sums.numel(), keys, scale, torch.get_num_threads())
    return scores, grad_weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension E: [..., E] -> [..., E]"""
    library = _library(x, weight) if x.shape[-1] % LANES == 0 else None
    if library is None:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    library.norm(x.data_ptr(), weight.data_ptr(), rows, width, eps, out.data_ptr(), torch.get_num_threads())
    return out


def rms_norm_backward(x: Tensor, weight: Tensor, grad_output: Tensor, eps: float) -> Tensor:
    """Return the gradient of `rms_norm` by x, [..., E] as `grad_output`."""
    library = _library(x, weight, grad_output) if x.shape[-1] % LANES == 0 else None
    if library is None:
        wide, grad = x.float(), weight.float() * grad_output.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scale * grad - wide * scale**3 * (grad * wide).mean(-1, keepdim=True)).to(x.dtype)
    grad_x, width = torch.empty_like(x), x.shape[-1]
    operands = x.data_ptr(), weight.data_ptr(), grad_output.data_ptr(), x.numel() // width, width, eps
    library.norm_backward(*operands, grad_x.data_ptr(), torch.get_num_threads())
    return grad_x


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up"""
    library = _library(gate, up) if gate.numel() % LANES == 0 else None
    if library is None:
        return F.silu(gate) * up
    out = torch.empty_like(gate)
    operands = gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr()
    library.swiglu(*operands, torch.get_num_threads())
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `swiglu` by gate and up, in the shape of both."""
    library = _library(gate, up, grad_output) if gate.numel() % LANES == 0 else None
    if library is None:
        sigmoid = torch.sigmoid(gate)
        return grad_output * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_output * gate * sigmoid
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    operands = gate.data_ptr(), up.data_ptr(), grad_output.data_ptr(), gate.numel()
    library.swiglu_backward(*operands, grad_gate.data_ptr(), grad_up.data_ptr(), torch.get_num_threads())
    return grad_gate, grad_up


def _library(*operands: Tensor) -> CpuLibrary | None:
    """Return the compiled library if it takes these operands, else None."""
    fit = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.is_contiguous() for x in operands)
    return cpu_library() if fit else None
