"""Row-invariant mixture of experts: router and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels.layers.row_invariant_calls import RowInvariantCalls
from space_kernels.linear.cpu_linear import cpu_linear
from space_kernels.linear.group_weights import Parts
from space_kernels.linear.packed_linear import pad_rows


class RowInvariantExperts(nn.Module):
    """y = Σ over the row's experts, ascending, of weight · (down(gate(gate_up·x + bias)) + bias), summed in float32.

        rows, with each row's experts ascending      sorted by expert, each expert's rows together
        r0: e1 e4     r1: e0 e1     r2: e4 e7   ->   e0: r1 | e1: r0 r1 | e4: r0 r2 | e7: r2

    Each expert multiplies its rows, and a row's bits depend neither on the others nor on the order of its experts.
    """

    def __init__(
        self,
        gate_up: Tensor | Iterable[Parts],
        down: Tensor | Iterable[Parts],
        gate: Callable[[Tensor], Tensor],
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        weights: str = "plain",
    ) -> None:
        """gate_up [experts, 2·width, hidden], gate first; down [experts, hidden, width]; or the weights of each
        expert in groups, as a file has them; biases [experts, 2·width] and [experts, hidden]; `gate`: [R, 2·width] ->
        [R, width], R a multiple of 4; `weights`: int8 or int4."""
        super().__init__()

        def linears(each: Tensor | Iterable[Parts], biases: Tensor | None) -> nn.ModuleList:
            some = repeat(None) if biases is None else biases
            return nn.ModuleList(
                cpu_linear(weight, bias, weights=weights) for weight, bias in zip(each, some, strict=biases is not None)
            )

        self.gate_up, self.down = linears(gate_up, gate_up_bias), linears(down, down_bias)
        self.gate = gate

    def forward(self, hidden: Tensor, expert_of: Tensor, weight_of: Tensor) -> Tensor:
        """hidden [R, hidden], expert_of and weight_of [R, experts per row] -> [R, hidden]"""
        num_rows, per_row = expert_of.shape
        ascending, places = expert_of.sort(dim=1, stable=True)
        weight = weight_of.gather(1, places).float()
        flat = ascending.reshape(-1)  # [S], S = R · experts per row
        order = flat.argsort(stable=True)
        runs = self._runs(flat)
        fused = self._each(self.gate_up, hidden[order // per_row], runs)  # [S, 2·width]
        inner = self.gate(pad_rows(fused))[: len(flat)]  # [S, width]
        made = self._each(self.down, inner, runs).float() * weight.reshape(-1)[order, None]  # [S, hidden]
        by_row = torch.empty_like(made).index_copy_(0, order, made).view(num_rows, per_row, -1)
        out = by_row[:, 0].clone()
        for place in range(1, per_row):
            out += by_row[:, place]
        return out.to(hidden.dtype)

    def _runs(self, experts: Tensor) -> list[tuple[int, slice]]:
        """[S] -> the experts that have rows, ascending, and each one's rows in the sorted order."""
        counts = torch.bincount(experts, minlength=len(self.down)).tolist()
        bounds = pairwise(accumulate(counts, initial=0))
        return [(expert, slice(*bound)) for expert, bound in enumerate(bounds) if bound[0] < bound[1]]

    @staticmethod
    def _each(linears: nn.ModuleList, rows: Tensor, runs: Sequence[tuple[int, slice]]) -> Tensor:
        return torch.cat([linears[expert](rows[run]) for expert, run in runs])


class RowInvariantRouter(nn.Module):
    """Wraps a transformers router that multiplies by its `weight` [experts, hidden] with `F.linear`.

    That matmul depends on the number of rows, so it is replaced by a row-invariant one in the dtype that the router
    uses, and sigmoids by ones that round all elements alike. Softmax, top-k and sums run over one row's experts.
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


class _OwnLinear(RowInvariantCalls):
    """Redirects `F.linear` calls with a weight of this shape to another function, too."""

    def __init__(self, matmul: Callable[[Tensor, Tensor | None], Tensor], shape: torch.Size) -> None:
        super().__init__()
        self._matmul, self._shape = matmul, shape

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and args[1].shape == self._shape:
            return self._matmul(args[0], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))
        return super().__torch_function__(function, types, args, kwargs)
