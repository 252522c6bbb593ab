"""The output of a gated LoRA adapter for the rows it applies to: scale · B·(A·x) (arXiv 2507.11851)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from space_kernels.linear.cpu_linear import cpu_linear, in_turn


class GatedDelta:
    """The deltas of one adapter on linear layers with the same input, concatenated like their outputs.

        A = [A_1; A_2; …]        B = [B_1       ]        a layer without a pair gets 0
                                     [    B_2 … ]

    The scale is folded into B, which leaves two matmuls and one sum per row, each rounded once. On the CPU a row's
    delta does not depend on the other rows, bitwise.
    """

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor] | None], sizes: Sequence[int], scale: float, *, turns: bool = False
    ) -> None:
        """`pairs`: A [rank, in] and B [out, rank] per layer, at least one not None; `sizes`: outputs of each layer.

        `turns`: the outputs of the two layers are interleaved (`in_turn`).
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
        """Add the delta of `rows` to y in place. y [R, outs], x [R, in]."""
        y[rows] += self(x[rows])


def _linear(weight: Tensor) -> nn.Module:
    if weight.device.type == "cpu":
        return cpu_linear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
