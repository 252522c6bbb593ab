"""Loads weights of fused linears into one tensor from the start, so that joining them copies nothing.

query  [H·D, hidden]  ┐
key    [G·D, hidden]  │ one tensor; each weight is a slice of its rows
value  [G·D, hidden]  ┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedRows:
    """Shared tensors for the Llama family's fused weights, allocated when the first part is loaded."""

    def __init__(self, num_rows: Callable[[str], int | None]) -> None:
        """`num_rows` returns the rows of the named weight that this process reads; None: there is no such weight."""
        self._num_rows = num_rows
        self._rooms: dict[tuple[str, str], Tensor] = {}  # module, its first linear -> the shared tensor
        self._lock = threading.Lock()

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the slice of the shared tensor to write this weight to; None if it shares none."""
        module, _, rest = name.rpartition(".")[0].rpartition(".")
        group = next((group for group in _GROUPS if rest in group), None)
        if group is None or len(shape) != 2 or not name.endswith(".weight"):
            return None
        heights = [self._num_rows(f"{module}.{linear}.weight" if module else f"{linear}.weight") for linear in group]
        known = [height for height in heights if height is not None]
        if len(known) < len(group) or known[group.index(rest)] != shape[0]:
            return None
        with self._lock:
            room = self._rooms.get((module, group[0]))
            if room is None:
                room = torch.empty(sum(known), shape[1], dtype=dtype, device=device)
                self._rooms[module, group[0]] = room
        if room.shape[1] != shape[1] or room.dtype is not dtype:
            return None  # mismatched weights are reported when they are loaded into the model
        number = group.index(rest)
        return room[sum(known[:number]) : sum(known[: number + 1])]


def one_below_the_other(weights: Sequence[Tensor]) -> Tensor:
    """Return [sum of rows, columns]: the shared tensor if the weights are its slices in this order, else a copy."""
    first = weights[0]
    at = first.storage_offset()
    for weight in weights:
        shares = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (shares and weight.is_contiguous() and weight.storage_offset() == at):
            return torch.cat(list(weights))
        at += weight.numel()
    rows = sum(len(weight) for weight in weights)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
