"""A matmul on a GPU whose arithmetic is the same for every number of rows.

    out[m, n] = ( Σ_part  Σ_k in part  x[m, k]·w[n, k] ) + bias[n]        parts, and k in each, in ascending order

Tiles have 64 rows for any number of rows: with few rows, reading the weight takes longer than the arithmetic on padding
rows. The number of parts that k is split into depends on the weight's shape alone. With few rows each part is one
program, because otherwise too few programs would read the weight, and a second pass adds the parts up; with many rows
one program computes all parts in turn. Both add the same numbers in the same order.

fp8 weights (fp8.py) are converted exactly in registers, by bit shifts, because compute capability 8.0 has no
instruction for it. The sum over all parts is multiplied by the output's scale.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.fp8_bits import widened

_PROGRAMS = 264
"""Programs needed to saturate a GPU's memory: two on each of 132 multiprocessors."""

_FEW_ROWS = 256
"""Up to this many rows each part is its own program; the partial sums take at most 256·out·parts·4 bytes."""


@dataclass(frozen=True)
class LinearTile:
    """The tile of one program, and the number of parts that sums over k are split into."""

    rows: int
    outs: int
    depth: int  # k at a time
    parts: int
    part_depth: int  # k in a part: a multiple of `depth`
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, out: int, width: int, dtype: torch.dtype) -> LinearTile:
        """Choose by the weight's shape and dtype alone."""
        wide = dtype is torch.float32
        rows, outs, depth = (32, 64, 32) if wide else (64, 64, 64)
        steps = triton.cdiv(width, depth)
        parts = min(max(_PROGRAMS // triton.cdiv(out, outs), 1), 8, max(steps // 8, 1))
        part_steps = triton.cdiv(steps, parts)
        return cls(rows, outs, depth, triton.cdiv(steps, part_steps), part_steps * depth, 4, 4)


@triton.jit
def _part(x, weight, m, n, k, stop, x_stride, w_stride, rows, outs, DEPTH: tl.constexpr, like):
    """The sum over k in [k, stop) of one tile, float32."""
    total = tl.zeros_like(like)
    for start in range(k, stop, DEPTH):
        lanes = start + tl.arange(0, DEPTH)
        inside = lanes < stop
        left = tl.load(x + m[:, None] * x_stride + lanes[None, :], (m < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight + n[None, :] * w_stride + lanes[:, None], (n < outs)[None, :] & inside[:, None], other=0)
        if weight.dtype.element_ty == tl.uint8:
            right = widened(right, left.dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x,
    weight,
    scale,
    bias,
    out,
    x_stride,
    w_stride,
    out_stride,
    part_stride,
    rows,
    outs,
    width,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART_DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * OUTS + tl.arange(0, OUTS)).to(tl.int64)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    if SPLIT:
        # store the sum of one part, without scale and bias
        part = tl.program_id(2)
        first = part * PART_DEPTH
        total = _part(
            x, weight, m, n, first, tl.minimum(first + PART_DEPTH, width), x_stride, w_stride, rows, outs, DEPTH, total
        )
        place = out + part.to(tl.int64) * part_stride
    else:
        for part in range(PARTS):
            first = part * PART_DEPTH
            total += _part(
                x,
                weight,
                m,
                n,
                first,
                tl.minimum(first + PART_DEPTH, width),
                x_stride,
                w_stride,
                rows,
                outs,
                DEPTH,
                total,
            )
        if SCALED:
            total *= tl.load(scale + n, n < outs, other=0.0)[None, :]
        if BIASED:
            total += tl.load(bias + n, n < outs, other=0.0).to(tl.float32)[None, :]
        place = out
    inside = (m < rows)[:, None] & (n < outs)[None, :]
    tl.store(place + m[:, None] * out_stride + n[None, :], total.to(out.dtype.element_ty), inside)


@triton.jit
def _join(
    parts,
    scale,
    bias,
    out,
    part_stride,
    row_stride,
    out_stride,
    outs,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * part_stride + row * row_stride + n, inside, other=0.0)
    if SCALED:
        total *= tl.load(scale + n, inside, other=0.0)
    if BIASED:
        total += tl.load(bias + n, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), inside)


def row_invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] -> [R, out]: sums in float32, rounded to x's dtype once."""
    return _launch(x, weight, None, bias)


def fp8_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, in], weight [out, in] fp8, scale [out] -> [R, out]: sums in float32, rounded to x's dtype once."""
    return _launch(x, weight.view(torch.uint8), scale, bias)


def _launch(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    (rows, width), outs = x.shape, len(weight)
    out = x.new_empty(rows, outs)
    if not rows:
        return out
    tile = LinearTile.of(outs, width, x.dtype)
    split = tile.parts > 1 and rows <= _FEW_ROWS
    place = x.new_empty(tile.parts, rows, outs, dtype=torch.float32) if split else out
    # row tiles first: programs that run together read the same weights
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outs, tile.outs), tile.parts if split else 1)
    _matmul[grid](
        x,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        place,
        x.stride(0),
        weight.stride(0),
        outs,
        rows * outs,
        rows,
        outs,
        width,
        ROWS=tile.rows,
        OUTS=tile.outs,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        PART_DEPTH=tile.part_depth,
        SPLIT=split,
        SCALED=scale is not None,
        BIASED=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        _join[(triton.cdiv(outs, _JOINED), rows)](
            place,
            x if scale is None else scale,
            x if bias is None else bias,
            out,
            rows * outs,
            outs,
            outs,
            outs,
            PARTS=tile.parts,
            BLOCK=_JOINED,
            SCALED=scale is not None,
            BIASED=bias is not None,
            num_warps=4,
        )
    return out


_JOINED = 512
"""Outputs per program of `_join`: 4 per thread."""


def _tuned() -> tuple[Tuned, ...]:
    integers = {"x_stride": "i64:16", "w_stride": "i64:16", "out_stride": "i64:16", "part_stride": "i64:16"}
    counts = {"rows": "i32", "outs": "i32:16", "width": "i32:16"}
    found = []
    for name, held, dtype in (
        ("bf16", "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.float16),
        ("fp32", "fp32", torch.float32),
        ("bf16", "u8", torch.bfloat16),
    ):
        scaled = held == "u8"
        tensors = {"scale": "*fp32" if scaled else f"*{name}", "bias": f"*{name}"}
        for out, width in ((6144, 4096), (4096, 14336), (128256, 4096)):
            tile = LinearTile.of(out, width, dtype)
            shape = {
                "ROWS": tile.rows,
                "OUTS": tile.outs,
                "DEPTH": tile.depth,
                "PARTS": tile.parts,
                "PART_DEPTH": tile.part_depth,
                "SCALED": scaled,
                "BIASED": False,
            }
            for split in (False, True) if tile.parts > 1 else (False,):
                found.append(
                    Tuned(
                        _matmul,
                        {"x": f"*{name}", "weight": f"*{held}", "out": "*fp32" if split else f"*{name}"}
                        | tensors
                        | integers
                        | counts,
                        shape | {"SPLIT": split},
                        tile.num_warps,
                        tile.num_stages,
                    )
                )
        found.append(
            Tuned(
                _join,
                {"parts": "*fp32", "out": f"*{name}", "outs": "i32:16"}
                | tensors
                | dict.fromkeys(("part_stride", "row_stride", "out_stride"), "i64:16"),
                {"PARTS": 4, "BLOCK": _JOINED, "SCALED": scaled, "BIASED": False},
            )
        )
    return tuple(found)


TUNED = _tuned()
