"""From hidden rows to logits: the head's weights and the family's own scale and cap."""

from __future__ import annotations

import torch
from space_kernels.linear import PackedLinear, pad_rows
from torch import Tensor, nn
from torch.nn import functional as F

_VOCABULARY_TILE = 64
"""The packed head has rows of zeros up to a multiple of this, so that element-wise work on logits has no tail."""


class OutputHead:
    """logits = cap(scale · hidden·Eᵀ + bias), float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        """weight [V, hidden]: kept as it is for gathered rows; a packed copy makes the whole product on the CPU."""
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.vocab_size = len(weight)
        self._scale, self._softcap = scale, softcap
        self._packed: nn.Module | None = None
        if weight.device.type == "cpu":
            missing = -len(weight) % _VOCABULARY_TILE
            padded_bias = None if self.bias is None else F.pad(self.bias, (0, missing))
            self._packed = PackedLinear(F.pad(self.weight, (0, 0, 0, missing)), padded_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32; a row's logits do not depend on the other rows."""
        padded = pad_rows(hidden)
        logits = F.linear(padded, self.weight, self.bias) if self._packed is None else self._packed(padded)
        return self._finish(logits.float())[: len(hidden), : self.vocab_size]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32: the logits of those ids only."""
        rows = F.embedding(ids, self.weight)  # [N, M, hidden]
        logits = torch.bmm(rows.float(), hidden.float().unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            logits = logits + self.bias[ids]
        return self._finish(logits)

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)
