"""The vector of a prompt: the hidden states behind the final norm, the last id's or their mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptPooling:
    """The rows that a sequence has computed so far. They are added up one after the other, in float64 on the CPU, so
    that the result does not depend on how the prompt was cut into steps."""

    is_mean: bool  # else the last row counts
    total: Tensor | None = None  # [hidden] float64: the sum of the rows; with `is_mean`
    num_rows: int = 0

    def with_rows(self, hidden: Tensor) -> PromptPooling:
        """Return the pooling with more rows [N, hidden], in the order of their positions."""
        if not self.is_mean:
            return replace(self, total=hidden[-1], num_rows=self.num_rows + len(hidden))
        rows = hidden.to("cpu", torch.float64)
        if self.total is not None:
            rows = torch.cat([self.total[None], rows])
        return replace(self, total=rows.cumsum(0)[-1], num_rows=self.num_rows + len(hidden))

    def vector(self) -> Tensor:
        """Return the vector [hidden] of all rows in float32 on the CPU; there is at least one."""
        assert self.total is not None
        found = self.total / self.num_rows if self.is_mean else self.total
        return found.to("cpu", torch.float32)
