"""Which linears have weights that stay as their file has them, and how several are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from space_kernels.linear.group_weights import Parts
from space_kernels.linear.stored_parts import InTurn
from torch import Tensor, nn

from space_model.checkpoint.stored_weight import StoredWeight
from space_model.checkpoint.weight_files import let_go
from space_model.model_error import UnsupportedModel


def stored_of(module: nn.Module) -> StoredWeight | None:
    """Return a linear's stored weight; None: its `weight` has the numbers."""
    found: StoredWeight | None = module.__dict__.get("stored")
    return found


def weight_of(module: nn.Module) -> Tensor | Parts:
    """Return a linear's weight, as the file has it or as numbers."""
    return stored_of(module) or module.get_parameter("weight").detach()


def below(weights: Sequence[StoredWeight]) -> Parts:
    """Join weights below each other."""
    return [*chain.from_iterable(weights)]


def alternate(weights: Sequence[StoredWeight]) -> Parts:
    """Interleave the outputs of gate and up, as `in_turn` does."""
    (gate,), (up,) = weights
    return [InTurn(gate, up)]


def release(weight: StoredWeight) -> None:
    """Release the pages of the file under a weight that was packed."""
    for part in weight:
        for tensor in part.tensors:
            let_go(tensor)


def attach(model: nn.Module, stored: Mapping[int, StoredWeight]) -> None:
    """Give each linear its stored weight. `stored`: by the address of the weight's placeholder. Raises
    UnsupportedModel if a placeholder is not the weight of a linear."""
    found = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and type(module) is nn.Linear and weight.data_ptr() in stored:
            module.__dict__["stored"] = stored[weight.data_ptr()]
            found += 1
    if found != len(stored):
        raise UnsupportedModel(
            f"{len(stored) - found} of {len(stored)} weights that stay as their file has them are of no linear of "
            f"{type(model).__name__}."
        )
