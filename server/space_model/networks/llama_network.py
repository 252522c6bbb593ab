"""The compact network of the Llama family on a CPU: fused projections, and as few calls per layer as possible.

For models of a few million weights the calls cost more than the arithmetic; this network makes about half as many as
the transformers module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from space_kernels.attention.attention import QKV, AttentionSpec
from space_kernels.attention.torch_backend import space_attention
from space_kernels.build.cpu_library import cpu_library
from space_kernels.dispatch import Ops
from space_kernels.layers.layers import silu
from space_kernels.linear.cpu_linear import torch_linear
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.linear.int8_linear import Int8Linear
from space_kernels.linear.packed_linear import ROW_TILE, PackedLinear, can_pack
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from space_model.adapters import GatedLora
from space_model.geometry.forward_batch import ForwardBatch, GatedRows, LoraRows
from space_model.lora import Lora
from space_model.model_facts import ModelFacts, Ranks
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_cuda_network import LlamaCudaNetwork
from space_model.networks.llama_parts import (
    FAMILIES,
    LayerDeltas,
    LlamaLayer,
    LlamaParts,
    LlamaSource,
    Pack,
    Take,
    add_deltas,
    add_lora_deltas,
    layer_fields,
    packed,
)
from space_model.networks.network import Network, PagedKV, Taps

Linear = PackedLinear | Int8Linear


@dataclass(frozen=True)
class Layer(LlamaLayer[Linear, GatedDelta]):
    """One decoder layer."""

    gate: Linear
    up: Linear
    gates_mlp: bool  # some adapter changes gate or up: gated rows run the MLP unfused
    attention: AttentionSpec


class LlamaNetwork(LlamaParts):
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm."""

    def __init__(self, source: LlamaSource) -> None:
        super().__init__(source)
        pack: Pack[Linear] = torch_linear(source.weights)
        self._heads = (source.num_heads, source.kv_heads, source.head_dim)
        self._rotary = source.base.rotary_emb
        take = partial(packed, pack)
        self._layers = [self._take_apart(source, take, *layer) for layer in source.layers()]
        self._loras: list[dict[int, LayerDeltas[GatedDelta]]] = [{} for _ in self._layers]  # by layer and LoRA

    def _take_apart(
        self, source: LlamaSource, take: Take[Linear], layer: nn.Module, path: str, window: int | None
    ) -> Layer:
        fields = layer_fields(source, layer, path, window, take)
        mlp = layer.get_submodule("mlp")
        return Layer(
            **fields,
            gate=take(mlp, ["gate_proj"]),
            up=take(mlp, ["up_proj"]),
            gates_mlp=any(deltas.gate_up is not None for deltas in fields["deltas"]),
            attention=AttentionSpec(self._scale, window),
        )

    @staticmethod
    def fits(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
        """Return whether this network supports the config."""
        return config.model_type in FAMILIES and config.hidden_act == "silu" and can_pack(dtype)

    def forward(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None = None) -> Tensor:
        """[R, hidden] after the final norm. `taps`: filled with the inputs of its layers."""
        x = self._enter_gated(batch)
        angles = self._angles(x, batch)
        for number in range(len(self._layers)):
            if taps is not None:
                taps.take(number, x)
            x = self._layer(number, x, angles, batch, kv)
        if taps is not None:
            taps.take(len(self._layers), x)
        return self._norm(x)

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone."""
        return self._layer(number, hidden, self._angles(hidden, batch), batch, kv)

    def add_lora(self, number: int, lora: Lora) -> None:
        """Let a LoRA act on the rows that name it by `number`."""
        for layer, loras in zip(self._layers, self._loras, strict=True):
            loras[number] = layer.deltas_for(lora)

    def remove_lora(self, number: int) -> None:
        """Drop a LoRA."""
        for loras in self._loras:
            loras.pop(number, None)

    def _angles(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rows' rotary angles, [R, 1, head dim] each."""
        cos, sin = self._rotary(x, batch.positions[None])
        shape = len(batch.ids), 1, self._heads[2]
        return cos.view(shape), sin.view(shape)

    def _layer(self, number: int, x: Tensor, angles: tuple[Tensor, Tensor], batch: ForwardBatch, kv: PagedKV) -> Tensor:
        num_heads, kv_heads, head_dim = self._heads
        turned, num_rows = num_heads + kv_heads, len(batch.ids)
        layer, gated = self._layers[number], batch.gated
        y = layer.attention_norm(x)
        fused = layer.query_key_value(y)
        if gated:
            add_deltas(fused, y, gated, layer.deltas_of("query_key_value"))
        loras = batch.loras
        if loras:
            add_lora_deltas(fused, y, loras, {n: d.query_key_value for n, d in self._loras[number].items()})
        fused = fused.view(num_rows, turned + kv_heads, head_dim)
        query_key, value = fused[:, :turned], fused[:, turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            normed = layer.query_norm(query_key[:, :num_heads]), layer.key_norm(query_key[:, num_heads:])
            query_key = torch.cat(normed, dim=1)
        query_key = _rotate(query_key, *angles)
        qkv = QKV(query_key[:, :num_heads], query_key[:, num_heads:], value)
        attended = space_attention(qkv, kv.layer(number), batch.rows, layer.attention)
        x = self._summed(layer.output, attended.view(num_rows, num_heads * head_dim), x, batch, number, "output")
        y = layer.mlp_norm(x)
        inner = _gated_inner(layer, y, gated) if layer.gates_mlp and gated else layer.up.times(y, layer.gate.silu(y))
        for run in loras:
            inner[run.slice] = self._lora_inner(number, y, run, gated)
        return self._summed(layer.down, inner, x, batch, number, "down")

    def _lora_inner(self, number: int, y: Tensor, run: LoraRows, gated: Sequence[GatedRows]) -> Tensor:
        """Return silu(gate)·up of a LoRA's rows [rows, inner], with its delta and those of adapters on mask rows."""
        layer, here = self._layers[number], run.slice
        x = y[here]
        gate, up = layer.gate(x), layer.up(x)
        width = gate.shape[1]
        deltas = [(self._loras[number][run.lora].gate_up, here)]
        for other in gated:
            common = slice(max(here.start, other.slice.start), min(here.stop, other.slice.stop))
            if common.start < common.stop:
                deltas.append((layer.deltas[other.adapter].gate_up, common))
        for delta, rows in deltas:
            if delta is not None:
                both, part = delta(y[rows]), slice(rows.start - here.start, rows.stop - here.start)
                gate[part] += both[:, :width]
                up[part] += both[:, width:]
        return silu(gate).mul_(up)

    def _summed(
        self, linear: Linear, x: Tensor, residual: Tensor, batch: ForwardBatch, number: int, name: str
    ) -> Tensor:
        """Return the residual plus the matmul, the deltas of linear `name` of layer `number`, and the other ranks'
        parts."""
        out = linear.plus(x, residual) if self._ranks is None else linear(x)
        if batch.gated:
            add_deltas(out, x, batch.gated, self._layers[number].deltas_of(name))
        if batch.loras:
            add_lora_deltas(out, x, batch.loras, {n: getattr(d, name) for n, d in self._loras[number].items()})
        return out if self._ranks is None else self._ranks.sum(out).add_(residual)


# fused MLP                                             gate and up apart, so that deltas come before the activation
# [0 ........................... first gated row)       [first gated row ........................ R)
#  each part is padded to whole tiles with rows of the other
def _gated_inner(layer: Layer, y: Tensor, gated: Sequence[GatedRows]) -> Tensor:
    """silu(gate)·up [R, inner]: rows before the first gated one have the same bits as in a step without gated rows."""
    first = gated[0].slice.start
    begin = first - first % ROW_TILE
    ahead, behind = y[: first + -first % ROW_TILE], y[begin:]
    inner = layer.up.times(ahead, layer.gate.silu(ahead))
    gate, up = layer.gate(behind), layer.up(behind)
    width = gate.shape[1]
    for run in gated:
        if (delta := layer.deltas[run.adapter].gate_up) is not None:
            both = delta(y[run.slice])  # [rows, 2·inner]
            here = slice(run.slice.start - begin, run.slice.stop - begin)
            gate[here] += both[:, :width]
            up[here] += both[:, width:]
    return torch.cat([inner[:first], silu(gate).mul_(up)[first - begin :]])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (i, i + D/2) of x [R, N, D] by its angle; cos, sin [R, 1, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([x[..., half:].neg(), x[..., :half]], dim=-1)
    return (x * cos).add_(turned.mul_(sin))


def compact_network(
    base: PreTrainedModel,
    facts: ModelFacts,
    ops: Ops,
    adapters: Sequence[GatedLora],
    prefix: str,
    ranks: Ranks | None = None,
) -> Network | None:
    """Take `base` apart and return its compact network; None, with `base` unchanged, if there is none."""
    if facts.rope_switch is not None:
        return None  # it has one set of angles for all rows
    sizes = facts.num_heads, facts.kv_heads, facts.head_dim
    source = LlamaSource(base, *sizes, adapters, prefix, ranks, facts.weights)
    if facts.device.type == "cpu":
        library = cpu_library() if ops.attention == "compiled" else None
        if library is not None and CompiledLlama.fits(base, facts.dtype, facts.head_dim):
            return CompiledLlama(source, library)
        if not LlamaNetwork.fits(base.config, facts.dtype):
            return None
        return LlamaNetwork(source)
    if not LlamaCudaNetwork.fits(base):
        return None
    return LlamaCudaNetwork(source, ops)
