"""Products on a GPU: the library's, or a row-invariant one of our own.

The library picks its kernel by the number of rows, so that a row's bits depend on its company; ours does not.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


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
        from space_kernels.linear_triton import row_invariant_product

        flat = x.reshape(-1, self.in_features)
        return row_invariant_product(flat, self.weight, self.bias).view(*x.shape[:-1], self.out_features)


def row_invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] -> [R, out]: the definition. Sums in float32, rounded to x's dtype once."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
