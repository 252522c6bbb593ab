"""The draft head in training: each draft is conditioned on the token before it (SPACE §4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from space_train.train_plan import HeadForm


class DraftHead(nn.Module):
    """The hidden row of a mask, corrected by the token before its target.

    mlp:       h' = h + W2·silu(W1·[h ; s·e(previous)])
    low-rank:  h' = h + W2·W1·(s·e(previous))
    """

    def __init__(
        self, hidden_size: int, width: int = 384, embedding_scale: float = 8.0, form: HeadForm = HeadForm.MLP
    ) -> None:
        super().__init__()
        inputs = 2 * hidden_size if form is HeadForm.MLP else hidden_size
        self.w1 = nn.Parameter(torch.zeros(width, inputs))
        self.w2 = nn.Parameter(torch.zeros(hidden_size, width))
        self.embedding_scale, self.form = embedding_scale, form

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise W1 randomly and W2 to zero, so that the head starts as the identity."""
        with torch.no_grad():
            self.w1.copy_(torch.randn(self.w1.shape, generator=generator) * self.w1.shape[1] ** -0.5)
            self.w2.zero_()

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Correct `hidden` [..., E] (after the final norm) by the embedding `previous` [..., E]; returns [..., E]."""
        told = self.embedding_scale * previous.to(hidden.dtype)
        w1, w2 = self.w1.to(hidden.dtype), self.w2.to(hidden.dtype)
        if self.form is HeadForm.LOW_RANK:
            return hidden + F.linear(F.linear(told, w1), w2)
        return hidden + F.linear(F.silu(F.linear(torch.cat((hidden, told), dim=-1), w1)), w2)
