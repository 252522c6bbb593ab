"""Merging partial attention results by log-sum-exp on a GPU: one program per row and head."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned

_FLOOR: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _merge(
    first,
    first_lse,
    second,
    second_lse,
    out,
    lse,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_D)
    inside = lanes < D
    mine, theirs = tl.load(first_lse + at), tl.load(second_lse + at)
    peak = tl.maximum(tl.maximum(mine, theirs), _FLOOR)
    mine, theirs = tl.exp(mine - peak), tl.exp(theirs - peak)
    total = mine + theirs
    some = total > 0
    divisor = tl.where(total == 0, 1.0, total)
    one = tl.load(first + at * D + lanes, inside, other=0.0).to(tl.float32)
    other = tl.load(second + at * D + lanes, inside, other=0.0).to(tl.float32)
    # an output with weight 0 may hold garbage
    joined = tl.where(mine == 0, 0.0, one * mine) + tl.where(theirs == 0, 0.0, other * theirs)
    tl.store(out + at * D + lanes, (joined / divisor).to(out.dtype.element_ty), inside)
    tl.store(lse + at, tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As `merge.merge`: (out [R, H, D] of the dtype, lse [R, H]).

    lse [R, H] float32, natural logarithm of the sum of exponentials of the scores; -inf where a row saw no key.
    """
    num_rows, num_heads, head_dim = first.shape
    out = torch.empty(first.shape, dtype=dtype, device=first.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=first.device)
    if out.numel():
        _merge[(num_rows * num_heads,)](
            first.contiguous(),
            first_lse.contiguous(),
            second.contiguous(),
            second_lse.contiguous(),
            out,
            lse,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return out, lse


TUNED = tuple(
    Tuned(
        _merge,
        dict.fromkeys(("first", "first_lse", "second_lse", "lse"), "*fp32")
        | {"second": f"*{dtype}", "out": f"*{dtype}"},
        {"D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)},
        1,
    )
    for dtype in ("bf16", "fp16")
    for head_dim in (64, 96, 128, 256)
)
