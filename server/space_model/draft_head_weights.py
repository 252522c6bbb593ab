"""The weights of the draft head: k tiny sequential steps that let each draft know the one before it."""

from __future__ import annotations

from dataclasses import dataclass

from space_kernels.draft_head import DraftHeadForm
from torch import Tensor


@dataclass(frozen=True)
class DraftHeadWeights:
    """h'_j = h_j + W2·silu(W1·[h_j ; s·e(previous)]), or h_j + W2·(W1·(s·e(previous)))  (SPACE §4)."""

    w1: Tensor  # [head hidden, 2·hidden]; low-rank: [head hidden, hidden]
    w2: Tensor  # [hidden, head hidden]
    embedding_scale: float  # s
    form: DraftHeadForm = DraftHeadForm.MLP
