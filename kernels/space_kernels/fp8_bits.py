"""fp8 (e4m3) conversions for Triton kernels by integer operations, so that they work on every GPU. GPUs below compute
capability 8.9 have no e4m3 instructions, and Triton's interpreter rounds differently from hardware."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

# e4m3   s eeee fff            the same bits read as float16, whose exponent bias is 15 instead of 7, are 2^8 too small;
# fp16   s 0eeee fff 0000000   this holds for subnormals (below 2^-6) too

# float32 -> e4m3, |x| ≥ 2^-6: add just under half of the last kept place (exactly half if that place is odd), then
# truncate; 960 = (127 - 7)·8 is the difference of the biases. Below 2^-6 the step is 2^-9, which is float32's step at
# 2^14: adding 2^14 rounds to it.


@triton.jit
def widened(bits, dtype: tl.constexpr):
    """Decode bytes exactly. The NaN byte, which is never stored, would decode to 480."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(dtype)


@triton.jit
def narrowed(x):
    """Encode finite float32 to bytes: nearest, ties to even; values beyond the range are clamped."""
    size = tl.minimum(tl.abs(x), 448.0)
    digits = size.to(tl.int32, bitcast=True)
    large = ((digits + 0x7FFFF + ((digits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 16384's own
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (sign | tl.where(size < 0.015625, small, large)).to(tl.uint8)
