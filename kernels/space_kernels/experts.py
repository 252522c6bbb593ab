"""Mixture-of-experts feed-forward whose rows do not depend on which other rows chose the same expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from space_kernels.cpu_linear import cpu_linear


class RowInvariantExperts(nn.Module):
    """y = Σ over the row's experts, ascending, of weight · down(act(gate(x)) · up(x)).

    The rows of one expert are gathered and padded to a tile, so that their number changes no row's sum.
    """

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], *, eight_bits: bool = False
    ) -> None:
        """gate_up [experts, 2·width, hidden], down [experts, hidden, width]; `eight_bits`: how they are kept."""
        super().__init__()
        self.gate_up = nn.ModuleList(cpu_linear(weight, None, eight_bits=eight_bits) for weight in gate_up)
        self.down = nn.ModuleList(cpu_linear(weight, None, eight_bits=eight_bits) for weight in down)
        self.activation = activation

    def forward(self, hidden: Tensor, expert_of: Tensor, weight_of: Tensor) -> Tensor:
        """hidden [R, hidden], expert_of and weight_of [R, experts per row] -> [R, hidden]"""
        out = torch.zeros_like(hidden)
        chosen = expert_of.tolist()
        rows_of: dict[int, list[tuple[int, int]]] = {}
        for row, experts in enumerate(chosen):
            for place, expert in enumerate(experts):
                rows_of.setdefault(expert, []).append((row, place))
        for expert in sorted(rows_of):
            rows, places = torch.tensor(rows_of[expert], device=hidden.device).unbind(1)
            padded = torch.cat([rows, rows.new_zeros(-len(rows) % 4)])
            gate, up = self.gate_up[expert](hidden[padded]).chunk(2, dim=-1)
            result = self.down[expert](self.activation(gate.contiguous()) * up)[: len(rows)]
            out.index_add_(0, rows, (result * weight_of[rows, places, None]).to(out.dtype))
        return out
