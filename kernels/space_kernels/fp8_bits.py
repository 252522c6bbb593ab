"""Numbers of eight bits inside Triton kernels, as the bytes they are: what every GPU, and the interpreter, can.

Machines below 8.9 have no instruction for e4m3, and the interpreter rounds to it otherwise than machines do.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

# e4m3   s eeee fff            the same digits in float16, whose exponent is biased by 15 and not by 7: 2^8 too small,
# fp16   s 0eeee fff 0000000   numbers below 2^-6 too, for float16 has such as well

# float32 -> e4m3, |x| ≥ 2^-6: add just less than half of the last place that stays, or half where that place is odd,
# and cut; 960 = (127 - 7)·8 is the difference of the biases. Below, the places are 2^-9 everywhere, as those of float32
# are at 2^14: adding 2^14 rounds to them.


@triton.jit
def widened(bits, dtype: tl.constexpr):
    """uint8 -> the number, exactly. The byte of NaN, which nobody writes, would be 480."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(dtype)


@triton.jit
def narrowed(x):
    """float32, finite -> the byte of the nearest number, of two the even one; the greatest for what is beyond it."""
    size = tl.minimum(tl.abs(x), 448.0)
    digits = size.to(tl.int32, bitcast=True)
    large = ((digits + 0x7FFFF + ((digits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 16384's own
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (sign | tl.where(size < 0.015625, small, large)).to(tl.uint8)
