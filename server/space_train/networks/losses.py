"""The losses of one pass, as sums over rows, so that parts of an update and processes add up exactly.

Letters: `N` rows, `E` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
"""Rows whose logits are in memory at once."""

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """Sums in nats."""

    next_token: Tensor
    masks: Tensor  # masks alone
    head: Tensor  # masks with the draft head

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.next_token + other.next_token, self.masks + other.masks, self.head + other.head)

    @classmethod
    def zero(cls, device: torch.device) -> Losses:
        return cls(*(torch.zeros((), device=device) for _ in range(3)))


def hard(logits: Logits, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log q(label) over rows: hidden [N, E], labels [N]."""

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits(rows), wanted, reduction="sum")

    return _in_chunks(part, hidden, labels)


def soft(logits: Logits, hidden: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -w·Σ p·log q over rows: hidden [N, E]; p from the teacher's hidden rows [N, E]; weights [N]."""

    def part(rows: Tensor, teachers: Tensor, some: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teachers).softmax(-1)
        return -((p * F.log_softmax(logits(rows), dim=-1)).sum(-1) * some).sum()

    return _in_chunks(part, hidden, teacher, weights)


def weighted(logits: Logits, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -w·log q(label) over rows."""

    def part(rows: Tensor, wanted: Tensor, some: Tensor) -> Tensor:
        return (F.cross_entropy(logits(rows), wanted, reduction="none") * some).sum()

    return _in_chunks(part, hidden, labels, weights)


@torch.no_grad()
def chances(logits: Logits, hidden: Tensor, ids: Tensor) -> Tensor:
    """[N] log-probability of each row's id, from `hidden` [N, E]."""
    parts = zip(torch.split(hidden, CHUNK), torch.split(ids, CHUNK), strict=True)
    return torch.cat([logits(rows).log_softmax(-1).gather(1, some[:, None])[:, 0] for rows, some in parts])


@torch.no_grad()
def best(logits: Logits, hidden: Tensor) -> Tensor:
    """[N] most likely id of each row."""
    return torch.cat([logits(rows).argmax(-1) for rows in torch.split(hidden, CHUNK)])


def survival(chance: Tensor, depth: Tensor) -> Tensor:
    """[B, M] probability that all drafts before each mask are accepted: the product of the teacher's in its group.

    `chance` [B, M]: log-probability of each mask's own target; groups are consecutive, each from depth 1 on.
    """
    chance = chance.double()  # cumulative sums over a whole row lose precision in float32
    before = chance.cumsum(1) - chance
    first = torch.arange(depth.shape[1], device=depth.device) - (depth - 1)
    return (before - before.gather(1, first)).exp().float()


def _in_chunks(part: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of `part` over chunks of rows; with several chunks, the backward pass recomputes their logits."""
    if len(hidden) <= CHUNK:
        return part(hidden, *others)
    pieces = zip(*(torch.split(tensor, CHUNK) for tensor in (hidden, *others)), strict=True)
    total = hidden.new_zeros((), dtype=torch.float32)
    for piece in pieces:
        total = total + checkpoint(part, *piece, use_reentrant=False)
    return total
