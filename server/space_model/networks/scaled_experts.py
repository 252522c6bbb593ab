"""Llama 4's mixture of experts: a row is scaled by its experts' scores before they compute, not after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ScaledRowExperts(nn.Module):
    """y = shared(x) + Σ over the row's experts, ascending, of expert(score·x), with score = sigmoid(router·x).

    transformers lets every expert compute every row, most of them scaled by 0. Here an expert computes its own rows,
    each as a row of one expert with weight 1, so a row's bits do not depend on the others.
    """

    def __init__(self, block: Any) -> None:
        """`block`: transformers' module, with its linears, router and experts replaced by row-invariant ones."""
        super().__init__()
        self.router, self.experts, self.shared_expert = block.router, block.experts, block.shared_expert
        self._num_chosen = int(block.top_k)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[1, R, hidden] -> [R, hidden], and the router's logits [R, experts]"""
        rows = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = self.router(rows)
        chosen = logits.topk(self._num_chosen, dim=1).indices.sort(dim=1).values  # [R, k]
        scaled = (rows[:, None] * scores.gather(1, chosen)[..., None]).flatten(0, 1)  # [R·k, hidden]
        ones = torch.ones(len(scaled), 1, dtype=rows.dtype, device=rows.device)
        made = self.experts(scaled, chosen.view(-1, 1), ones).view(len(rows), self._num_chosen, -1)
        out = self.shared_expert(rows)
        routed = made[:, 0]
        for place in range(1, self._num_chosen):
            routed = routed + made[:, place]
        return out + routed, logits
