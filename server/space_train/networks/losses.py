"""Losses of hidden rows, as sums over rows, so that parts of an update and processes add up exactly.

Letters: `N` rows of a loss, `S` students of the same rows, `E` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from space_kernels.training import DraftLoss, distill
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 4096  # `hard` and `soft` compute the logits of this many rows at a time

LOGITS_AT_ONCE = {"cpu": 25 << 20, "cuda": 1 << 26}
"""`distilled` computes this many logits at a time of the teacher, and as many of a student."""

CROSS_ENTROPY = DraftLoss()

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """Sums in nats."""

    next_token: Tensor
    masks: Tensor  # masks alone
    head: Tensor  # masks with the draft head
    recurrent: Tensor  # drafts of the recurrent head

    def __add__(self, other: Losses) -> Losses:
        return Losses(*(mine + theirs for mine, theirs in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The four sums, in order."""
        return self.next_token, self.masks, self.head, self.recurrent

    @classmethod
    def zero(cls, device: torch.device) -> Losses:
        return cls(*(torch.zeros((), device=device) for _ in range(4)))


def hard(logits: Logits, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log q(label) over rows: hidden [N, E], labels [N]."""

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits(rows), wanted, reduction="sum")

    return _in_chunks(part, hidden, labels)


def soft(logits: Logits, hidden: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum of -Σ p·log q over rows: hidden [N, E]; p from the teacher's hidden rows [N, E]."""

    def part(rows: Tensor, teachers: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teachers).softmax(-1)
        return -(p * F.log_softmax(logits(rows), dim=-1)).sum()

    return _in_chunks(part, hidden, teacher)


@torch.no_grad()
def best(logits: Logits, hidden: Tensor) -> Tensor:
    """[N] most likely id of each row."""
    return torch.cat([logits(rows).argmax(-1) for rows in torch.split(hidden, CHUNK)])


def reach_probability(chance: Tensor, depth: Tensor) -> Tensor:
    """[B, M] probability that all drafts before each mask are accepted: the product of those in its group.
    `chance` [B, M]: log-probability that each mask's own draft is accepted; groups are consecutive, from depth 1 on."""
    chance = chance.double()  # cumulative sums over a whole row lose precision in float32
    before = chance.cumsum(1) - chance
    first = torch.arange(depth.shape[1], device=depth.device) - (depth - 1)
    return (before - before.gather(1, first)).exp().float()


def _in_chunks(part: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of `part` over chunks of rows. With several chunks, the backward pass recomputes their logits."""
    if len(hidden) <= CHUNK:
        return part(hidden, *others)
    pieces = zip(*(torch.split(tensor, CHUNK) for tensor in (hidden, *others)), strict=True)
    total = hidden.new_zeros((), dtype=torch.float32)
    for piece in pieces:
        total = total + checkpoint(part, *piece, use_reentrant=False)
    return total


@dataclass(frozen=True)
class FrozenOutput:
    """An output head that is not trained: logits are cap(scale·W·h)."""

    weight: Tensor  # [V, E]
    bias: Tensor | None  # [V]
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """[N, E] -> [N, V], before `scale` where there is no cap; `buffer` [at least N, V] may be overwritten."""
        found = torch.mm(hidden, self.weight.T, out=buffer[: len(hidden)])
        if self.bias is not None:
            found += self.bias
        if self.softcap is None:
            return found
        return found.float().mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)

    @property
    def factor(self) -> float:
        """The factor that `logits` still lack: their softmax is that of factor·logits."""
        return self.scale if self.softcap is None else 1.0

    def backward(self, gradient: Tensor, capped: Tensor | None) -> Tensor:
        """Return the gradient by hidden rows [N, E] from `gradient`, that by factor·logits [N, V], which may be
        overwritten. `capped`: the logits, if there is a cap."""
        if self.softcap is not None and capped is not None:
            gradient = gradient * (1.0 - (capped / self.softcap).square())
        if self.scale != 1.0:
            gradient *= self.scale
        return gradient.to(self.weight.dtype) @ self.weight


def distilled(
    output: FrozenOutput, teacher: Tensor, students: Sequence[Tensor], loss: DraftLoss = CROSS_ENTROPY
) -> tuple[Tensor, Tensor]:
    """Return the loss of each student's rows, and their acceptance Σ min(p, q) without gradients, [S, N] each. Teacher
    and students are hidden rows [N, E] each.

    The forward pass computes the students' gradients too, so that no logits are saved or computed again.
    """
    dtype = output.weight.dtype
    rows = (student.to(dtype) for student in students)
    found: tuple[Tensor, Tensor] = _Distilled.apply(output, loss, teacher.detach().to(dtype), *rows)  # type: ignore[no-untyped-call]
    return found


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: FrozenOutput, loss: DraftLoss, teacher: Tensor, *students: Tensor) -> Any:
        kind, num_rows = teacher.device.type, len(teacher)
        step = max(1, LOGITS_AT_ONCE.get(kind, LOGITS_AT_ONCE["cuda"]) // len(output.weight))
        values, acceptance = torch.zeros(2, len(students), num_rows, device=teacher.device).unbind()
        grads = [torch.empty_like(student) for student in students]
        teacher_buffer, student_buffer = teacher.new_empty(2, min(step, num_rows), len(output.weight)).unbind()
        for begin in range(0, num_rows, step):
            rows = slice(begin, begin + step)
            with torch.autocast(kind, enabled=False):
                teacher_logits = output.logits(teacher[rows], teacher_buffer)
                for number, student in enumerate(students):
                    logits = output.logits(student[rows], student_buffer)
                    capped = None if output.softcap is None else logits.clone()
                    cross_entropy, overlap, gradient = distill(
                        teacher_logits, logits, loss, output.factor, needs_gradient=ctx.needs_input_grad[3 + number]
                    )
                    values[number, rows], acceptance[number, rows] = loss.of(cross_entropy, overlap), overlap
                    if gradient is not None:
                        grads[number][rows] = output.backward(gradient, capped)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(acceptance)
        return values, acceptance

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> Any:
        students = zip(ctx.saved_tensors, grad_values, ctx.needs_input_grad[3:], strict=True)
        grads = (grad * row[:, None].to(grad.dtype) if needed else None for grad, row, needed in students)
        return None, None, None, *grads
