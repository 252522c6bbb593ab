"""Weights in groups: 32 inputs of an output share a scale, and products are sums of whole numbers.

    Q4_0   W = scale·(number - 8)           number 0 .. 15     4.5 bits a weight
    Q4_1   W = scale·number + min           number 0 .. 15     5 bits
    Q8_0   W = scale·(number - 128)         number 0 .. 255    8.5 bits

as in a GGUF (whose Q8_0 keeps number - 128); scale and min are float16. Inputs are rounded to whole numbers, too: those
of a row and group become codes from -127 to 127 with a float32 scale.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels.build.cpu_library import GroupWeightsStruct, cpu_library
from space_kernels.linear.int8_linear import Int8Linear
from space_kernels.linear.packed_linear import TILE, pad_rows

GROUP = 32
"""Inputs of a group."""

GREATEST = 127
"""Codes of inputs are in the symmetric range -127 .. 127."""

FLOOR = 2.0**-100
"""Groups of inputs that are smaller are taken for 0."""

_OUTPUTS = 1024
"""Outputs converted at a time, to bound the float32 copies in memory."""


class GroupForm(IntEnum):
    """`Groups` of cpu/linear.h."""

    Q4_0 = 1
    Q4_1 = 2
    Q8_0 = 3

    @property
    def offset(self) -> int:
        """Return the number that stands for 0, or for the minimum."""
        return {GroupForm.Q4_0: 8, GroupForm.Q4_1: 0, GroupForm.Q8_0: 128}[self]

    @property
    def bytes_of_group(self) -> int:
        """Return the bytes of 32 weights of an output."""
        return {GroupForm.Q4_0: 18, GroupForm.Q4_1: 20, GroupForm.Q8_0: 34}[self]


INT4, INT4_HEAD = GroupForm.Q4_1, GroupForm.Q8_0
"""Of `--weights int4`: linears, and the output head."""


@dataclass(frozen=True)
class GroupWeights:
    """W[n, 32·g + i] ≈ scale[n, g]·(numbers[n, 32·g + i] - offset) + min[n, g]"""

    form: GroupForm
    numbers: Tensor  # [out, groups·32] uint8
    scale: Tensor  # [out, groups] float16
    min: Tensor | None  # [out, groups] float16; None: 0
    in_features: int

    @classmethod
    def of(cls, weight: Tensor, form: GroupForm) -> GroupWeights:
        """Quantise a weight [out, in]. Raises ValueError for weights beyond float16's range."""
        outputs, inputs = weight.shape
        groups = -(-inputs // GROUP)
        numbers = torch.empty(outputs, groups * GROUP, dtype=torch.uint8)
        scale = torch.empty(outputs, groups, dtype=torch.float16)
        mins = torch.empty_like(scale) if form is GroupForm.Q4_1 else None
        library = cpu_library() if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" else None
        if library is not None:
            source, least = weight.detach().contiguous(), None if mins is None else mins.data_ptr()
            place = GroupWeightsStruct(numbers.data_ptr(), scale.data_ptr(), least)
            library.quantize(source.data_ptr(), outputs, inputs, form, byref(place), torch.get_num_threads())
        else:
            _quantize(weight.detach(), form, numbers.view(outputs, groups, GROUP), scale, mins)
        if not (scale.isfinite().all() and (mins is None or mins.isfinite().all())):
            raise ValueError("a weight is beyond float16's range, which scales of groups have")
        return cls(form, numbers, scale, mins, inputs)

    def dense(self) -> Tensor:
        """Dequantise: [out, in] float32."""
        numbers = self.numbers.view(len(self.numbers), -1, GROUP).float().sub_(self.form.offset)
        numbers.mul_(self.scale.float()[:, :, None])
        if self.min is not None:
            numbers.add_(self.min.float()[:, :, None])
        return numbers.flatten(1)[:, : self.in_features]


def _quantize(weight: Tensor, form: GroupForm, numbers: Tensor, scale: Tensor, mins: Tensor | None) -> None:
    """As `quantize_group` of cpu/linear_groups.cpp: weight [out, in] -> numbers [out, groups, 32], the others
    [out, groups]."""
    _, groups, _ = numbers.shape
    for begin in range(0, len(weight), _OUTPUTS):
        rows = slice(begin, begin + _OUTPUTS)
        part = F.pad(weight[rows].float(), (0, groups * GROUP - weight.shape[1])).view(-1, groups, GROUP)
        least, most = part.aminmax(dim=2)
        if mins is not None:
            mins[rows] = least
            least = mins[rows].float()
            scale[rows] = (most - least) / 15
            part = part - least[:, :, None]
        elif form is GroupForm.Q4_0:
            scale[rows] = torch.where(-least > most, least, most) / -8  # the weight of the greatest size becomes 0
        else:
            scale[rows] = torch.maximum(-least, most) / 127
        wide = scale[rows].float()
        part = part / torch.where(wide == 0, 1.0, wide)[:, :, None]
        numbers[rows] = part.round_().add_(form.offset).clamp_(0, 255 if form is GroupForm.Q8_0 else 15)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[R, in] -> whole numbers [R, groups, 32] float32 and scale [R, groups] float32, NaN where x is not finite."""
    wide = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    finite = torch.where(wide.isfinite(), wide, 0.0)
    most = finite.abs().amax(dim=2)
    is_some = most > FLOOR
    inverse = torch.where(is_some, torch.full_like(most, GREATEST) / most, 0.0)  # number / tensor rounds twice
    scale = torch.where(is_some, most * float(torch.tensor(1.0) / GREATEST), 0.0) + (wide - wide).sum(dim=2)
    return (finite * inverse[:, :, None]).round_(), scale


def rounded(x: Tensor) -> Tensor:
    """[..., in] -> the same as rounded by `round_rows`, in the dtype of x or float32."""
    flat = x.reshape(-1, x.shape[-1])
    codes, scale = round_rows(flat)
    return (codes * scale[:, :, None]).flatten(1)[:, : x.shape[-1]].reshape(x.shape)


class GroupLinear(Int8Linear):
    """As Int8Linear, by weights in groups and rounded inputs."""

    def __init__(
        self, weight: Tensor | GroupWeights, bias: Tensor | None, *, wide: bool = False, form: GroupForm = INT4
    ) -> None:
        """weight [out, in], bias [out], on the CPU. A tensor is quantised to `form`. `wide`: results are float32."""
        nn.Module.__init__(self)
        self.grouped = weight if isinstance(weight, GroupWeights) else GroupWeights.of(weight, form)
        self.out_features, self.in_features = len(self.grouped.numbers), self.grouped.in_features
        self.bias = None if bias is None else bias.detach().float()
        self._wide = wide

    def _matmul(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] float32, in row tiles of a fixed size, which fixes the order of summation."""
        num_rows = x.numel() // self.in_features
        near = rounded(x.reshape(num_rows, self.in_features).float())
        tiles = torch.split(pad_rows(near, TILE), TILE)
        whole = torch.empty(len(tiles) * TILE, self.out_features)
        for begin in range(0, self.out_features, _OUTPUTS):
            outputs = slice(begin, begin + _OUTPUTS)
            weight = self._part(outputs).dense()
            for number, tile in enumerate(tiles):
                whole[number * TILE : (number + 1) * TILE, outputs] = F.linear(tile, weight)
        if self.bias is not None:
            whole += self.bias
        return whole[:num_rows].view(*x.shape[:-1], self.out_features)

    def _part(self, outputs: slice) -> GroupWeights:
        kept = self.grouped
        mins = None if kept.min is None else kept.min[outputs]
        return GroupWeights(kept.form, kept.numbers[outputs], kept.scale[outputs], mins, kept.in_features)


def group_form(weights: str, *, head: bool = False) -> GroupForm | None:
    """Return the form of linears, or of the output head, for a value of `--weights`; None: not in groups."""
    if weights != "int4":
        return None
    return INT4_HEAD if head else INT4
