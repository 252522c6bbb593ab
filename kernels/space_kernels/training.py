"""Elementwise parts of training on a CPU: compiled for bfloat16, else by torch, whose results define them.

Each reads its rows once from memory, where torch's operations would write every step of them.
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
    """A loss of a student's distribution q against a teacher's p, as factors of three terms."""

    entropy: float = 1.0  # -Σ p·log q
    rejection: float = 0.0  # 1 - Σ min(p, q): the chance that a sampled draft is rejected
    surprisal: float = 0.0  # -log Σ min(p, q)

    def of(self, crosses: Tensor, accepted: Tensor) -> Tensor:
        """Return the loss of each row from -Σ p·log q and Σ min(p, q), both [N]."""
        found = self.entropy * crosses
        if self.rejection:
            found = found + self.rejection * (1.0 - accepted)
        return found - self.surprisal * accepted.clamp(min=1e-9).log() if self.surprisal else found


def distill(
    teacher: Tensor, student: Tensor, loss: DraftLoss, scale: float = 1.0, *, moves: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compare q = softmax(scale·student) with p = softmax(scale·teacher), logits [N, V] each.

    Returns -Σ p·log q and Σ min(p, q), [N] float32 each, and with `moves` the gradient [N, V] of `loss` by
    scale·student, in the dtype of `student`, which may be overwritten.
    """
    library = _library(teacher, student) if student.shape[1] % LANES == 0 else None
    if library is None:
        return _distill(teacher, student, loss, scale, moves)
    crosses, accepted = torch.empty(2, len(student)).unbind()
    struct = DistillationStruct(
        teacher.data_ptr(), student.data_ptr(), *student.shape, scale, loss.entropy, loss.rejection, loss.surprisal,
        moves, crosses.data_ptr(), accepted.data_ptr(),
    )  # fmt: skip
    library.distill(byref(struct), torch.get_num_threads())
    return crosses, accepted, student if moves else None


def _distill(
    teacher: Tensor, student: Tensor, loss: DraftLoss, scale: float, moves: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    p, log_q = (scale * teacher.float()).softmax(-1), (scale * student.float()).log_softmax(-1)
    q = log_q.exp()
    crosses, accepted = -(p * log_q).sum(-1), torch.minimum(p, q).sum(-1)
    if not moves:
        return crosses, accepted, None
    gradient = (q - p).mul_(loss.entropy)
    factor = loss.rejection + loss.surprisal / accepted.clamp(min=1e-9)
    if loss.rejection or loss.surprisal:
        below = torch.where(q < p, q, 0.0)
        gradient += factor[:, None] * (q * below.sum(-1, keepdim=True) - below)
    return crosses, accepted, gradient.to(student.dtype)


def attention_back(scores: Tensor, moves: Tensor, log_sums: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention weights P = exp(scores - log_sums) and the gradient scale·P·(moves - Σ P·moves) of the unscaled
    scores, for `moves`, the gradient of P; all [..., R, K] but log_sums [..., R] float32. The operands may be
    overwritten."""
    library = _library(scores, moves)
    if library is None:
        weights = (scores.float() - log_sums[..., None]).exp()
        wide = moves.float()
        inner = (weights * wide).sum(-1, keepdim=True)
        return weights.to(scores.dtype), (scale * weights * (wide - inner)).to(scores.dtype)
    sums, keys = log_sums.contiguous(), scores.shape[-1]
    operands = scores.data_ptr(), moves.data_ptr(), sums.data_ptr()
    library.attention_back(*operands, sums.numel(), keys, scale, torch.get_num_threads())
    return scores, moves


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


def rms_norm_back(x: Tensor, weight: Tensor, move: Tensor, eps: float) -> Tensor:
    """Return the gradient by x of `rms_norm` for the gradient `move` of its result; all [..., E]."""
    library = _library(x, weight, move) if x.shape[-1] % LANES == 0 else None
    if library is None:
        wide, moved = x.float(), weight.float() * move.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scale * moved - wide * scale**3 * (moved * wide).mean(-1, keepdim=True)).to(x.dtype)
    out, width = torch.empty_like(x), x.shape[-1]
    operands = x.data_ptr(), weight.data_ptr(), move.data_ptr(), x.numel() // width, width, eps
    library.norm_back(*operands, out.data_ptr(), torch.get_num_threads())
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up"""
    library = _library(gate, up) if gate.numel() % LANES == 0 else None
    if library is None:
        return F.silu(gate) * up
    out = torch.empty_like(gate)
    operands = gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr()
    library.swiglu(*operands, torch.get_num_threads())
    return out


def swiglu_back(gate: Tensor, up: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for the gradient `move` of `swiglu`."""
    library = _library(gate, up, move) if gate.numel() % LANES == 0 else None
    if library is None:
        sigmoid = torch.sigmoid(gate)
        return move * up * sigmoid * (1 + gate * (1 - sigmoid)), move * gate * sigmoid
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    operands = gate.data_ptr(), up.data_ptr(), move.data_ptr(), gate.numel()
    library.swiglu_back(*operands, of_gate.data_ptr(), of_up.data_ptr(), torch.get_num_threads())
    return of_gate, of_up


def _library(*operands: Tensor) -> CpuLibrary | None:
    """Return the compiled operations if they take these operands, else None."""
    fit = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.is_contiguous() for x in operands)
    return cpu_library() if fit else None
