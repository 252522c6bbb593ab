"""Packed linear layers: correct results, and row invariance."""

from __future__ import annotations

import pytest
import torch
from space_kernels.linear import packed_linear as linear
from space_kernels.linear.packed_linear import PackedLinear, can_pack
from torch.nn import functional as F

SHAPES = [(256, 256), (704, 256), (256, 704), (172, 64), (101, 96), (2048, 128), (1536, 576), (640, 2560)]
DTYPES = [torch.float32, torch.bfloat16]
HAS_WIDE_REGISTERS = "AVX512" in torch.backends.cpu.get_cpu_capability()
PACKED = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason=f"this processor packs no {dtype}"))
    for dtype in DTYPES
]


def draw(out: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator) * width**-0.5
    bias, x = torch.randn(out, generator=generator), torch.randn(128, width, generator=generator)
    return weight.to(dtype), bias.to(dtype), x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_torch_packs(dtype: torch.dtype) -> None:
    """oneDNN multiplies bfloat16 where registers have 512 bits, and not on older processors."""
    assert can_pack(dtype) or (dtype is torch.bfloat16 and not HAS_WIDE_REGISTERS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_packed_linear_equals_the_plain_one(out: int, width: int, dtype: torch.dtype) -> None:
    weight, bias, x = draw(out, width, dtype)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    for rows in (1, 3, 4, 128):
        found = PackedLinear(weight, bias)(x[:rows]).float()
        torch.testing.assert_close(found, wanted[:rows], atol=1e-5 if dtype is torch.float32 else 0.03, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    out: int, width: int, dtype: torch.dtype, num_threads: int
) -> None:
    weight, bias, x = draw(out, width, dtype)
    packed = PackedLinear(weight, bias)
    whole = packed(x)
    for rows in range(1, 65):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_fused_row_has_the_same_bits_whatever_the_number_of_rows(
    out: int, width: int, dtype: torch.dtype, num_threads: int
) -> None:
    weight, bias, x = draw(out, width, dtype)
    other = torch.randn(128, out, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = PackedLinear(weight, bias)
    whole = packed.silu(x), packed.times(x, other), packed.plus(x, other)
    for rows in range(4, 65, 4):
        assert torch.equal(packed.silu(x[:rows]), whole[0][:rows])
        assert torch.equal(packed.times(x[:rows], other[:rows]), whole[1][:rows])
        assert torch.equal(packed.plus(x[:rows], other[:rows]), whole[2][:rows])


def test_without_the_private_operators_the_plain_product_is_as_invariant(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    for out, width in SHAPES:
        weight, bias, x = draw(out, width, torch.float32)
        plain = PackedLinear(weight, bias)
        assert not plain.packed
        whole = plain(x)
        for rows in range(1, 65):
            assert torch.equal(plain(x[:rows]), whole[:rows]), (out, width, rows)
