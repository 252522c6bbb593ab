"""The blocks of a GGUF as weights in groups: the file's own numbers and scales, in another order.

    form here   types of the file
    Q4_0        Q4_0
    Q4_1        Q4_1
    Q8_0        Q8_0, Q5_0 (its five bits become eight)
    Q4_K …      Q4_K, Q5_K, Q6_K
    MXFP4       MXFP4

Nothing is quantised anew: `GroupWeights.dense` gives what the `gguf` package dequantises, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.linear.group_weights import SHARED, GroupForm, GroupWeights
from space_kernels.linear.rounded_inputs import GROUP


def _halves(blocks: Tensor, at: int) -> Tensor:
    """[out, blocks, bytes] -> [out, blocks] float16"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).flatten(1)


def _split(packed: Tensor, size: int) -> Tensor:
    """[..., bytes] -> [..., bytes/size, size]"""
    return packed.reshape(*packed.shape[:-1], -1, size)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., bytes] -> [..., 2·bytes]: the low ones, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q4_0(blocks: Tensor) -> GroupWeights:
    return _whole(GroupForm.Q4_0, _nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupWeights:
    return _whole(GroupForm.Q4_1, _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> GroupWeights:
    bits = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    numbers = _nibbles(blocks[..., 6:]) | bits.flatten(2) << 4
    return _whole(GroupForm.Q8_0, numbers + (GroupForm.Q8_0.offset - 16), _halves(blocks, 0))


def _q8_0(blocks: Tensor) -> GroupWeights:
    return _whole(GroupForm.Q8_0, blocks[..., 2:] ^ GroupForm.Q8_0.offset, _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> GroupWeights:
    numbers = _nibbles(_split(blocks[..., 16:], GROUP))
    return _with_steps(GroupForm.Q4_K, numbers, blocks)


def _q5_k(blocks: Tensor) -> GroupWeights:
    numbers = _split(_nibbles(_split(blocks[..., 48:], GROUP)), GROUP).flatten(-3, -2)
    bits = (blocks[..., None, 16:48] >> torch.arange(SHARED, dtype=torch.uint8)[:, None]) & 1
    return _with_steps(GroupForm.Q5_K, numbers | bits << 4, blocks)


def _q6_k(blocks: Tensor) -> GroupWeights:
    low = _split(_nibbles(_split(blocks[..., :128], 64)), GROUP)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (_split(blocks[..., 128:192], GROUP)[..., None, :] >> pairs) & 3
    steps = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return _whole(GroupForm.Q6_K, low | high << 4, _halves(blocks, 208), scale_steps=steps)


def _mxfp4(blocks: Tensor) -> GroupWeights:
    exponents = blocks[..., 0].to(torch.int32)
    # the scale of doubled numbers, as in packed_mxfp4.py
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128).to(torch.bfloat16)
    return _whole(GroupForm.MXFP4, _nibbles(blocks[..., 1:]), scale)


def _with_steps(form: GroupForm, numbers: Tensor, blocks: Tensor) -> GroupWeights:
    """Unpack the twelve bytes that follow scale and min in Q4_K and Q5_K: eight steps of each, six bits a step."""
    first, second, third = _split(blocks[..., 4:16], 4).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1).flatten(1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1).flatten(1)
    return _whole(form, numbers, _halves(blocks, 0), -_halves(blocks, 2), scales, mins)


def _whole(
    form: GroupForm,
    numbers: Tensor,
    scale: Tensor,
    least: Tensor | None = None,
    scale_steps: Tensor | None = None,
    min_steps: Tensor | None = None,
) -> GroupWeights:
    flat = numbers.flatten(1)
    return GroupWeights(form, flat, scale, least, flat.shape[1], scale_steps, min_steps)


_KINDS: dict[str, tuple[GroupForm, int, int, Callable[[Tensor], GroupWeights]]] = {
    "Q4_0": (GroupForm.Q4_0, 32, 18, _q4_0),
    "Q4_1": (GroupForm.Q4_1, 32, 20, _q4_1),
    "Q5_0": (GroupForm.Q8_0, 32, 22, _q5_0),
    "Q8_0": (GroupForm.Q8_0, 32, 34, _q8_0),
    "Q4_K": (GroupForm.Q4_K, 256, 144, _q4_k),
    "Q5_K": (GroupForm.Q5_K, 256, 176, _q5_k),
    "Q6_K": (GroupForm.Q6_K, 256, 210, _q6_k),
    "MXFP4": (GroupForm.MXFP4, 32, 17, _mxfp4),
}
"""By type of the file: form, weights and bytes of a block."""

KINDS = frozenset(_KINDS)
"""GGUF types that stay in memory as blocks."""


def form_of(kind: str) -> GroupForm:
    """Return the form that a type's blocks are held in."""
    return _KINDS[kind][0]


@dataclass(frozen=True)
class Blocks:
    """Rows of a tensor of a GGUF; nothing is read before `rows`."""

    name: str  # of the tensor, for messages
    kind: str  # one of KINDS
    data: Tensor  # [rows of the tensor, bytes of a row] uint8: a view of the file
    order: Tensor  # [out] int64: the row of each output; -1: zeros

    @property
    def form(self) -> GroupForm:
        return form_of(self.kind)

    @property
    def input_order(self) -> None:
        """Inputs are in the model's order."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the views of the file."""
        return (self.data,)

    @property
    def in_features(self) -> int:
        _, weights, size, _ = _KINDS[self.kind]
        return self.data.shape[1] // size * weights

    @property
    def out_features(self) -> int:
        return len(self.order)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the weight is held in."""
        return self.out_features * self.in_features * self.form.bytes_of_groups // 256

    def padded(self, count: int) -> Blocks:
        """Return the same with so many outputs of zeros behind."""
        return replace(self, order=F.pad(self.order, (0, count), value=-1))

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs. Raises ValueError where a scale is not finite."""
        _, _, size, unpack = _KINDS[self.kind]
        order = self.order[part]
        found = unpack(_split(self.data[order.clamp_min(0)], size))
        for shared in (found.scale, found.min):
            if shared is not None:
                shared[order < 0] = 0
        if not (found.scale.isfinite().all() and (found.min is None or found.min.isfinite().all())):
            raise ValueError(f"a scale of {self.name} ({self.kind}) is not finite (NaN or infinite)")
        return found
