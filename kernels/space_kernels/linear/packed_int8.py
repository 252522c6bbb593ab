"""Weights of eight bits as GPTQ and compressed-tensors keep them, without zero points, with a scale for each 32·n
inputs or for all.

    layout              numbers                                                       scales
    WORDS_OF_INPUTS     number + 128, four inputs of an output to an int32 word       [out, groups]    GPTQ
    WORDS               the same, words of an output beside each other                [out, groups]    pack-quantized
    BYTES               number                                                        [out, groups]    int-quantized

W = scale·number. Nothing is quantised anew. Inputs may be in the order of their groups, as in packed_int4.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.linear.group_weights import GroupForm, GroupWeights, stored_rows
from space_kernels.linear.packed_int4 import exact_in_float16, in_groups
from space_kernels.linear.rounded_inputs import GROUP

PER_WORD = 4

ZERO = GroupForm.Q8_0.offset
"""The byte that stands for 0 in words."""


class ByteLayout(Enum):
    """The order of numbers."""

    WORDS_OF_INPUTS = "GPTQ"  # int32 [in/4, out], the lowest byte first
    WORDS = "compressed-tensors"  # int32 [out, in/4]
    BYTES = "whole numbers"  # int8 [out, in]


@dataclass(frozen=True)
class PackedInt8:
    """A weight [out, in] of a file; nothing is unpacked before `rows`."""

    name: str  # for messages
    layout: ByteLayout
    numbers: Tensor  # a view of the file
    scale: Tensor  # [out, groups] float16; of one group [out, 1] float32
    in_features: int
    group_size: int
    form: GroupForm
    input_order: Tensor | None = None  # as of GroupWeights
    padding: int = 0  # outputs of zeros behind

    @classmethod
    def of(
        cls,
        name: str,
        layout: ByteLayout,
        numbers: Tensor,
        scale: Tensor,
        *,
        in_features: int,
        group_size: int | None,
        g_idx: Tensor | None = None,
    ) -> PackedInt8 | None:
        """Return the weight; None if its groups are no multiples of 32, or float16 does not have their scales.
        `group_size` None: one group; `g_idx`: [in] the group of each input. Raises ValueError for tensors that do not
        fit each other."""
        size = in_features if group_size is None else group_size
        num_groups, num_words = -(-in_features // size), -(-in_features // PER_WORD)
        dtype, expected = {
            ByteLayout.WORDS_OF_INPUTS: (torch.int32, (num_words, len(scale))),
            ByteLayout.WORDS: (torch.int32, (len(scale), num_words)),
            ByteLayout.BYTES: (torch.int8, (len(scale), in_features)),
        }[layout]
        if tuple(numbers.shape) != expected or numbers.dtype is not dtype:
            raise ValueError(
                f"its numbers are {tuple(numbers.shape)} {numbers.dtype}, and {expected} {dtype} are expected"
            )
        if scale.shape[1] != num_groups or not scale.is_floating_point():
            raise ValueError(f"it has {scale.shape[1]} scales for {in_features} inputs in groups of {size}")
        if num_groups == 1:
            return cls(name, layout, numbers, scale.float(), in_features, size, GroupForm.INT8)
        halves, is_even, order = exact_in_float16(scale), *in_groups(g_idx, size)
        if halves is None or not is_even or size % GROUP:
            return None
        return cls(name, layout, numbers, halves, in_features, size, GroupForm.Q8_0, order)

    @property
    def kind(self) -> str:
        return f"{self.layout.value} of eight bits"

    @property
    def out_features(self) -> int:
        return len(self.scale) + self.padding

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the views of the file."""
        return (self.numbers,)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the weight is held in."""
        groups = -(-self.in_features // GROUP)
        return self.out_features * (groups * GROUP + (4 if self.form is GroupForm.INT8 else 2 * groups))

    def padded(self, count: int) -> PackedInt8:
        """Return the same with so many outputs of zeros behind."""
        return replace(self, padding=self.padding + count)

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs. Raises ValueError where a scale is not finite."""
        part, num_zero = stored_rows(part, len(self.scale), self.out_features)
        numbers, scale = self._raised(part), self.scale[part]
        if not scale.isfinite().all():
            raise ValueError(f"a scale of {self.name} ({self.kind}) is not finite (NaN or infinite)")
        if self.input_order is not None:
            numbers = numbers[:, self.input_order.long()]
        if self.form is GroupForm.Q8_0:
            times = self.group_size // GROUP
            scale = scale.repeat_interleave(times, 1)[:, : -(-self.in_features // GROUP)]
        numbers = F.pad(numbers, (0, -self.in_features % GROUP, 0, num_zero), value=ZERO).contiguous()
        scale = F.pad(scale, (0, 0, 0, num_zero)).contiguous()
        return GroupWeights(self.form, numbers, scale, None, self.in_features, input_order=self.input_order)

    def _raised(self, part: slice | Tensor) -> Tensor:
        """Return the numbers plus 128: [some outputs, in] uint8"""
        if self.layout is ByteLayout.BYTES:
            return self.numbers[part].view(torch.uint8) ^ ZERO
        words = self.numbers[:, part].T if self.layout is ByteLayout.WORDS_OF_INPUTS else self.numbers[part]
        return words.contiguous().view(torch.uint8)[:, : self.in_features]
