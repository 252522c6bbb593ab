"""RMSNorms and SwiGLU MLPs of a frozen base on a CPU: one pass over memory each, gradients by the inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from space_kernels.training import rms_norm, rms_norm_backward, swiglu, swiglu_backward
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def replace_frozen_layers(model: PreTrainedModel) -> None:
    """Replace, in place, the forward of the base model's frozen RMSNorms and SwiGLU MLPs. A module is replaced only if
    it has the usual parts and its own forward computes the same on random rows."""
    for module in model.base_model.modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            continue
        if _is_rms_norm(module):
            module.forward = _norm_forward(module)
        elif _is_swiglu(module):
            module.forward = _mlp_forward(module)


def is_frozen_linear(module: nn.Module) -> bool:
    """Return whether the module is a plain linear that is neither trained nor sharded."""
    return type(module) is nn.Linear and not module.weight.requires_grad and not isinstance(module.weight, DTensor)


def matmul_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype that a matmul of `operand` computes in: autocast's, else the operand's own."""
    kind = operand.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else operand.dtype


def _norm_forward(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        rows, weight = hidden_states.contiguous(), module.weight.to(hidden_states.dtype)
        found: Tensor = _RmsNorm.apply(rows, weight, float(module.variance_epsilon))  # type: ignore[no-untyped-call]
        return found

    return forward


def _mlp_forward(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        gated = _Swiglu.apply(module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
        found: Tensor = module.down_proj(gated)
        return found

    return forward


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return rms_norm_backward(x, weight, grad_output.contiguous(), ctx.eps), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return swiglu_backward(gate, up, grad_output.contiguous())


def _is_rms_norm(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or weight.dim() != 1:
        return False
    rows = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    return _agree(module(rows), rms_norm(rows, weight.detach(), eps))


def _is_swiglu(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts) or not hasattr(module, "act_fn"):
        return False
    gate, up, down = parts
    width, weight = gate.in_features, gate.weight  # type: ignore[union-attr]
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(weight)
    return _agree(module(rows), down(swiglu(gate(rows), up(rows))))  # type: ignore[misc]


def _agree(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02 * float(other.abs().max()))
