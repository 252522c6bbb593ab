"""MXFP4 linears: E2M1 numbers and an exponent for each 32 inputs, multiplied as the file has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from integer_products import fused, rounded_groups
from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.group_weights import GroupForm, GroupLinear, GroupWeights
from space_kernels.linear.packed_mxfp4 import PackedMxfp4
from space_kernels.linear.rounded_inputs import rounded
from space_kernels.linear.stored_parts import InTurn
from torch import Tensor
from torch.nn import functional as F

FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def draw(out: int, width: int, seed: int = 0) -> tuple[PackedMxfp4, Tensor, Tensor]:
    """A weight, its numbers by the definition [out, width], and rows."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(115, 124, (out, width // 32), dtype=torch.uint8, generator=generator)
    codes = torch.stack([packed % 16, packed // 16], dim=2).flatten(1).long()
    values = torch.where(codes >= 8, -FLOATS[codes % 8], FLOATS[codes % 8])
    dense = values * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    x = torch.randn(70, width, generator=generator).bfloat16()
    return PackedMxfp4("a weight", packed, exponents), dense.float(), x


def test_every_exponent_and_number_is_dequantised_as_it_is_defined() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)[torch.arange(255) % 16]
    codes = torch.stack([packed % 16, packed // 16], dim=2).flatten(1).long()
    values = torch.where(codes >= 8, -FLOATS[codes % 8], FLOATS[codes % 8])
    found = PackedMxfp4("a weight", packed, exponents).rows(slice(None)).dense()
    assert torch.equal(found, torch.ldexp(values, exponents.int() - 127))


@pytest.mark.parametrize(("out", "width"), [(256, 704), (172, 64), (48, 32)])
def test_it_is_the_definition_bit_by_bit_on_every_processor(library: CpuLibrary, out: int, width: int) -> None:
    stored, dense, x = draw(out, width)
    codes, scale = rounded_groups(x.float().numpy())
    groups = width // 32
    unit = 2.0 ** (stored.exponents.double() - 128)
    numbers = (dense.double() / unit.repeat_interleave(32, 1)).numpy().astype(np.int64).reshape(out, groups, 32)
    products = np.einsum("rgk,ngk->rng", codes, numbers)
    sums = np.zeros(products.shape[:2], dtype=np.float32)
    for g in range(groups):
        both = unit.float().numpy()[None, :, g] * scale[:, g, None]
        sums = fused(products[:, :, g].astype(np.float32), both, sums)
    linear = CompiledLinear(library, [stored], None, wide=True)
    assert torch.equal(linear(x), torch.from_numpy(sums))
    for rows in (1, 2, 5, 17, 40):
        assert torch.equal(linear(x[:rows]), torch.from_numpy(sums[:rows]))
    assert linear.weight.nbytes == -(-out // 16) * 16 * width * 4.5 / 8


def test_by_torch_it_is_near_the_product() -> None:
    stored, dense, x = draw(48, 96)
    torch.testing.assert_close(
        GroupLinear([stored], None, wide=True)(x), F.linear(rounded(x.float()), dense), atol=1e-5, rtol=1e-5
    )


def test_gate_and_up_alternate(library: CpuLibrary) -> None:
    (gate, _, x), (up, _, _) = draw(32, 64), draw(32, 64, seed=1)
    pairs = CompiledLinear(library, [InTurn(gate, up)], None, wide=True)(x).view(70, 2, 2, 16)
    for number, one in enumerate((gate, up)):
        assert torch.equal(pairs[:, :, number].flatten(1), CompiledLinear(library, [one], None, wide=True)(x))


def test_outputs_of_zeros_follow() -> None:
    stored, dense, _ = draw(20, 32)
    padded = stored.padded(12)
    assert torch.equal(padded.rows(slice(0, 32)).dense(), F.pad(dense, (0, 0, 0, 12)))
    assert torch.equal(padded.rows(torch.tensor([3, 1])).dense(), dense[[3, 1]])


def test_tensors_that_do_not_fit_each_other_are_refused() -> None:
    packed, exponents = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"has \(4, 3\) scales for \(4, 32\) bytes of numbers"):
        PackedMxfp4("a weight", packed, exponents)


def test_numbers_are_not_quantised_to_it() -> None:
    with pytest.raises(ValueError, match="only taken from a file"):
        GroupWeights.of(torch.zeros(2, 256), GroupForm.MXFP4)
