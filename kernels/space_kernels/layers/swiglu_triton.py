"""The SwiGLU activation on a GPU: one pass over the output of the fused matmul."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned

_BLOCK = 1024
"""Elements per program, 8 per thread: 16-byte loads of bfloat16."""


@triton.jit
def _swiglu(gate_up, out, gate_up_stride, out_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < inner
    start = gate_up + row * gate_up_stride
    gate = tl.load(start + lanes, inside, other=0.0).to(tl.float32)
    up = tl.load(start + inner + lanes, inside, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + lanes, active.to(out.dtype.element_ty), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up of [R, 2·I], gate first -> [R, I]. Computed in float32, rounded to the dtype once."""
    num_rows, inner = len(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty(num_rows, inner)
    if num_rows:
        grid = (num_rows, triton.cdiv(inner, _BLOCK))
        _swiglu[grid](gate_up, out, gate_up.stride(0), out.stride(0), inner, BLOCK=_BLOCK, num_warps=4)
    return out


TUNED = tuple(
    Tuned(
        _swiglu,
        {
            "gate_up": f"*{dtype}",
            "out": f"*{dtype}",
            "gate_up_stride": "i64:16",
            "out_stride": "i64:16",
            "inner": "i32:16",
        },
        {"BLOCK": _BLOCK},
    )
    for dtype in ("bf16", "fp16", "fp32")
)
