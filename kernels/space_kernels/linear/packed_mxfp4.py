"""Weights of four bits as MXFP4 packs them: floats of four bits, two in a byte, and an exponent for each 32 inputs.

    W[o, i] = e2m1[number[o, i]] · 2^(n[o, i // 32] - 127)        the low half of a byte is the first number

as the experts of gpt-oss, and compressed-tensors' mxfp4-pack-quantized. Nothing is quantised anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.linear.group_weights import GroupForm, GroupWeights, stored_rows
from space_kernels.linear.rounded_inputs import GROUP


@dataclass(frozen=True)
class PackedMxfp4:
    """A weight [out, in] of a file; nothing is unpacked before `rows`."""

    name: str  # for messages
    numbers: Tensor  # [out, in/2] uint8: a view of the file
    exponents: Tensor  # [out, in/32] uint8
    padding: int = 0  # outputs of zeros behind

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that do not fit each other."""
        numbers, exponents = tuple(self.numbers.shape), tuple(self.exponents.shape)
        expected = self.numbers.shape[0], self.numbers.shape[-1] // (GROUP // 2)
        whole = len(numbers) == 2 and not numbers[1] % (GROUP // 2)
        if not whole or exponents != expected or {self.numbers.dtype, self.exponents.dtype} != {torch.uint8}:
            raise ValueError(f"it has {exponents} scales for {numbers} bytes of numbers, 16 a scale")

    @property
    def form(self) -> GroupForm:
        return GroupForm.MXFP4

    @property
    def kind(self) -> str:
        return "MXFP4"

    @property
    def input_order(self) -> None:
        """Inputs are in the model's order."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the views of the file."""
        return self.numbers, self.exponents

    @property
    def in_features(self) -> int:
        return 2 * self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        return len(self.numbers) + self.padding

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the weight is held in."""
        return self.out_features * self.in_features * self.form.bytes_of_groups // 256

    def padded(self, count: int) -> PackedMxfp4:
        """Return the same with so many outputs of zeros behind."""
        return replace(self, padding=self.padding + count)

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs."""
        part, num_zero = stored_rows(part, len(self.numbers), self.out_features)
        packed, exponents = self.numbers[part], self.exponents[part]
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        # a number is doubled to be whole, so its scale is halved
        ones = torch.ones_like(exponents, dtype=torch.float32)
        scale = torch.ldexp(ones, exponents.to(torch.int32) - 128).to(torch.bfloat16)
        numbers, scale = (F.pad(one, (0, 0, 0, num_zero)).contiguous() for one in (numbers, scale))
        return GroupWeights(self.form, numbers, scale, None, self.in_features)
