"""The norms and gated MLPs of a frozen base, with gradients of their rows alone: as transformers computes them, in one
pass over memory each on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from space_kernels.training import rms_norm, rms_norm_back, swiglu, swiglu_back
from torch import Tensor, nn
from transformers import PreTrainedModel


def speed_up(model: PreTrainedModel) -> None:
    """Replace, in place, the forward of frozen RMSNorms and SwiGLU MLPs in the decoder layers. A module is replaced if
    it has the usual parts and computes the same on random rows."""
    for module in model.base_model.modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            continue
        if _is_rms_norm(module):
            module.forward = _Norm(module)
        elif _is_swiglu(module):
            module.forward = _Mlp(module)


class _Norm:
    """The forward of an RMSNorm."""

    def __init__(self, module: Any) -> None:
        self.module, self.eps = module, float(module.variance_epsilon)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight.to(hidden_states.dtype)
        found: Tensor = _NormFunction.apply(hidden_states.contiguous(), weight, self.eps)  # type: ignore[no-untyped-call]
        return found


class _Mlp:
    """The forward of a SwiGLU MLP."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.module.gate_proj(x), self.module.up_proj(x)
        found: Tensor = self.module.down_proj(_Swiglu.apply(gate, up))  # type: ignore[no-untyped-call]
        return found


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, move: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return rms_norm_back(x, weight, move.contiguous(), ctx.eps), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, move: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return swiglu_back(gate, up, move.contiguous())


def _is_rms_norm(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.dim() != 1:
        return False
    rows = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    return _agree(module(rows), rms_norm(rows, weight.detach(), eps))


def _is_swiglu(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    if not all(isinstance(part, nn.Linear) for part in parts) or not callable(activation) or len(parts) != 3:
        return False
    gate, up, down = parts
    width, weight = gate.in_features, gate.weight  # type: ignore[union-attr]
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(weight)
    return _agree(module(rows), down(swiglu(gate(rows), up(rows))))  # type: ignore[misc]


def _agree(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02 * float(other.abs().max()))
