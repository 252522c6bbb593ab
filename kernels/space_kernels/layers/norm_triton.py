"""RMS norm on a GPU: one program reads a row once and keeps it in registers."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned

_WIDEST = 32768
"""Most elements that a program of 16 warps keeps in registers: 64 float32 per thread."""


@triton.jit
def _rms_norm(x, weight, out, x_stride, out_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    wide = tl.load(x + row * x_stride + lanes, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    gain = tl.load(weight + lanes, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + lanes, (wide * scale * gain).to(out.dtype.element_ty), inside)


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    wide = tl.load(x + row * x_stride + lanes, inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row * residual_stride + lanes, inside, other=0.0).to(tl.float32)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + row * total_stride + lanes, rounded, inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    gain = tl.load(weight + lanes, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + lanes, (wide * scale * gain).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm.rms_norm`: x [..., D], weight [D] -> [..., D]. Rows may have any stride (a slice of a wider tensor).

    Raises ValueError for rows too wide for a program's registers.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block, warps = _shape(x.shape[-1])
    if len(rows):
        _rms_norm[(len(rows),)](
            rows, weight, out, rows.stride(0), out.stride(0), eps, D=x.shape[-1], BLOCK=block, num_warps=warps
        )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `norm.add_rms_norm`: x, residual [R, D] -> (normed, sum), [R, D] each."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    block, warps = _shape(x.shape[-1])
    if len(x):
        _add_rms_norm[(len(x),)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            total.stride(0),
            eps,
            D=x.shape[-1],
            BLOCK=block,
            num_warps=warps,
        )
    return out, total


def _shape(width: int) -> tuple[int, int]:
    """Return block size and warps for rows of this width: one warp per 512 elements (16 per thread), 1 to 16 warps."""
    if width > _WIDEST:
        raise ValueError(f"Rows of {width} elements do not fit a program's registers; at most {_WIDEST} do.")
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


def _tuned() -> tuple[Tuned, ...]:
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        for width in (256, 4096, 5120, 16384):
            block, warps = _shape(width)
            shape = {"D": width, "BLOCK": block}
            tensors = dict.fromkeys(("x", "weight", "out"), f"*{dtype}")
            strides = dict.fromkeys(("x_stride", "out_stride"), "i64:16")
            found.append(Tuned(_rms_norm, tensors | strides | {"eps": "fp32"}, shape, warps))
            tensors = dict.fromkeys(("x", "residual", "weight", "out", "total"), f"*{dtype}")
            strides = dict.fromkeys(("x_stride", "residual_stride", "out_stride", "total_stride"), "i64:16")
            found.append(Tuned(_add_rms_norm, tensors | strides | {"eps": "fp32"}, shape, warps))
    return tuple(found)


TUNED = _tuned()
