"""torch's functions that round the tail of a tensor in another way are replaced by ones that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from space_kernels.layers.row_invariant_calls import (
    COMPOSED,
    GuardedActivation,
    RowInvariantCalls,
    calls_any,
    guard,
    guarded,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(dtype: torch.dtype) -> Tensor:
    spread = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)) * 4
    return torch.cat([spread, torch.logspace(-12, 1, 300), -torch.logspace(-12, 1, 300)]).to(dtype)


def of_own(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return (lambda x: function(x.abs())) if "log1p" in function.__name__ else function


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", COMPOSED, ids=lambda f: getattr(f, "__qualname__", str(f)))
def test_each_replacement_equals_torch_up_to_rounding(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = numbers(dtype)
    with RowInvariantCalls():
        found = of_own(function)(x)
    assert found.dtype is dtype
    wanted = of_own(function)(x.double())
    near = 4 * torch.finfo(dtype).eps * wanted.abs() + 4 * torch.finfo(dtype).smallest_normal
    absolute = 2e-6 * (function is F.gelu)  # 1 + erf cancels below zero, in torch's float32 too
    assert bool(((found.double() - wanted).abs() <= near + absolute).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_a_served_activation_gives_an_element_its_bits_wherever_it_lies(name: str, dtype: torch.dtype) -> None:
    activation = ACT2FN[name].to(dtype)
    if name == "hardswish":
        with pytest.raises(ValueError, match="Hardswish calls hardswish"):
            guarded(activation)
        return
    served = guarded(activation)
    x = numbers(dtype)
    with torch.inference_mode():
        whole = served(x)
        for first, last in ((0, 1), (0, 7), (1, 64), (3, 67), (5, 200), (17, 4000)):
            assert torch.equal(served(x[first:last].clone()), whole[first:last]), (first, last)
        torch.testing.assert_close(whole, activation(x), atol=2e-6, rtol=4 * torch.finfo(dtype).eps, equal_nan=True)


def test_an_activation_without_replaced_functions_stays_as_it_is() -> None:
    squared = ACT2FN["relu2"]
    assert guarded(squared) is squared
    assert isinstance(guarded(ACT2FN["quick_gelu"]), GuardedActivation)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * _score(x)


def _score(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(x)


def test_code_that_calls_a_replaced_function_is_found_and_guarded() -> None:
    gate = Gate()
    assert calls_any(gate)
    assert not calls_any(Plain())
    x = torch.randn(67, generator=torch.Generator().manual_seed(0)) * 3
    before = [torch.equal(gate(x[:count].clone()), gate(x)[:count]) for count in range(1, 67)]
    guard(gate)
    after = [torch.equal(gate(x[:count].clone()), gate(x)[:count]) for count in range(1, 67)]
    assert all(after)
    assert not all(before), "torch's own sigmoid gives a tail the same bits here, so this test shows nothing"
