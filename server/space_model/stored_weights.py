"""Weights that are left in their file: to be multiplied as it has them, to be dequantised when packed, or looked up.

    stored   a linear's, which is multiplied as the file has it    --weights gguf, packed
    unread   a linear's, which is dequantised when it is packed    other --weights, of a GGUF
    table    an embedding's, whose rows are dequantised when they are looked up, of a GGUF

The module's `weight` is a placeholder: zeros of its shape, in no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from space_kernels.linear.gguf_blocks import Blocks
from space_kernels.linear.group_weights import GroupForm, GroupWeights, Parts
from space_kernels.linear.row_table import RowTable
from space_kernels.linear.stored_parts import InTurn, dense
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.checkpoint.stored_weight import StoredExperts, StoredPart, StoredWeight
from space_model.checkpoint.weight_files import let_go
from space_model.model_error import UnsupportedModel

_TOGETHER = 4096
"""Rows of a table that are checked at a time."""


def stored_of(module: nn.Module) -> StoredWeight | None:
    """Return the weight that a linear is multiplied by as the file has it; None: it has numbers."""
    found: StoredWeight | None = module.__dict__.get("stored")
    return found


def unread_of(module: nn.Module) -> StoredWeight | None:
    """Return the weight that a linear's numbers are still to be made of; None: its `weight` has them, or it is
    stored."""
    found: StoredWeight | None = module.__dict__.get("unread")
    return found


def numbers_of(module: nn.Module) -> Tensor:
    """Return a linear's numbers [out, in], dequantised now if they are unread. Raises UnsupportedModel if one is not
    finite."""
    weight, unread = module.get_parameter("weight").detach(), unread_of(module)
    return weight if unread is None else _numbers(unread, weight.dtype)


def numbers_or_rows_of(linear: nn.Module) -> Tensor | RowTable:
    """Return a linear's numbers as `numbers_of`; of unread blocks a table, which dequantises the rows that are read."""
    unread = unread_of(linear)
    if unread is not None and len(unread) == 1 and isinstance(unread[0], Blocks):
        return UnreadRows(unread[0], linear.get_parameter("weight").dtype)
    return numbers_of(linear)


@dataclass(frozen=True)
class UnreadRows(RowTable):
    """An unread weight's rows; a slice of them is checked, and its pages are released."""

    def __getitem__(self, part: slice | Tensor) -> Tensor:
        """As `RowTable`. Raises UnsupportedModel if a number is not finite."""
        assert isinstance(self.source, Blocks)
        numbers = super().__getitem__(part)
        _check_finite(numbers, self.source)
        if isinstance(part, slice):
            let_go(self.source.data[part])
        return numbers


def _numbers(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    made = []
    for part in weight:
        if isinstance(part, Blocks):
            made.append(RowTable(part, dtype).rows(torch.arange(part.out_features)))
        else:
            made.append(dense([part]).to(dtype))
        _check_finite(made[-1], part)
        let_go(*part.tensors)
    return made[0] if len(made) == 1 else torch.cat(made)


def _check_finite(numbers: Tensor, part: StoredPart) -> None:
    """One number that is not finite makes the sum so."""
    if not bool(numbers.sum().isfinite()) and not bool(numbers.isfinite().all()):
        raise UnsupportedModel(
            f"a scale of {part.name} ({part.kind}) is not finite (NaN or infinite). Fetch the file again."
        )


def weight_of(module: nn.Module) -> Tensor | Parts:
    """Return a linear's weight, as the file has it or as numbers."""
    return stored_of(module) or numbers_of(module)


@dataclass(frozen=True)
class ReadOnce:
    """Blocks, whose pages of the file are released as soon as their outputs were asked for."""

    blocks: Blocks

    @property
    def form(self) -> GroupForm:
        return self.blocks.form

    @property
    def in_features(self) -> int:
        return self.blocks.in_features

    @property
    def out_features(self) -> int:
        return self.blocks.out_features

    @property
    def input_order(self) -> None:
        return self.blocks.input_order

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs."""
        found = self.blocks.rows(part)
        if isinstance(part, slice):
            let_go(self.blocks.data[part])
        return found


def read_once(weight: StoredWeight) -> Parts:
    """Return the weight, whose pages are released while it is read, if it is in blocks."""
    return [ReadOnce(part) if isinstance(part, Blocks) else part for part in weight]


def below(weights: Sequence[StoredWeight]) -> Parts:
    """Join weights below each other."""
    return [*chain.from_iterable(weights)]


def alternate(weights: Sequence[StoredWeight]) -> Parts:
    """Interleave the outputs of gate and up, as `in_turn` does."""
    (gate,), (up,) = weights
    return [InTurn(gate, up)]


def release(*modules: nn.Module) -> None:
    """Release the pages of the file under linears' weights, which were packed or have been read for now."""
    tensors: list[Tensor] = []
    for module in modules:
        stored = stored_of(module) or unread_of(module)
        tensors += (
            [module.get_parameter("weight")] if stored is None else chain.from_iterable(one.tensors for one in stored)
        )
    let_go(*tensors)


def attach(model: nn.Module, left: Mapping[int, StoredWeight], *, stays: bool) -> None:
    """Give each linear its weight, as a stored one or, unless it `stays` so, as an unread one. `left`: by the address
    of the weight's placeholder. Raises UnsupportedModel if a placeholder is not the weight of a linear."""
    found = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and type(module) is nn.Linear and weight.data_ptr() in left:
            give(module, left[weight.data_ptr()], stays=stays)
            found += 1
    if found != len(left):
        raise UnsupportedModel(
            f"{len(left) - found} of {len(left)} weights that stay as their file has them are of no linear of "
            f"{type(model).__name__}."
        )


def attach_experts(model: PreTrainedModel, left: Mapping[int, StoredExperts]) -> None:
    """Give each mixture of experts its weights. `left`: by the address of its gate_up_proj's placeholder. Raises
    UnsupportedModel if a placeholder is of no mixture."""
    found = 0
    for module in model.modules():
        weight = module._parameters.get("gate_up_proj")
        if weight is not None and weight.data_ptr() in left:
            module.__dict__["stored_experts"] = left[weight.data_ptr()]
            found += 1
    if left:
        model.set_experts_implementation("eager")  # other implementations do not support placeholders
    if found != len(left):
        raise UnsupportedModel(
            f"{len(left) - found} of {len(left)} mixtures of experts that stay as their file has them are none of "
            f"{type(model).__name__}. Take --weights plain."
        )


def stored_experts_of(module: nn.Module) -> StoredExperts | None:
    """Return the weights that experts are multiplied by as the file has them; None: they have numbers."""
    found: StoredExperts | None = module.__dict__.get("stored_experts")
    return found


def give(linear: nn.Module, weight: StoredWeight, *, stays: bool) -> None:
    """Give a linear its weight; as `attach`."""
    linear.__dict__["stored" if stays else "unread"] = weight


def table_of(embedding: nn.Module) -> RowTable:
    """Return the rows of an embedding, without a family's scale."""
    found: RowTable | None = embedding.__dict__.get("table")
    return RowTable.of(embedding.get_parameter("weight")) if found is None else found


def rows_of(linear: nn.Module) -> RowTable:
    """Return the rows of a linear's weight."""
    weight, left = linear.get_parameter("weight"), stored_of(linear) or unread_of(linear)
    if left is None:
        return RowTable.of(weight)
    first = left[0]
    if isinstance(first, Blocks) and len(left) == 1:
        return RowTable(first, weight.dtype)
    return RowTable.of(_numbers(left, weight.dtype))


def look_up_in_file(embedding: nn.Module, table: RowTable) -> None:
    """Let an embedding, whose weight is a placeholder, look its rows up in the blocks of the file. What its class does
    to looked-up rows is done as before."""
    placeholder = embedding.get_parameter("weight")
    look_up: Callable[[Tensor], Tensor] = embedding.forward
    embedding.__dict__["table"] = table
    embedding.padding_idx = None  # type: ignore[assignment]

    def forward(ids: Tensor) -> Tensor:
        if embedding._parameters["weight"] is not placeholder:  # another weight is there for a while
            return look_up(ids)
        rows = nn.Parameter(table.rows(ids.flatten()), requires_grad=False)
        embedding._parameters["weight"] = rows
        try:
            return look_up(torch.arange(ids.numel()).view(ids.shape))
        finally:
            embedding._parameters["weight"] = placeholder

    embedding.forward = forward


def check_rows(table: RowTable) -> None:
    """Raises UnsupportedModel if a row of blocks that stay in the file is not finite. Their pages are released."""
    if isinstance(table.source, Tensor):
        return
    for ids in torch.split(torch.arange(len(table)), _TOGETHER):
        _check_finite(table.rows(ids), table.source)
        let_go(table.source.data[ids[0] : ids[-1] + 1])
