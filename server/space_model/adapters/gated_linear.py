"""Gated adapters on the linears of a transformers decoder, and the per-step gate that selects their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from space_kernels.linear.gated_delta import GatedDelta
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.adapters.gated_lora import GatedLora
from space_model.checkpoint.family import decoder_layers
from space_model.geometry.forward_batch import ForwardBatch, GatedRows


class ServedGate:
    """The rows of the current step that each adapter acts on."""

    def __init__(self) -> None:
        self.runs: Sequence[GatedRows] = ()
        self.num_rows = 0  # of the step, including padding

    def open_for(self, batch: ForwardBatch) -> None:
        """Set the rows of this step; they stay until the next call."""
        self.runs, self.num_rows = batch.gated, len(batch.ids)


class GatedLinear(nn.Module):
    """A linear plus the delta of each adapter on the rows it acts on."""

    def __init__(self, linear: nn.Module, deltas: Mapping[int, GatedDelta], gate: ServedGate) -> None:
        super().__init__()
        self.linear = linear
        self._deltas, self._gate = dict(deltas), gate

    def forward(self, x: Tensor) -> Tensor:
        """[1, R, in] -> [1, R, out]"""
        y: Tensor = self.linear(x)
        for run in self._gate.runs:
            delta = self._deltas.get(run.adapter)
            if delta is not None:
                if x.shape[:-1] != (1, self._gate.num_rows):
                    raise RuntimeError(
                        f"An adapted linear was given {tuple(x.shape)} in a step of {self._gate.num_rows}."
                    )
                delta.add_to(y[0], x[0], run.slice)
        return y


def attach(base: PreTrainedModel, adapters: Sequence[GatedLora], prefix: str) -> ServedGate:
    """Attach the adapters to the decoder `base`, at path `prefix` of the whole model; return the gate that controls
    them.

    Mask embeddings replace rows of the first layer's input, after anything that the family does to embeddings.
    """
    gate = ServedGate()
    for path in sorted({path for adapter in adapters for path in adapter.pairs}):
        parent_path, _, name = path.removeprefix(f"{prefix}.").rpartition(".")
        parent = base.get_submodule(parent_path)
        deltas = {
            number: GatedDelta([pair], [len(pair[1])], adapter.scale)
            for number, adapter in enumerate(adapters)
            if (pair := adapter.pairs.get(path)) is not None
        }
        setattr(parent, name, GatedLinear(parent.get_submodule(name), deltas, gate))
    embeddings = [adapter.mask_embeddings for adapter in adapters]

    def enter(layer: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not gate.runs:
            return None
        if rows:
            return (place_masks(rows[0], gate.runs, embeddings), *rows[1:]), keywords
        return rows, keywords | {"hidden_states": place_masks(keywords["hidden_states"], gate.runs, embeddings)}

    _, layers = decoder_layers(base)
    layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    return gate


def place_masks(hidden: Tensor, runs: Sequence[GatedRows], embeddings: Sequence[Tensor]) -> Tensor:
    """Return a copy of hidden [1, R, hidden] with the adapters' mask rows replaced by their own embeddings."""
    hidden = hidden.clone()
    for run in runs:
        hidden[0, run.slice] = embeddings[run.adapter][run.masks]
    return hidden
