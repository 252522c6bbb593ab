"""Linear layers on a GPU: by cuBLAS, or by our row-invariant kernel, which fp8 weights always use.

cuBLAS picks its kernel by the number of rows, so a row's bits depend on the rest of the batch; our kernel's do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels import fp8
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
    """x·Wᵀ + b whose rows are bitwise independent of the other rows and their number. Requires triton."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        from space_kernels.linear.linear_triton import row_invariant_matmul

        flat = x.reshape(-1, self.in_features)
        return row_invariant_matmul(flat, self.weight, self.bias).view(*x.shape[:-1], self.out_features)


class Fp8Linear(nn.Module):
    """Row-invariant x·Wᵀ + b with fp8 weights: by Triton on a GPU, by the reference elsewhere.

    Also used inside transformers' models, where it has the path and sizes of the linear layer that it replaces.
    """

    def __init__(self, kept: Fp8, bias: Tensor | None) -> None:
        """kept: weight [out, in]; bias [out]. Neither is copied."""
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
        """Concatenate layers along their outputs; either all have a bias or none."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        kept = Fp8.joined([Fp8(linear.numbers, linear.scale) for linear in linears])
        return cls(kept, torch.cat(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        matmul = fp8.fp8_matmul
        if x.is_cuda:
            from space_kernels.linear.linear_triton import fp8_matmul as matmul
        out = matmul(x.reshape(-1, self.in_features), self.numbers, self.scale, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def row_invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] -> [R, out]: the reference. Sums in float32, rounded to x's dtype once."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
