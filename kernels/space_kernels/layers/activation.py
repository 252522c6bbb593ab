"""Activations whose rows are bitwise independent of the other rows and of the number of threads, and SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_LANES = 64
"""torch's element-wise loop handles pairs of vectors (at most 64 elements), and the tail singly with other rounding."""


def has_no_tail(width: int, num_threads: int, row_tile: int = 4) -> bool:
    """Whether every thread's share of [rows, width] is whole vectors, for any multiple of `row_tile` rows.
    Threads share the flat elements evenly, and torch may use fewer threads than there are."""
    return all((row_tile * width) % (_LANES * threads) == 0 for threads in range(1, num_threads + 1))


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), composed of operations whose tail rounds like the rest."""
    wide = x.float()
    return wide.div(wide.neg().exp_().add_(1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return x·Φ(x), composed of operations whose tail rounds like the rest."""
    wide = x.float()
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of x·Φ(x), composed of operations whose tail rounds like the rest."""
    wide = x.float()
    inner = wide.mul(wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)


class RowInvariantActivation(nn.Module):
    """An activation by torch's own function where its loop has no tail, else composed."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], composed: Callable[[Tensor], Tensor], threads: int
    ) -> None:
        super().__init__()
        self._function, self._composed, self._threads = function, composed, threads
        self._whole: dict[int, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]; the number of rows is a multiple of 4."""
        width = x.shape[-1]
        whole = self._whole.get(width)
        if whole is None:
            whole = self._whole[width] = has_no_tail(width, self._threads)
        return self._function(x) if whole else self._composed(x)


def same_function(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> bool:
    """Whether two activations agree on a grid, up to rounding."""
    grid = torch.linspace(-6.0, 6.0, 256)
    return bool(torch.allclose(a(grid), b(grid), rtol=1e-5, atol=1e-6))


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up of [R, 2·I], gate first -> [R, I]. Computed in float32, rounded to the dtype once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
