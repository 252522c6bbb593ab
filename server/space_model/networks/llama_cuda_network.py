"""The compact network of the Llama family on a GPU: the operations between two matmuls of a layer are one kernel.

    qkv matmul | rotary, head norms, store | attention | output matmul | add, norm | gate-up matmul | silu·up | down
    matmul | add, norm of the next layer

Nothing synchronises with the host, and all sizes come from the batch: a CUDA graph can capture a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from space_kernels.attention.attention import Attention, AttentionSpec
from space_kernels.dispatch import Ops
from space_kernels.layers.layers import HeadCounts, HeadNorm, angles
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.paging.step_rows import StepTables
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.checkpoint.weight_files import one_below_the_other
from space_model.geometry.forward_batch import ForwardBatch, GatedRows
from space_model.lora import Lora, why_no_loras
from space_model.model_error import UnsupportedModel
from space_model.networks.llama_parts import FAMILIES, LlamaLayer, LlamaParts, LlamaSource, add_deltas, layer_fields
from space_model.networks.network import PagedKV, Taps


@dataclass(frozen=True)
class FusedLayer(LlamaLayer[nn.Module, GatedDelta]):
    """One decoder layer."""

    gate_up: nn.Module  # [2·inner, hidden], gate first
    head_norm: HeadNorm | None  # Qwen3
    attention: AttentionSpec


@dataclass(frozen=True)
class _Shared:
    """Values that all layers of a step share."""

    angles: tuple[Tensor, Tensor]  # cos and sin [R, D/2]
    attend: Attention
    slots: Tensor


class LlamaCudaNetwork(LlamaParts):
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm."""

    def __init__(self, source: LlamaSource, ops: Ops) -> None:
        super().__init__(source)
        self._ops = ops
        self._heads = HeadCounts(source.num_heads, source.kv_heads)
        self._frequencies: Tensor = source.base.rotary_emb.inv_freq.float()
        self._rotary_scaling = float(source.base.rotary_emb.attention_scaling)
        self._layers = [self._take_apart(source, *layer) for layer in source.layers()]

    def add_lora(self, number: int, lora: Lora) -> None:
        """Raise UnsupportedModel: LoRAs are served on a CPU (lora.why_no_loras)."""
        raise UnsupportedModel(why_no_loras(torch.device("cuda"), 1))

    def remove_lora(self, number: int) -> None:
        """Do nothing: there is none."""

    def _take_apart(self, source: LlamaSource, layer: nn.Module, path: str, window: int | None) -> FusedLayer:
        fields = layer_fields(source, layer, path, window, partial(_joined, self._ops))
        query_norm, key_norm = fields["query_norm"], fields["key_norm"]
        return FusedLayer(
            **fields,
            gate_up=_joined(self._ops, layer.get_submodule("mlp"), ["gate_proj", "up_proj"]),
            head_norm=None if query_norm is None else HeadNorm(query_norm.weight, key_norm.weight, query_norm.eps),
            attention=AttentionSpec(self._scale, window),
        )

    @staticmethod
    def fits(base: PreTrainedModel) -> bool:
        """Return whether this network computes the same as `base`: a known family, with plain or our 8-bit weights."""
        if base.config.model_type not in FAMILIES or base.config.hidden_act != "silu":
            return False
        kinds = {type(linear) for path, linear in base.named_modules() if path.endswith("_proj")}
        return kinds in ({nn.Linear}, {Fp8Linear})

    def forward(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None = None) -> Tensor:
        """[R, hidden] after the final norm. `taps`: filled with the inputs of its layers."""
        residual = self._enter_gated(batch)
        y = self._first_norm(0, residual)
        shared = self._shared(batch)
        for number in range(len(self._layers)):
            if taps is not None:
                taps.take(number, residual)
            y, residual = self._layer(number, y, residual, shared, batch, kv)
        if taps is not None:
            taps.take(len(self._layers), residual)
        return y

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone."""
        y = self._first_norm(number, hidden)
        return self._layer(number, y, hidden.clone(), self._shared(batch), batch, kv)[1]

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        return self._ops.add_rms_norm(torch.zeros_like(hidden), hidden.clone(), self._norm.weight, self._norm.eps)[0]

    def _first_norm(self, number: int, x: Tensor) -> Tensor:
        norm = self._layers[number].attention_norm
        return self._ops.rms_norm(x, norm.weight, norm.eps)

    def _shared(self, batch: ForwardBatch) -> _Shared:
        turns = angles(batch.positions, self._frequencies, self._rotary_scaling)
        if self._ops.attend is None:
            return _Shared(turns, self._ops.space_attention, batch.ids[:0])
        return _Shared(turns, self._ops.attend, StepTables.of(batch.rows).slots())

    def _layer(
        self, number: int, y: Tensor, residual: Tensor, shared: _Shared, batch: ForwardBatch, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        """Return the sum normed for the next layer (or by the final norm), and the sum. y: the normed residual."""
        ops, gated, layer = self._ops, batch.gated, self._layers[number]
        after = self._norm if number + 1 == len(self._layers) else self._layers[number + 1].attention_norm
        pages = kv.layer(number)
        fused = layer.query_key_value(y)  # [R, (H + 2G)·D]
        add_deltas(fused, y, gated, layer.deltas_of("query_key_value"))
        qkv = ops.rotary_store(fused, shared.angles, pages, shared.slots, self._heads, layer.head_norm)
        attended = shared.attend(qkv, pages, batch.rows, layer.attention).flatten(1)
        out = self._whole(layer.output(attended), attended, gated, layer.deltas_of("output"))
        y, residual = ops.add_rms_norm(out, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
        both = layer.gate_up(y)  # [R, 2·inner]
        add_deltas(both, y, gated, layer.deltas_of("gate_up"))
        inner = ops.swiglu(both)
        out = self._whole(layer.down(inner), inner, gated, layer.deltas_of("down"))
        return ops.add_rms_norm(out, residual, after.weight, after.eps)

    def _whole(self, out: Tensor, x: Tensor, gated: Sequence[GatedRows], deltas: Sequence[GatedDelta | None]) -> Tensor:
        """Return out [R, hidden] plus the adapters' deltas, summed over the ranks."""
        add_deltas(out, x, gated, deltas)
        return out if self._ranks is None else self._ranks.sum(out)


def _joined(ops: Ops, parent: nn.Module, names: Sequence[str]) -> nn.Module:
    """Concatenate the linears `names` of `parent`, without copying if they share a tensor, and free the originals."""
    linears = [parent.get_submodule(name) for name in names]
    small = [linear for linear in linears if isinstance(linear, Fp8Linear)]
    if small:
        for name in names:
            delattr(parent, name)
        return Fp8Linear.joined(small)
    weights = [linear.get_parameter("weight").detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if isinstance(linear.bias, Tensor)]
    for name in names:
        delattr(parent, name)
    if len(names) == 1:
        return ops.linear(weights[0], biases[0] if biases else None)
    return ops.linear(one_below_the_other(weights), torch.cat(biases) if biases else None)
