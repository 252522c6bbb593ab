"""Compiled linear layers: the weights are read once at memory speed, and rows are bitwise independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, pointer
from enum import IntEnum
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from space_kernels.build.cpu_library import (
    CpuLibrary,
    DeltaStruct,
    GatedRowsStruct,
    GroupWeightsStruct,
    LinearPartStruct,
    LinearStruct,
    MatmulStruct,
    cpu_library,
)
from space_kernels.linear.group_weights import (
    GroupForm,
    GroupLinear,
    Parts,
    ToQuantize,
    WeightRows,
    group_form,
    input_order_of,
)
from space_kernels.linear.int8_linear import Int8Linear, Int8Weights
from space_kernels.linear.packed_linear import PackedLinear
from space_kernels.linear.rounded_inputs import GROUP
from space_kernels.linear.row_table import RowTable

LANES = 16
"""Outputs per panel."""

_TOGETHER = 4096
"""Outputs of stored weights that are unpacked at a time."""

_MIXED = 7  # of `Groups` of cpu/linear.h: parts in several forms

LOW_PADDING = 32
"""Columns behind the ranks of A·x that the compiled matmul may read, and multiplies by 0."""


STORED = ("gguf", "packed")
"""Values of `--weights` with which linears stay as their file has them, where it has them in groups."""


class Then(IntEnum):
    """The operation fused to a matmul, before rounding."""

    NOTHING = 0
    ADD = 1  # add another tensor
    SWIGLU = 2  # the panels alternate between gate and up: silu(gate)·up


class CompiledLinear(nn.Module):
    """x·Wᵀ + b in bfloat16 with float32 sums; a row's result does not depend on the other rows or their number."""

    def __init__(
        self,
        library: CpuLibrary,
        weight: Tensor | RowTable | Parts,
        bias: Tensor | None,
        *,
        wide: bool = False,
        weights: str | GroupForm = "plain",
    ) -> None:
        """weight [out, in], in even, bias [out], bfloat16, on the CPU. The weight is copied;
        a table's rows are read a few at a time, to be quantised.

        `wide`: results are float32; `weights`: the copy is quantised to int8 or int4, or to a form of groups, unless it
        is in groups already; all parts but the last then have multiples of 16 outputs. Raises ValueError for other
        weights.
        """
        super().__init__()
        if not isinstance(weight, Tensor | RowTable):
            self.out_features, self.in_features = sum(part.out_features for part in weight), weight[0].in_features
            if any(part.out_features % LANES for part in weight[:-1]):
                raise ValueError(f"Parts below each other have multiples of {LANES} outputs.")
        elif self.takes(weight):
            self.out_features, self.in_features = weight.shape
        else:
            got = f"{weight.dtype}, {tuple(weight.shape)}"
            raise ValueError(f"The compiled matmul takes bfloat16 weights with even inputs; got {got}.")
        self._library, self._wide = library, wide
        num_panels = -(-self.out_features // LANES)
        self.scale: Tensor | None = None
        self.input_order: Tensor | None = None  # of weights in groups: [in] int32, the input at each place
        groups = 0
        form = weights if isinstance(weights, GroupForm) else group_form(weights)
        place = None
        if not isinstance(weight, Tensor | RowTable):
            self.input_order = input_order_of(weight)
            runs = [[*run] for _, run in groupby(weight, lambda part: part.form)]
            self._panels = [self._packed(run) for run in runs]
            self.weight, groups = self._panels[0], weight[0].form
            if len(runs) > 1:
                if self.scale is not None:
                    raise ValueError("Parts with a scale for each output are below others of the same form alone.")
                groups, place = _MIXED, self._table([run[0].form for run in runs], num_panels)
        elif form is not None:
            self.weight, groups = self._packed([ToQuantize(weight, form)]), form
        elif weights == "int8":
            self.weight, self.scale = self._packed_in_int8(weight, num_panels)
            groups = GroupForm.INT8
        else:
            assert isinstance(weight, Tensor), "a table's rows are read to be quantised"
            self.weight = torch.empty(num_panels * LANES, library.padded(self.in_features), dtype=torch.bfloat16)
            source = weight.detach().contiguous()
            library.pack(source.data_ptr(), self.out_features, self.in_features, self.weight.data_ptr())
        self.bias = None if bias is None else _per_output(bias.detach(), num_panels)
        self.struct = LinearStruct(
            self.weight.data_ptr() if place is None else place,
            _address(self.scale),
            _address(self.bias),
            num_panels,
            self.in_features,
            self.out_features,
            groups,
            _address(self.input_order),
        )
        self._here = byref(self.struct)

    def _packed(self, parts: Parts) -> Tensor:
        """Pack weights below each other, of the same form: [panels, bytes of a panel]"""
        form, outputs = parts[0].form, sum(part.out_features for part in parts)
        size = self._library.panel_bytes(self.in_features, form)
        packed = torch.empty(-(-outputs // LANES), size, dtype=torch.uint8)
        place = packed.data_ptr()
        scales: list[Tensor] = []
        for part in parts:
            for begin in range(0, part.out_features, _TOGETHER):
                some = part.rows(slice(begin, begin + _TOGETHER))
                struct = some.struct()
                self._library.pack_groups(byref(struct), some.out_features, self.in_features, form, place)
                place += -(-some.out_features // LANES) * size
                if form is GroupForm.INT8:
                    scales.append(some.scale[:, 0])
        if scales:
            self.scale = _per_output(torch.cat(scales), len(packed))
        return packed

    def _packed_in_int8(self, weight: WeightRows, num_panels: int) -> tuple[Tensor, Tensor]:
        """Quantise and pack a weight [out, in]: [panels, bytes of a panel], scales [panels·16]"""
        size = self._library.panel_bytes(self.in_features, GroupForm.INT8)
        packed, scale = torch.empty(num_panels, size, dtype=torch.uint8), torch.zeros(num_panels * LANES)
        place = packed.data_ptr()
        for begin in range(0, len(weight), _TOGETHER):
            some = Int8Weights.of(weight[begin : begin + _TOGETHER])
            scale[begin : begin + len(some.scale)] = some.scale
            raised = F.pad(some.numbers.view(torch.uint8) ^ 128, (0, -self.in_features % GROUP))  # number + 128
            numbers = GroupWeightsStruct(raised.data_ptr())
            self._library.pack_groups(byref(numbers), len(raised), self.in_features, GroupForm.INT8, place)
            place += -(-len(raised) // LANES) * size
        return packed, scale

    def _table(self, forms: Sequence[GroupForm], num_panels: int) -> int:
        """Return the address of the C structs of parts in several forms."""
        table, first = (LinearPartStruct * (len(forms) + 1))(), 0
        for entry, form, panels in zip(table, forms, self._panels, strict=False):
            entry.weight, entry.first, entry.groups = panels.data_ptr(), first, form
            first += len(panels)
        table[len(forms)].first = num_panels
        self._structs = table
        return addressof(table)

    @staticmethod
    def takes(weight: Tensor | RowTable) -> bool:
        """Whether the compiled matmul supports this weight: bfloat16 with an even number of inputs."""
        return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0

    def forward(self, x: Tensor, gated: Sequence[DeltaRows] = ()) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._matmul(x, Then.NOTHING, None, self.out_features, gated)

    def plus(self, x: Tensor, other: Tensor, gated: Sequence[DeltaRows] = ()) -> Tensor:
        """Return x·Wᵀ + b + other, rounded once; other [..., out] contiguous."""
        return self._matmul(x, Then.ADD, other, self.out_features, gated)

    def swiglu(self, x: Tensor, gated: Sequence[DeltaRows] = ()) -> Tensor:
        """Return silu(gate)·up, rounded once, for weights from `in_turn`: [..., in] -> [..., out/2]"""
        return self._matmul(x, Then.SWIGLU, None, self.out_features // 2, gated)

    def _matmul(self, x: Tensor, then: Then, other: Tensor | None, width: int, gated: Sequence[DeltaRows]) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise TypeError(f"The compiled matmul takes bfloat16 rows; got {x.dtype}.")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], width, dtype=torch.float32 if self._wide else torch.bfloat16)
        added = None if other is None else other.data_ptr()
        rows = x.numel() // self.in_features
        matmul = MatmulStruct(x.data_ptr(), rows, self.in_features, y.data_ptr(), width, self._wide, then, added)
        if gated:
            stride = LOW_PADDING + max(delta.ranks for delta, _ in gated)
            runs = (GatedRowsStruct * len(gated))(*(delta.of_rows(run, stride) for delta, run in gated))
            low = x.new_zeros(rows, stride)
            matmul.gated, matmul.num_gated = addressof(runs), len(runs)
            matmul.low, matmul.low_stride = low.data_ptr(), stride
        self._library.linear(self._here, byref(matmul), torch.get_num_threads())
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _per_output(values: Tensor, num_panels: int) -> Tensor:
    """Pad [out] to [panels·16] float32."""
    padded = torch.zeros(num_panels * LANES)
    padded[: len(values)] = values
    return padded


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave gate and up, [inner, in] each, inner a multiple of 16 -> [2·inner, in]: 16 rows of gate, 16 of up, …

    Raises ValueError for other sizes.
    """
    inner, width = gate.shape
    if inner % LANES:
        raise ValueError(f"Gate and up have {inner} outputs; panels in turn need a multiple of {LANES}.")
    return torch.stack([gate.view(-1, LANES, width), up.view(-1, LANES, width)], dim=1).reshape(2 * inner, width)


class CompiledDelta:
    """As `GatedDelta`, for the compiled matmul to add to the sums of gated rows before it rounds them."""

    def __init__(
        self,
        library: CpuLibrary,
        pairs: Sequence[tuple[Tensor, Tensor] | None],
        sizes: Sequence[int],
        scale: float,
        *,
        turns: bool = False,
        weights: str = "plain",
        input_order: Tensor | None = None,
    ) -> None:
        """As GatedDelta, in bfloat16; every size but the last a multiple of 16. `weights`: of the linears; unless they
        are plain, A is in int8, which multiplies the inputs that the linears have rounded, in their `input_order`."""
        if any(size % LANES for size in sizes[:-1]):
            raise ValueError(f"Linears beside each other have multiples of {LANES} outputs; got {list(sizes)}.")
        down: list[Tensor] = []
        panels_of: list[list[_Panel]] = []  # by linear
        self.ranks = 0
        for pair, size in zip(pairs, sizes, strict=True):
            num_panels = -(-size // LANES)
            if pair is None:
                panels_of.append([_Panel(None, 0, 0)] * num_panels)
                continue
            a, b = pair
            odd = len(a) % 2
            down.append(F.pad(a, (0, 0, 0, odd)))
            b = F.pad((b.float() * scale).to(b.dtype), (0, odd))
            panels = CompiledLinear(library, b, None).weight.view(num_panels, -1)
            panels_of.append([_Panel(panel, self.ranks, b.shape[1]) for panel in panels])
            self.ranks += b.shape[1]
        ordered = [*chain.from_iterable(zip(*panels_of, strict=True) if turns else panels_of)]
        whole = torch.cat(down)
        whole = whole if input_order is None else whole[:, input_order.long()]
        self._a = CompiledLinear(library, whole, None, weights="plain" if weights == "plain" else "int8")
        self._b = torch.cat([panel.weight for panel in ordered if panel.weight is not None])
        table, place = np.zeros((len(ordered), 3), dtype=np.int64), self._b.data_ptr()
        for row, panel in zip(table, ordered, strict=True):
            row[:] = place, panel.first, panel.inputs
            place += 0 if panel.weight is None else panel.weight.nbytes
        self._table = table
        self.struct = DeltaStruct(self._a.struct, table.ctypes.data)

    def of_rows(self, rows: slice, width: int) -> GatedRowsStruct:
        """Return the C struct of these gated rows. `width`: columns of A·x, this one's first."""
        return GatedRowsStruct(rows.start, rows.stop, pointer(self.struct), 0, width)


class _Panel(NamedTuple):
    """The delta of sixteen outputs: B in panels, and its columns."""

    weight: Tensor | None  # None: no delta
    first: int
    inputs: int


DeltaRows = tuple[CompiledDelta, slice]
"""The rows that a delta is added to."""


def cpu_linear(weight: Tensor | Parts, bias: Tensor | None, *, weights: str = "plain") -> nn.Module:
    """Return the fastest linear layer for this weight on this processor; `weights`: quantise to int8 or int4."""
    library = cpu_library() if not isinstance(weight, Tensor) or CompiledLinear.takes(weight) else None
    if library is not None:
        return CompiledLinear(library, weight, bias, weights=weights)
    return GroupLinear(weight, bias) if not isinstance(weight, Tensor) else torch_linear(weights)(weight, bias)


def torch_linear(weights: str, *, head: bool = False) -> Callable[..., Int8Linear | PackedLinear]:
    """Return the class of linears, or of the output head, by torch alone."""
    if weights in STORED:
        return _stored_or_plain
    if (form := group_form(weights, head=head)) is not None:
        return partial(GroupLinear, form=form)
    return Int8Linear if weights == "int8" else PackedLinear


def _stored_or_plain(weight: Tensor | Parts, bias: Tensor | None) -> Int8Linear | PackedLinear:
    return PackedLinear(weight, bias) if isinstance(weight, Tensor) else GroupLinear(weight, bias)
