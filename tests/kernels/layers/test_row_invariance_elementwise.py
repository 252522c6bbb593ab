"""Row invariance of norms, activations and rotary angles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from space_kernels.layers.layers import RowInvariantActivation, gelu, gelu_tanh, has_no_tail, silu
from torch import Tensor
from torch.nn import functional as F

WIDTHS = [48, 64, 172, 352, 704, 1000]


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], x[0], 1e-5)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], x[0], x[1])


def expanded_rms_norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


FUNCTIONS = [rms_norm, layer_norm, expanded_rms_norm, torch.cos, torch.sin, torch.tanh, torch.exp]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_function_of_rows_gives_each_row_the_same_bits(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, num_threads: int
) -> None:
    for width in WIDTHS:
        x = torch.randn(256, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = function(x)
        for rows in range(4, 129, 4):
            assert torch.equal(function(x[:rows]), whole[:rows]), (width, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("library", "composed"),
    [(F.silu, silu), (F.gelu, gelu), (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh)],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_an_activation_gives_each_row_the_same_bits(
    library: Callable[[Tensor], Tensor], composed: Callable[[Tensor], Tensor], dtype: torch.dtype, num_threads: int
) -> None:
    activation = RowInvariantActivation(library, composed, num_threads)
    for width in WIDTHS:
        x = torch.randn(256, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = activation(x)
        torch.testing.assert_close(
            whole.float(), library(x.float()), atol=1e-5 if dtype is torch.float32 else 0.02, rtol=0
        )
        for rows in range(4, 129, 4):
            assert torch.equal(activation(x[:rows]), whole[:rows]), (width, rows)


def test_a_tail_is_any_share_that_is_not_whole_vectors() -> None:
    assert has_no_tail(704, num_threads=2)
    assert not has_no_tail(172, num_threads=1)
    assert not has_no_tail(704, num_threads=3)
