"""What a gated adapter adds to linears, for the rows it acts on: scale · B·(A·x) (arXiv 2507.11851)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from space_kernels.linear.cpu_linear import cpu_linear, in_turn


class GatedDelta:
    """The deltas of one adapter on linears that read the same rows, side by side as their outputs are.

        A = [A_1; A_2; …]        B = [B_1       ]        a linear without a pair gets 0
                                     [    B_2 … ]

    The scale is in B: what is left per row is two products and one sum, rounded once each. On the CPU a row's delta
    has the same bits whatever the other rows.
    """

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor] | None], sizes: Sequence[int], scale: float, *, turns: bool = False
    ) -> None:
        """`pairs`: a [rank, in] and b [out, rank] per linear, at least one; `sizes`: out of each linear.

        `turns`: of two linears whose outputs take turns (`in_turn`).
        """
        present = [pair for pair in pairs if pair is not None]
        a = torch.cat([pair[0] for pair in present])  # [ranks, in]
        b = a.new_zeros(sum(sizes), len(a))  # [outs, ranks]
        row = column = 0
        for pair, size in zip(pairs, sizes, strict=True):
            if pair is not None:
                rank = len(pair[0])
                b[row : row + size, column : column + rank] = (pair[1].float() * scale).to(b.dtype)
                column += rank
            row += size
        self._a, self._b = _linear(a), _linear(in_turn(b[: sizes[0]], b[sizes[0] :]) if turns else b)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, outs]"""
        delta: Tensor = self._b(self._a(x))
        return delta

    def add_to(self, y: Tensor, x: Tensor, rows: slice) -> None:
        """y [R, outs], x [R, in]: the delta of `rows`, added to y in place. Other rows of y are not touched."""
        y[rows] += self(x[rows])


def _linear(weight: Tensor) -> nn.Module:
    if weight.device.type == "cpu":
        return cpu_linear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
