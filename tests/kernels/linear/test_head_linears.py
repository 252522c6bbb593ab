"""The linears of all heads in one call are those of each head."""

from __future__ import annotations

import pytest
import torch
from space_kernels.linear.cpu_linear import cpu_linear
from space_kernels.linear.head_linears import HeadLinears


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(1, 32, 48), (5, 24, 40), (20, 128, 512)])
@torch.inference_mode()
def test_each_head_has_its_own_linear_whatever_the_strides(
    dtype: torch.dtype, heads: int, inputs: int, outputs: int, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(heads, outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    linears = HeadLinears([*weight])
    for rows in (1, 4, 19):
        x = torch.randn(rows, heads, inputs + 8, generator=generator).to(dtype)[..., :inputs].transpose(0, 1)
        wide = torch.full((rows, heads, outputs + 16), 7.0, dtype=dtype)
        found = linears(x, wide[..., :outputs].transpose(0, 1))
        torch.testing.assert_close(found.double(), x.double() @ weight.double().mT, atol=2e-2, rtol=2**-7)
        assert bool((wide[..., outputs:] == 7.0).all())
        for head in range(heads):
            assert torch.equal(found[head], cpu_linear(weight[head], None)(x[head].contiguous()))
        assert torch.equal(linears(x[:, -1:].contiguous())[:, 0], found[:, -1])


def test_rows_of_another_dtype_are_refused() -> None:
    linears = HeadLinears([*torch.randn(2, 16, 16).bfloat16()])
    with pytest.raises(TypeError, match=r"bfloat16|dtype"):
        linears(torch.randn(2, 3, 16))
