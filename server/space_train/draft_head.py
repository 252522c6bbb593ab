"""The draft head, as it is trained: each draft is told the token before it (SPACE §4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DraftHead(nn.Module):
    """h' = h + W2·silu(W1·[h ; s·e(previous)]): the hidden row of a mask, corrected by the token before its target."""

    def __init__(self, hidden_size: int, width: int = 384, embedding_scale: float = 8.0) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(width, 2 * hidden_size))
        self.w2 = nn.Parameter(torch.zeros(hidden_size, width))
        self.embedding_scale = embedding_scale

    def initialise(self, generator: torch.Generator) -> None:
        """Random W1, zero W2: at first the head changes nothing."""
        with torch.no_grad():
            self.w1.normal_(0.0, self.w1.shape[1] ** -0.5, generator=generator)
            self.w2.zero_()

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Corrected rows [..., E] of `hidden` [..., E] (after the final norm) and the embedding `previous` [..., E]."""
        inputs = torch.cat((hidden, self.embedding_scale * previous.to(hidden.dtype)), dim=-1)
        return hidden + F.linear(F.silu(F.linear(inputs, self.w1)), self.w2)
