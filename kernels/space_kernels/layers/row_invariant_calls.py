"""Element-wise functions that round an element alike wherever it lies in its tensor, and in torch's stead.

torch's loops take whole vectors and then the tail singly. Most functions round both alike; `sigmoid`, `silu`, `gelu`,
`softplus`, `mish` and `log1p` do not (measured on torch 2.13), so a row's bits would depend on how many rows there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from space_kernels.layers.layers import gelu, gelu_tanh, silu


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), computed in float32."""
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), exact for small x too, computed in float32 (Kahan)."""
    wide = x.float()
    above = wide + 1.0
    return torch.where(above == 1.0, wide, above.log() * (wide / (above - 1.0))).to(x.dtype)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + exp(β·x)) / β, or x where β·x is above the threshold, computed in float32."""
    wide = x.float() * beta
    soft = log1p(wide.abs().neg_().exp_()).add_(wide.clamp(min=0.0)).div_(beta)
    return torch.where(wide > threshold, x.float(), soft).to(x.dtype)


def mish(x: Tensor) -> Tensor:
    """Return x·tanh(softplus(x)), computed in float32."""
    wide = x.float()
    return softplus(wide).tanh_().mul_(wide).to(x.dtype)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return silu(x)


def _mish(x: Tensor, inplace: bool = False) -> Tensor:
    return mish(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return gelu_tanh(x) if approximate == "tanh" else gelu(x)


COMPOSED: Mapping[Any, Callable[..., Tensor]] = {
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
    F.sigmoid: sigmoid,
    F.silu: _silu,
    F.gelu: _gelu,
    F.softplus: softplus,
    F.mish: _mish,
    torch.log1p: log1p,
    Tensor.log1p: log1p,
}
"""torch's functions that round a tail in another way, and what is computed instead."""

_NAMES = frozenset(function.__name__ for function in COMPOSED)

_ALIKE = frozenset({
    "__get__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__gt__",
    "__lt__", "abs", "add", "clamp", "clip", "clone", "div", "erf", "exp", "expm1", "float", "gt", "hardtanh",
    "leaky_relu", "lt", "max", "min", "mul", "neg", "prelu", "relu", "relu6", "sqrt", "square", "sub", "tanh", "to",
    "type", "where",
})  # fmt: skip
"""Names of torch's functions that round all elements of a tensor alike; a cube is a product, too."""


class RowInvariantCalls(TorchFunctionMode):
    """In the block, torch's functions of `COMPOSED` are replaced by those that round all elements alike."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return COMPOSED.get(function, function)(*args, **(kwargs or {}))


class GuardedActivation(nn.Module):
    """An activation with torch's functions replaced as in `RowInvariantCalls`."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]"""
        with RowInvariantCalls():
            return self.activation(x)


class _Seen(RowInvariantCalls):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.composed = False
        self.unknown: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        cubes = name in ("pow", "__pow__") and args[1:] in ((2,), (3,))
        if function in COMPOSED:
            self.composed = True
        elif not cubes and name not in _ALIKE:
            self.unknown.add(name)
        return super().__torch_function__(function, types, args, kwargs)


def guarded(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation of any number of torch's functions in a row-invariant form: itself, if it calls none of
    `COMPOSED`. Raises ValueError, naming them, for functions that are not known to round all elements alike."""
    own = next(activation.parameters(), None) if isinstance(activation, nn.Module) else None
    given = torch.linspace(-3.0, 3.0, 64, dtype=None if own is None else own.dtype)
    with torch.no_grad(), _Seen() as seen:
        activation(given)
    if seen.unknown:
        raise ValueError(f"{type(activation).__name__} calls {', '.join(sorted(seen.unknown))}")
    return GuardedActivation(activation) if seen.composed else activation


def calls_any(module: nn.Module) -> bool:
    """Whether the code of this module's class names a function of `COMPOSED`, itself or in functions of its file."""
    methods = [
        inspect.unwrap(method)
        for kind in type(module).__mro__
        if kind.__module__ == type(module).__module__
        for method in vars(kind).values()
        if inspect.isfunction(method)
    ]
    seen: set[object] = set()
    while methods:
        method = methods.pop()
        if method in seen:
            continue
        seen.add(method)
        names = method.__code__.co_names
        if not _NAMES.isdisjoint(names):
            return True
        for name in names:
            named = method.__globals__.get(name)
            if inspect.isfunction(named) and named.__module__ == method.__module__:
                methods.append(named)
    return False


def guard(module: nn.Module) -> None:
    """Run the module's `forward` with torch's functions replaced as in `RowInvariantCalls`."""
    forward = module.forward

    def with_own_calls(*inputs: Any, **named: Any) -> Any:
        with RowInvariantCalls():
            return forward(*inputs, **named)

    module.forward = with_own_calls
