"""The SwiGLU activation: the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up of [R, 2·I], gate first -> [R, I]. Computed in float32, rounded to the dtype once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
