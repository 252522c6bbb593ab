"""Row-invariant mixture of experts: router and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from space_kernels.linear.cpu_linear import cpu_linear


class RowInvariantExperts(nn.Module):
    """y = Σ over the row's experts, ascending, of weight · down(act(gate(x)) · up(x)).

    The rows of each expert are gathered and padded to whole tiles, so that their number changes no row's sum.
    """

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], *, weights: str = "plain"
    ) -> None:
        """gate_up [experts, 2·width, hidden], down [experts, hidden, width]; `weights`: int8 or int4."""
        super().__init__()
        self.gate_up = nn.ModuleList(cpu_linear(weight, None, weights=weights) for weight in gate_up)
        self.down = nn.ModuleList(cpu_linear(weight, None, weights=weights) for weight in down)
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


class RowInvariantRouter(nn.Module):
    """Wraps a transformers router that multiplies by its `weight` [experts, hidden] with `F.linear`.

    Only that matmul depends on the number of rows, so it is replaced by a row-invariant one in the dtype that the
    router uses. Softmax, top-k and sums run over one row's experts.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self._linear_of: dict[torch.dtype, nn.Module] = {}  # by dtype of the matmul

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the router's output."""
        with _OwnLinear(self._matmul, self.router.get_parameter("weight").shape):
            return self.router(*arguments, **named)

    def _matmul(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if rows.dtype not in self._linear_of:
            weight = self.router.get_parameter("weight").detach().to(rows.dtype)
            self._linear_of[rows.dtype] = cpu_linear(weight, bias)
        out: Tensor = self._linear_of[rows.dtype](rows)
        return out


class _OwnLinear(TorchFunctionMode):
    """Redirects `F.linear` calls with a weight of this shape to another function."""

    def __init__(self, matmul: Callable[[Tensor, Tensor | None], Tensor], shape: torch.Size) -> None:
        super().__init__()
        self._matmul, self._shape = matmul, shape

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and args[1].shape == self._shape:
            return self._matmul(args[0], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))
        return function(*args, **(kwargs or {}))
