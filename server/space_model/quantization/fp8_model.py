"""A transformers model with fp8 linears; the output head is not quantised."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from space_kernels.fp8 import Fp8
from space_kernels.linear.cuda_linear import Fp8Linear
from torch import Tensor, nn

from space_model.checkpoint.quantized_formats import QuantizedFormat
from space_model.mapped_files import let_go
from space_model.model_error import InvalidSetting


def check_plain(form: QuantizedFormat | None) -> None:
    """Raises InvalidSetting for a checkpoint that is already quantised."""
    if form is not None:
        raise InvalidSetting(f"The checkpoint's weights are {form.name} ones already; leave out --weights fp8.")


def quantize_to_fp8(base: nn.Module, device: torch.device, bring: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
    """Quantise the weights of each linear to fp8, one at a time, so that only one is in memory twice.

    `bring`: moves a weight to its device.

    A CPU has no fp8 matmul: its weights stay bfloat16 but are rounded to fp8 values, so outputs and quality match a
    GPU's, but nothing is smaller or faster.
    """
    if device.type == "cuda" and find_spec("triton") is None:
        raise InvalidSetting("fp8 weights need triton, which is not installed: `pip install triton`.")
    held = 0
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                raise InvalidSetting(
                    f"fp8 weights are those of linears, and {type(child).__name__}, a mixture of experts, has none; "
                    "leave out --weights fp8."
                )
            if not isinstance(child, nn.Linear):
                continue
            weight = bring(child.weight.detach())
            kept = Fp8.of(weight)
            let_go(child.weight)
            if device.type == "cpu":
                child.weight = nn.Parameter(kept.dense().to(weight.dtype), requires_grad=False)
            else:
                bias = None if child.bias is None else bring(child.bias.detach())
                setattr(parent, name, Fp8Linear(kept, bias))
            held += 1
    if not held:
        raise InvalidSetting(
            f"fp8 weights are those of linears, and {type(base).__name__} has none; leave out --weights fp8."
        )
