"""Compiled mixture of experts: all experts of a step in one call, for bfloat16 on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, byref

import torch
from torch import Tensor, nn

from space_kernels.build.cpu_library import CpuLibrary, ExpertRowsStruct, ExpertsStruct, LinearStruct
from space_kernels.linear.cpu_linear import LANES, CompiledLinear, in_turn
from space_kernels.linear.group_weights import Parts


class CompiledExperts(nn.Module):
    """y = Σ over the row's experts, ascending, of weight · down(silu(gate·x) · (up·x)), summed in float32.

    A row's bits depend neither on the other rows nor on the order of its experts.
    """

    def __init__(
        self,
        library: CpuLibrary,
        gate_up: Tensor | Iterable[Parts],
        down: Tensor | Iterable[Parts],
        *,
        weights: str = "plain",
    ) -> None:
        """gate_up [experts, 2·width, hidden], gate first; down [experts, hidden, width]; or the weights of each
        expert in groups, as a file has them, gate and up alternating by 16 outputs; `weights`: int8 or int4. Raises
        ValueError for weights that `takes` does not."""
        super().__init__()
        alternating: Iterable[Tensor | Parts]  # made one at a time, so that only one is in memory twice
        if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
            alternating = gate_up
        elif self.takes(gate_up, down):
            alternating = (in_turn(*each.chunk(2)) for each in gate_up)
        else:
            raise ValueError(f"Compiled experts take bfloat16 of widths that {LANES} divides; got {gate_up.dtype}.")
        self._library = library
        self.gate_up = [CompiledLinear(library, each, None, weights=weights) for each in alternating]
        self.down = [CompiledLinear(library, each, None, weights=weights) for each in down]
        self.hidden_size, self.width = self.down[0].out_features, self.down[0].in_features
        count = len(self.down)
        self._structs = tuple(
            (LinearStruct * count)(*(linear.struct for linear in linears)) for linears in (self.gate_up, self.down)
        )
        first = (ctypes.cast(structs, POINTER(LinearStruct)) for structs in self._structs)
        self._struct = ExpertsStruct(*first, count, self.hidden_size, self.width)

    @staticmethod
    def takes(gate_up: Tensor, down: Tensor) -> bool:
        """Whether the compiled operation supports these weights."""
        return gate_up.dtype == down.dtype == torch.bfloat16 and not gate_up.shape[2] % 2 and not down.shape[2] % LANES

    def forward(self, hidden: Tensor, expert_of: Tensor, weight_of: Tensor) -> Tensor:
        """hidden [R, hidden], expert_of and weight_of [R, experts per row] -> [R, hidden]. Raises IndexError for an
        expert that does not exist."""
        hidden = hidden.contiguous()
        rows, per_row = expert_of.shape
        pairs = rows * per_row
        ascending, order = expert_of.sort(dim=1, stable=True)
        weight = weight_of.gather(1, order).float().contiguous()
        places, bounds = torch.empty(pairs, dtype=torch.int64), torch.empty(len(self.down) + 1, dtype=torch.int64)
        gathered, inner = hidden.new_empty(pairs, self.hidden_size), hidden.new_empty(pairs, self.width)
        made, out = torch.empty(pairs, self.hidden_size), torch.empty_like(hidden)
        struct = ExpertRowsStruct(
            hidden.data_ptr(),
            rows,
            per_row,
            ascending.data_ptr(),
            weight.data_ptr(),
            places.data_ptr(),
            bounds.data_ptr(),
            gathered.data_ptr(),
            inner.data_ptr(),
            made.data_ptr(),
            out.data_ptr(),
        )
        if not self._library.experts(byref(self._struct), byref(struct), torch.get_num_threads()):
            raise IndexError(f"There are {len(self.down)} experts; a row chose {int(expert_of.max())}.")
        return out
