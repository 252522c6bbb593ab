"""Products on a GPU: the library's, or a row-invariant one of our own, which weights of eight bits have always.

The library picks its kernel by the number of rows, so that a row's bits depend on its company; ours does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels import fp8 as float8
from space_kernels.fp8 import Fp8


class CudaLinear(nn.Module):
    """x·Wᵀ + b by cuBLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out]; neither is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ExactLinear(CudaLinear):
    """x·Wᵀ + b, a row's result the same bits whatever the other rows and their number. Needs triton."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        from space_kernels.linear.linear_triton import row_invariant_product

        flat = x.reshape(-1, self.in_features)
        return row_invariant_product(flat, self.weight, self.bias).view(*x.shape[:-1], self.out_features)


class Fp8Linear(nn.Module):
    """x·Wᵀ + b with weights of eight bits, row-invariant: on a GPU by triton, elsewhere by the definition.

    A module of transformers' own models too: its path and its sizes are those of the linear it stands for.
    """

    def __init__(self, kept: Fp8, bias: Tensor | None) -> None:
        """Nothing is copied."""
        super().__init__()
        self.out_features, self.in_features = kept.numbers.shape
        self.numbers: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("numbers", kept.numbers)
        self.register_buffer("scale", kept.scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def joined(cls, linears: Sequence[Fp8Linear]) -> Fp8Linear:
        """One below the other; all have a bias, or none."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        kept = Fp8.joined([Fp8(linear.numbers, linear.scale) for linear in linears])
        return cls(kept, torch.cat(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        product = float8.float8_product
        if x.is_cuda:
            from space_kernels.linear.linear_triton import float8_product as product
        out = product(x.reshape(-1, self.in_features), self.numbers, self.scale, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def row_invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] -> [R, out]: the definition. Sums in float32, rounded to x's dtype once."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
