"""What recurrent layers of transformers begin with in the check at load, and what they end with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from space_kernels.recurrence.states import LayerMemory, LayerState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import LinearAttentionLayer

STATE_SIZE = 0.3
"""Standard deviation of the numbers of a state before the rows, which are about as large as its outputs."""


class StateBefore:
    """A recurrent layer's inputs and state before the rows: noise, as large as the rows', in the serving dtype."""

    def __init__(self, layer: LayerState, number: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(number)
        self.layer, self.dtype = layer, dtype
        self._noise = torch.randn(layer.conv_dim, layer.num_taps, generator=generator).to(device)
        self.inputs: Tensor | None = None  # [C, taps], once the rows are known
        self.state: Tensor | None = None  # [heads, …] float32
        if layer.shape:
            noise = STATE_SIZE * torch.randn(layer.shape, generator=generator)
            self.state = (torch.zeros_like(noise) if layer.begins_anew else noise).to(device)

    def beside(self, rows: Tensor) -> Tensor:
        """Return [1, C, taps]: the inputs before rows [1, C, R], in their dtype."""
        if self.inputs is None:
            size = rows.float().pow(2).mean().sqrt()
            self.inputs = (self._noise * size).to(self.dtype)
        return self.inputs.to(rows.dtype)[None]

    def fill(self, memory: LayerMemory, slot: int, version: int) -> None:
        """Store it as a sequence's memory, which has room for no drafts."""
        assert self.inputs is not None
        memory.inputs[slot, version] = self.inputs.float().T[1:]
        if memory.state is not None and self.state is not None:
            memory.state[slot, version] = self.state


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A recurrent layer of a cache: what it begins with, then what the rows left, first wide, then in the serving
    dtype."""

    def __init__(self, before: StateBefore) -> None:
        super().__init__()
        self._begin_with(before)

    def _begin_with(self, before: StateBefore) -> None:
        self.before = before
        self.inputs_left: list[Tensor] = []
        self.states_left: list[Tensor] = []
        self.has_previous_state[0] = True
        self.conv_states[0] = torch.empty(0)
        self.recurrent_states[0] = None if before.state is None else before.state[None].double()

    def update_conv_state(self, conv_states: Tensor, *_: object, **__: object) -> Tensor:
        joined = torch.cat([self.before.beside(conv_states), conv_states], dim=-1)
        taps = self.before.layer.num_taps
        self.inputs_left.append(joined[0, :, joined.shape[-1] - taps + 1 :].T)  # [taps - 1, C]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, *_: object, **__: object) -> Tensor:
        self.states_left.append(recurrent_states[0].reshape(self.before.layer.shape))
        return recurrent_states


class InFloat64(TorchFunctionMode):
    """In the block, float32 that a module asks for is float64: recurrent modules compute in float32 of any dtype."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function is torch.Tensor.to:
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {
                name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
            }
        return function(*args, **(kwargs or {}))
