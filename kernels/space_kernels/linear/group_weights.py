"""Weights in groups: 32 inputs of an output share a scale, and products are sums of whole numbers.

    Q4_0   W = scale·(number - 8)           number 0 .. 15     4.5 bits a weight
    Q4_1   W = scale·number + min           number 0 .. 15     5 bits
    Q8_0   W = scale·(number - 128)         number 0 .. 255    8.5 bits
    Q4_K   W = scale·number + min           number 0 .. 15     4.6 bits
    Q5_K   W = scale·number + min           number 0 .. 31     8.6 bits
    Q6_K   W = scale·(number - 32)          number 0 .. 63     8.6 bits
    U4_n   W = scale·(number - zero)        number 0 .. 15     4 + 24/n bits
    MXFP4  W = scale·(E2M1[number] - 12)    number 0 .. 15     4.5 bits
    INT8   W = scale·(number - 128)         number 0 .. 255    8 bits, and a float32 scale for each output

as in a GGUF (whose Q8_0 keeps number - 128, and the min of Q4_K and Q5_K with the other sign); scale and min are
float16. In the K forms eight groups share them, and each group multiplies them by whole numbers of its own, its steps;
a group of Q6_K has two, one for 16 inputs each. In the U4 forms n inputs (32, 64 or 128) share scale and zero point, as
in AWQ and GPTQ. The numbers of MXFP4 stand for floats of four bits, doubled; its scales are powers of two in bfloat16.
Inputs are rounded to whole numbers, too: those of a row and group become codes from -127 to 127 with a float32 scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels.build.cpu_library import GroupWeightsStruct, cpu_library
from space_kernels.linear.int8_linear import Int8Linear
from space_kernels.linear.packed_linear import TILE, pad_rows
from space_kernels.linear.rounded_inputs import GROUP, rounded

SHARED = 8
"""Groups with one scale, of the K forms."""

_OUTPUTS = 1024
"""Outputs converted at a time, to bound the float32 copies in memory."""


class GroupForm(IntEnum):
    """`Groups` of cpu/linear.h; 7 is no form."""

    Q4_0 = 1
    Q4_1 = 2
    Q8_0 = 3
    Q4_K = 4
    Q5_K = 5
    Q6_K = 6
    INT8 = 8
    U4_32 = 9
    U4_64 = 10
    U4_128 = 11
    MXFP4 = 12

    @property
    def offset(self) -> int:
        """Return the number that stands for 0, or for the minimum."""
        return {"Q4_0": 8, "Q8_0": 128, "INT8": 128, "Q6_K": 32, "MXFP4": 12}.get(self.name, 0)

    @property
    def has_min(self) -> bool:
        return self in (GroupForm.Q4_1, GroupForm.Q4_K, GroupForm.Q5_K)

    @property
    def is_k(self) -> bool:
        """Return whether eight groups share a scale."""
        return self.name.endswith("_K")

    @property
    def has_zero(self) -> bool:
        return self.name.startswith("U4_")

    @property
    def num_sharing(self) -> int:
        """Return the number of groups with the same scale."""
        return SHARED if self.is_k else int(self.name[3:]) // GROUP if self.has_zero else 1

    @property
    def num_steps(self) -> int:
        """Return the steps of a group's scale; 0: it has a scale of its own."""
        return (2 if self is GroupForm.Q6_K else 1) if self.is_k else 0

    @property
    def bytes_of_groups(self) -> int:
        """Return the bytes of eight groups, 256 weights, of an output."""
        has_four_bits = self in (GroupForm.Q4_0, GroupForm.Q4_1, GroupForm.Q4_K, GroupForm.MXFP4) or self.has_zero
        numbers = GROUP // 2 if has_four_bits else GROUP
        steps = self.num_steps + self.has_min if self.is_k else 0
        return SHARED * (numbers + steps) + SHARED // self.num_sharing * (2 * (1 + self.has_min) + self.has_zero)


E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""What the numbers of MXFP4 stand for: 0, .5, 1, 1.5, 2, 3, 4, 6 and the same with the other sign, doubled, plus 12."""

INT4, INT4_HEAD = GroupForm.Q4_1, GroupForm.Q8_0
"""Of `--weights int4`: linears, and the output head."""


def stored_rows(part: slice | Tensor, num_stored: int, num_outputs: int) -> tuple[slice | Tensor, int]:
    """Return the stored outputs in `part` of a weight, and the number of zero outputs behind them: those from
    `num_stored` to `num_outputs` are padding. A tensor names stored outputs alone."""
    if not isinstance(part, slice):
        return part, 0
    start, stop, _ = part.indices(num_outputs)
    stored = slice(min(start, num_stored), min(stop, num_stored))
    return stored, stop - start - (stored.stop - stored.start)


@dataclass(frozen=True)
class GroupWeights:
    """W[n, 32·g + i] ≈ scale[n, g]·(numbers[n, 32·g + i] - offset) + min[n, g]"""

    form: GroupForm
    numbers: Tensor  # [out, groups·32] uint8
    scale: Tensor  # [out, groups] float16 (MXFP4: bfloat16); of K forms [out, groups/8]; of U4 [out, ⌈groups/sharing⌉];
    # of INT8 [out, 1] float32
    min: Tensor | None  # as scale; None: 0
    in_features: int
    scale_steps: Tensor | None = None  # of the K forms [out, groups], uint8; of Q6_K [out, groups·2], int8
    min_steps: Tensor | None = None  # of Q4_K and Q5_K [out, groups], uint8
    zero: Tensor | None = None  # of a U4 form, as scale, uint8
    input_order: Tensor | None = None  # [in] int32: the input that each place of `numbers` is of; None: 0, 1, 2, …

    @property
    def out_features(self) -> int:
        return len(self.numbers)

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs."""
        fields = (self.min, self.scale_steps, self.min_steps, self.zero)
        least, steps, least_steps, zero = (None if one is None else one[part] for one in fields)
        numbers, scale = self.numbers[part], self.scale[part]
        return GroupWeights(
            self.form, numbers, scale, least, self.in_features, steps, least_steps, zero, self.input_order
        )

    def struct(self) -> GroupWeightsStruct:
        """Return the C struct; the tensors must be contiguous, and live as long."""
        fields = (self.numbers, self.scale, self.min, self.scale_steps, self.min_steps, self.zero)
        return GroupWeightsStruct(*(None if one is None else one.data_ptr() for one in fields))

    @classmethod
    def of(cls, weight: Tensor, form: GroupForm) -> GroupWeights:
        """Quantise a weight [out, in], to Q4_0, Q4_1 or Q8_0. Raises ValueError for weights beyond float16's range."""
        if form not in (GroupForm.Q4_0, GroupForm.Q4_1, GroupForm.Q8_0):
            raise ValueError(f"weights are not quantised to {form.name}, only taken from a file in it")
        outputs, inputs = weight.shape
        groups = -(-inputs // GROUP)
        numbers = torch.empty(outputs, groups * GROUP, dtype=torch.uint8)
        scale = torch.empty(outputs, groups, dtype=torch.float16)
        mins = torch.empty_like(scale) if form is GroupForm.Q4_1 else None
        library = cpu_library() if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" else None
        if library is not None:
            source, place = weight.detach().contiguous(), cls(form, numbers, scale, mins, inputs).struct()
            library.quantize(source.data_ptr(), outputs, inputs, form, byref(place), torch.get_num_threads())
        else:
            _quantize(weight.detach(), form, numbers.view(outputs, groups, GROUP), scale, mins)
        if not (scale.isfinite().all() and (mins is None or mins.isfinite().all())):
            raise ValueError("a weight is beyond float16's range, which scales of groups have")
        return cls(form, numbers, scale, mins, inputs)

    def dense(self) -> Tensor:
        """Dequantise: [out, in] float32."""
        if self.zero is not None:
            return self._from_zero(self.zero)
        scale = _times(self.scale, self.scale_steps)
        whole = torch.tensor(E2M1)[self.numbers.int()] if self.form is GroupForm.MXFP4 else self.numbers
        numbers = whole.reshape(*scale.shape, -1).float().sub_(self.form.offset)
        numbers.mul_(scale[:, :, None])
        if self.min is not None:
            numbers.add_(_times(self.min, self.min_steps)[:, :, None])
        return self._in_order(numbers.flatten(1))

    def _from_zero(self, zero: Tensor) -> Tensor:
        """As `dense`, of a U4 form."""
        size = self.form.num_sharing * GROUP
        numbers = F.pad(self.numbers, (0, -self.numbers.shape[1] % size)).view(len(zero), -1, size).float()
        numbers.sub_(zero[:, :, None]).mul_(self.scale.float()[:, :, None])
        return self._in_order(numbers.flatten(1))

    def _in_order(self, numbers: Tensor) -> Tensor:
        """Return the numbers in the model's order of inputs, without padding."""
        found = numbers[:, : self.in_features]
        if self.input_order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self.input_order.long(), found)


def _times(shared: Tensor, steps: Tensor | None) -> Tensor:
    """Return [out, groups] float32: each shared number times its groups' steps, which float32 holds exactly."""
    if steps is None:
        return shared.float()
    return (shared.float()[:, :, None] * steps.view(*shared.shape, -1).float()).flatten(1)


class StoredWeights(Protocol):
    """Weights in groups that are made when they are asked for, such as blocks of a mapped file."""

    @property
    def form(self) -> GroupForm: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def input_order(self) -> Tensor | None:
        """As of GroupWeights."""

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs."""


class WeightRows(Protocol):
    """A weight [out, in] of which a few outputs are read at a time: a tensor, or a table of blocks in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice | Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class ToQuantize:
    """A weight [out, in] whose outputs are quantised when they are asked for."""

    weight: WeightRows
    form: GroupForm

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return len(self.weight)

    @property
    def input_order(self) -> None:
        """Inputs are in the model's order."""

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs. Raises ValueError as `GroupWeights.of`."""
        return GroupWeights.of(self.weight[part], self.form)


Parts = Sequence[StoredWeights]
"""Weights of outputs below each other, each in a form of its own, and their inputs all in the same order."""


def input_order_of(parts: Parts) -> Tensor | None:
    """Return the order of the parts' inputs. Raises ValueError if it is not the same for all."""
    first = parts[0].input_order
    for part in parts[1:]:
        order = part.input_order
        if first is not order and (first is None or order is None or not torch.equal(first, order)):
            raise ValueError("Parts below each other have their inputs in the same order.")
    return first


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


class GroupLinear(Int8Linear):
    """As Int8Linear, by weights in groups and rounded inputs."""

    def __init__(
        self, weight: Tensor | Parts, bias: Tensor | None, *, wide: bool = False, form: GroupForm = INT4
    ) -> None:
        """weight [out, in], bias [out], on the CPU. A tensor is quantised to `form`. `wide`: results are float32."""
        nn.Module.__init__(self)
        parts = [GroupWeights.of(weight, form)] if isinstance(weight, Tensor) else weight
        self.parts = [part.rows(slice(None)) for part in parts]
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features
        self.bias = None if bias is None else bias.detach().float()
        self._wide = wide
        order = input_order_of(parts)
        self._order = None if order is None else order.long()

    def _matmul(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] float32, in row tiles of a fixed size, which fixes the order of summation."""
        num_rows = x.numel() // self.in_features
        x_rows = x.reshape(num_rows, self.in_features).float()
        if self._order is None:
            near = rounded(x_rows)
        else:  # groups of inputs are those of the weights
            near = torch.empty_like(x_rows).index_copy_(1, self._order, rounded(x_rows[:, self._order]))
        tiles = torch.split(pad_rows(near, TILE), TILE)
        whole = torch.empty(len(tiles) * TILE, self.out_features)
        first = 0
        for part in self.parts:
            for begin in range(0, part.out_features, _OUTPUTS):
                weight = part.rows(slice(begin, begin + _OUTPUTS)).dense()
                outputs = slice(first + begin, first + begin + len(weight))
                for number, tile in enumerate(tiles):
                    whole[number * TILE : (number + 1) * TILE, outputs] = F.linear(tile, weight)
            first += part.out_features
        if self.bias is not None:
            whole += self.bias
        return whole[:num_rows].view(*x.shape[:-1], self.out_features)


def group_form(weights: str, *, head: bool = False) -> GroupForm | None:
    """Return the form of linears, or of the output head, for a value of `--weights`; None: not in groups."""
    if weights != "int4":
        return None
    return INT4_HEAD if head else INT4
