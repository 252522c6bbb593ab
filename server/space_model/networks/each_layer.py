"""Runs a transformers decoder with its layers replaced; embedding, masks and norm stay transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import PreTrainedModel

from space_model.checkpoint.family import decoder_layers

RunLayer = Callable[[Tensor], Tensor]
"""The original layer, applied to other rows [1, R, hidden] with the same remaining arguments."""

AroundLayer = Callable[[int, Tensor, RunLayer], Tensor]
"""Layer number, layer input [1, R, hidden], original layer -> the output to use instead."""


@contextmanager
def each_layer(base: PreTrainedModel, around: AroundLayer) -> Iterator[None]:
    """In the block, a forward pass of `base` calls `around` instead of each decoder layer."""
    _, layers = decoder_layers(base)
    for number, layer in enumerate(layers):
        layer.forward = _stand_in(number, layer.forward, around, base)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


_WITH_TUPLES: WeakSet[PreTrainedModel] = WeakSet()
"""Bases whose layers were seen to return tuples."""


def _stand_in(
    number: int, forward: Callable[..., Any], around: AroundLayer, base: PreTrainedModel
) -> Callable[..., Any]:
    def stand_in(*inputs: Any, **keywords: Any) -> Any:
        def run(rows: Tensor) -> Tensor:
            named = keywords if inputs else keywords | {"hidden_states": rows}
            out = forward(*(rows, *inputs[1:])[: len(inputs)], **named)
            if isinstance(out, tuple):
                _WITH_TUPLES.add(base)
            made: Tensor = out[0] if isinstance(out, tuple) else out
            return made

        rows = around(number, inputs[0] if inputs else keywords["hidden_states"], run)
        return (rows,) if base in _WITH_TUPLES else rows

    return stand_in
