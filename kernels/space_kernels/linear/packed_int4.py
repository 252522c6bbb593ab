"""Weights of four bits as AWQ, GPTQ and compressed-tensors pack them: eight to an int32 word, the lowest bits first.

    layout              numbers of a word                       scales         zero points, packed
    AWQ                 outputs 0 2 4 6 1 3 5 7 of an input     [groups, out]  [groups, out/8], in the same order
    GPTQ                inputs 0 .. 7 of an output              [groups, out]  [groups, out/8], outputs 0 .. 7
    compressed-tensors  inputs 0 .. 7 of an output              [out, groups]  [out/8, groups], outputs 0 .. 7

W = scale·(number - zero). Nothing is quantised anew. GPTQ's act-order gives each input a group of its own choice
(g_idx); inputs are then held in the order of their groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.linear.group_weights import GroupForm, GroupWeights, stored_rows
from space_kernels.linear.rounded_inputs import GROUP

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The value's index, of eight, that each nibble of a word holds, lowest nibble first."""

PER_WORD = 8

_FORMS = {128: GroupForm.U4_128, 64: GroupForm.U4_64, 32: GroupForm.U4_32}  # the least bytes first


class Layout(Enum):
    """The order of numbers in words, and of the words."""

    AWQ = "AWQ"  # [in, out/8]
    GPTQ = "GPTQ"  # [in/8, out]
    ROWS = "compressed-tensors"  # [out, in/8]


def form_for(group_size: int) -> GroupForm | None:
    """Return the form for groups of so many inputs; None: they are held in no form."""
    return next((form for size, form in _FORMS.items() if group_size > 0 and group_size % size == 0), None)


@dataclass(frozen=True)
class PackedInt4:
    """A weight [out, in] of a file; nothing is unpacked before `rows`."""

    name: str  # for messages
    layout: Layout
    words: Tensor  # int32
    scale: Tensor  # [out, groups] float16
    zeros: Tensor | None  # [groups, out/8] int32; None: `least` is
    least: int  # added to zero points, modulo 16: 1 in GPTQ's version 1
    in_features: int
    group_size: int
    form: GroupForm
    input_order: Tensor | None = None  # as of GroupWeights
    padding: int = 0  # outputs of zeros behind

    @classmethod
    def of(
        cls,
        name: str,
        layout: Layout,
        words: Tensor,
        scale: Tensor,
        zeros: Tensor | None,
        *,
        in_features: int,
        group_size: int | None,
        least: int = 0,
        g_idx: Tensor | None = None,
    ) -> PackedInt4 | None:
        """Return the weight; None if its groups are held in no form, or float16 does not have its scales. `group_size`
        None: one group; `g_idx`: [in] the group of each input. Raises ValueError for tensors that do not fit each
        other."""
        size = in_features if group_size is None else group_size
        num_groups = -(-in_features // size)
        expected = {
            Layout.AWQ: (in_features, len(scale) // PER_WORD),
            Layout.GPTQ: (-(-in_features // PER_WORD), len(scale)),
            Layout.ROWS: (len(scale), -(-in_features // PER_WORD)),
        }[layout]
        if tuple(words.shape) != expected or words.dtype is not torch.int32:
            raise ValueError(f"its words are {tuple(words.shape)} {words.dtype}, and {expected} int32 are expected")
        if scale.shape[1] != num_groups or not scale.is_floating_point():
            raise ValueError(f"it has {scale.shape[1]} scales for {in_features} inputs in groups of {size}")
        if zeros is not None and tuple(zeros.shape) != (num_groups, -(-len(scale) // PER_WORD)):
            raise ValueError(f"it has {tuple(zeros.shape)} words of zero points for {num_groups} groups")
        form = GroupForm.U4_128 if num_groups == 1 else form_for(size)
        halves, is_even, order = exact_in_float16(scale), *in_groups(g_idx, size)
        if form is None or halves is None or not is_even:
            return None
        return cls(name, layout, words, halves, zeros, least, in_features, size, form, order)

    @property
    def kind(self) -> str:
        return f"{self.layout.value} in groups of {self.group_size}"

    @property
    def out_features(self) -> int:
        return len(self.scale) + self.padding

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the views of the file."""
        return (self.words,)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the weight is held in."""
        units = -(-self.in_features // (self.form.num_sharing * GROUP))
        return self.out_features * (-(-self.in_features // GROUP) * GROUP // 2 + 3 * units)

    def padded(self, count: int) -> PackedInt4:
        """Return the same with so many outputs of zeros behind."""
        return replace(self, padding=self.padding + count)

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs. Raises ValueError where a scale is not finite."""
        part, num_zero = stored_rows(part, len(self.scale), self.out_features)
        numbers, scale = self._numbers(part), self.scale[part]
        if not scale.isfinite().all():
            raise ValueError(f"a scale of {self.name} ({self.layout.value}) is not finite (NaN or infinite)")
        if self.zeros is None:
            zero = torch.full(scale.shape, self.least, dtype=torch.uint8)
        else:
            zero = (_columns(self.zeros, part, in_awq_order=self.layout is Layout.AWQ) + self.least & 15).T
        if self.input_order is not None:
            numbers = numbers[:, self.input_order.long()]
        unit = self.form.num_sharing * GROUP
        width, times = -(-self.in_features // unit), -(-self.group_size // unit)
        scale, zero = (one.repeat_interleave(times, 1)[:, :width] for one in (scale, zero))
        numbers = F.pad(numbers, (0, -self.in_features % GROUP, 0, num_zero)).contiguous()
        scale, zero = (F.pad(one, (0, 0, 0, num_zero)).contiguous() for one in (scale, zero))
        return GroupWeights(self.form, numbers, scale, None, self.in_features, zero=zero, input_order=self.input_order)

    def _numbers(self, part: slice | Tensor) -> Tensor:
        """[some outputs, in] uint8"""
        if self.layout is Layout.AWQ:
            return _columns(self.words, part, in_awq_order=True).T.contiguous()
        words = self.words[:, part].T if self.layout is Layout.GPTQ else self.words[part]
        return nibbles(words)[:, : self.in_features]


def exact_in_float16(scale: Tensor) -> Tensor | None:
    """Return the scales in float16; None if it does not have them."""
    if scale.dtype is torch.float16:
        return scale
    halves = scale.to(torch.float16)
    return halves if torch.equal(halves.float(), scale.float()) else None


def in_groups(g_idx: Tensor | None, size: int) -> tuple[bool, Tensor | None]:
    """Return whether all groups but the last have `size` inputs, and the inputs in the order of their groups, as of
    GroupWeights. `g_idx`: [in] the group of each input; None: groups follow each other."""
    if g_idx is None:
        return True, None
    places = torch.arange(len(g_idx))
    of_place, order = g_idx.long().sort(stable=True)
    is_kept = torch.equal(order, places)
    return torch.equal(of_place, places // size), None if is_kept else order.to(torch.int32)


def nibbles(words: Tensor) -> Tensor:
    """[rows, words] int32 -> [rows, 8·words] uint8, lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def _columns(words: Tensor, part: slice | Tensor, *, in_awq_order: bool) -> Tensor:
    """[rows, columns/8] int32 -> [rows, some columns] uint8"""
    if isinstance(part, slice):
        first = part.start // PER_WORD
        found = nibbles(words[:, first : -(-part.stop // PER_WORD)])
        wanted: slice | Tensor = slice(part.start - first * PER_WORD, part.stop - first * PER_WORD)
    else:
        found = nibbles(words[:, part // PER_WORD])
        wanted = torch.arange(len(part)) * PER_WORD + part % PER_WORD
    if in_awq_order:
        back = torch.tensor(AWQ_ORDER).argsort()
        found = found.view(len(found), -1, PER_WORD)[:, :, back].flatten(1)
    return found[:, wanted]
