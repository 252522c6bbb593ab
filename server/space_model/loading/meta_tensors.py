"""Builds models on the meta device without torch's reference operations.

Many operations have no other implementation on that device, and these import sympy: 1.6 seconds, once in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class MetaModel(TorchFunctionMode):
    """In the block, a model made on the meta device draws no initial values, and has its positions on the CPU.

    `torch.arange` gives the positions, `torch.tensor` the factors, and `torch.zeros` of float32 the rest, from which
    rotary angles and masks are computed: these buffers then have values, as transformers has `torch.linspace` give them
    there. Enter it before the block that sets the device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation, or do without it."""
        named = kwargs or {}
        if func is nn.init.normal_:
            target = args[0] if args else named.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        gives = func is torch.arange or (func is torch.tensor and bool(args) and isinstance(args[0], list) and args[0])
        if func is torch.zeros and named.get("dtype") is torch.float32:  # no weight: those have the model's dtype
            gives = len(args) == 1 and isinstance(args[0], int)
        if gives and _is_meta(named.get("device")):  # an empty list asks for the current device
            named = {**named, "device": "cpu"}
        return func(*args, **named)


def _is_meta(device: object) -> bool:
    return device is not None and torch.device(device).type == "meta"  # type: ignore[call-overload]
