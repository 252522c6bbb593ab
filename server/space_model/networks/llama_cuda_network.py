"""The compact network of the Llama family on a GPU: the operations between two matmuls of a layer are one kernel.

    qkv matmul | rotary, head norms, store | attention | output matmul | add, norm | gate-up matmul | silu·up | down
    matmul | add, norm of the next layer

Nothing synchronises with the host, and all sizes come from the batch: a CUDA graph can capture a forward pass. Like
LlamaNetwork it takes a loaded transformers model apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from space_kernels.dispatch import Attention, Ops
from space_kernels.layers.rotary import HeadNorm, angles
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.paging.step_tables import StepTables
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from space_model.adapters.gated_lora import GatedLora
from space_model.checkpoint.joined_rows import one_below_the_other
from space_model.geometry.forward_batch import ForwardBatch, GatedRows
from space_model.networks.llama_network import FAMILIES, LayerDeltas, Norm, layer_deltas
from space_model.networks.paged_kv import PagedKV
from space_model.networks.tensor_parallel import Ranks


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer."""

    attention_norm: Norm
    query_key_value: nn.Module  # [(H + 2G)·D, hidden]
    head_norm: HeadNorm | None  # Qwen3
    output: nn.Module
    window: int | None
    mlp_norm: Norm
    gate_up: nn.Module  # [2·inner, hidden], gate first
    down: nn.Module
    deltas: tuple[LayerDeltas, ...]  # by adapter


@dataclass(frozen=True)
class _Shared:
    """Values that all layers of a step share."""

    cos: Tensor
    sin: Tensor
    attend: Attention
    slots: Tensor


class LlamaCudaNetwork:
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm."""

    def __init__(
        self,
        base: PreTrainedModel,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        ops: Ops,
        adapters: Sequence[GatedLora] = (),
        prefix: str = "model",
        ranks: Ranks | None = None,
    ) -> None:
        """Take `base` apart: the weights of its linears are concatenated, then freed.

        `prefix`: its path in the whole model; `ranks`: the other ranks with parts of the same layers; None: none.
        """
        self._ops, self._ranks = ops, ranks
        self._heads = (num_heads, kv_heads, head_dim)
        self._embedding: Tensor = base.get_input_embeddings().weight.detach()
        self._frequencies: Tensor = base.rotary_emb.inv_freq.float()
        self._rotary_scaling = float(base.rotary_emb.attention_scaling)
        self._norm = Norm.of(base.norm)
        everywhere = base.config.sliding_window if base.config.model_type == "mistral" else None
        self._layers = [
            _take_apart(layer, ops, everywhere, adapters, f"{prefix}.layers.{number}")
            for number, layer in enumerate(base.layers)
        ]
        self._mask_embeddings = [adapter.mask_embeddings for adapter in adapters]
        self._scale = head_dim**-0.5

    @staticmethod
    def fits(base: PreTrainedModel) -> bool:
        """Return whether this network computes the same as `base`: a known family, with plain or our 8-bit weights."""
        if base.config.model_type not in FAMILIES or base.config.hidden_act != "silu":
            return False
        kinds = {type(linear) for path, linear in base.named_modules() if path.endswith("_proj")}
        return kinds in ({nn.Linear}, {Fp8Linear})

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return F.embedding(ids, self._embedding)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm."""
        residual = self.enter(batch)
        for run in batch.gated:
            residual[run.slice] = F.embedding(run.masks, self._mask_embeddings[run.adapter])
        y = self._first_norm(0, residual)
        shared = self._shared(batch)
        for number in range(len(self._layers)):
            y, residual = self._layer(number, y, residual, shared, batch, kv)
        return y

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        return F.embedding(batch.ids, self._embedding)

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
        cos, sin = angles(batch.positions, self._frequencies, self._rotary_scaling)
        if self._ops.attend is None:
            return _Shared(cos, sin, self._ops.space_attention, batch.ids[:0])
        return _Shared(cos, sin, self._ops.attend, StepTables.of(batch.rows).slots())

    def _layer(
        self, number: int, y: Tensor, residual: Tensor, shared: _Shared, batch: ForwardBatch, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        """Return the sum normed for the next layer (or by the final norm), and the sum. y: the normed residual."""
        num_heads, kv_heads, head_dim = self._heads
        ops, gated, layer = self._ops, batch.gated, self._layers[number]
        after = self._norm if number + 1 == len(self._layers) else self._layers[number + 1].attention_norm
        keys, values = kv.keys[number], kv.values[number]
        fused = layer.query_key_value(y)  # [R, (H + 2G)·D]
        _add(fused, y, gated, [deltas.query_key_value for deltas in layer.deltas])
        query, key, value = ops.rotary_store(
            fused, shared.cos, shared.sin, keys, values, shared.slots, num_heads=num_heads, kv_heads=kv_heads,
            norm=layer.head_norm,
        )  # fmt: skip
        attended = shared.attend(
            query, key, value, keys, values, batch.rows, scale=self._scale, window=layer.window
        ).view(len(y), num_heads * head_dim)
        out = self._whole(layer.output(attended), attended, gated, [deltas.output for deltas in layer.deltas])
        y, residual = ops.add_rms_norm(out, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
        both = layer.gate_up(y)  # [R, 2·inner]
        _add(both, y, gated, [deltas.gate_up for deltas in layer.deltas])
        inner = ops.swiglu(both)
        out = self._whole(layer.down(inner), inner, gated, [deltas.down for deltas in layer.deltas])
        return ops.add_rms_norm(out, residual, after.weight, after.eps)

    def _whole(self, out: Tensor, x: Tensor, gated: Sequence[GatedRows], deltas: Sequence[GatedDelta | None]) -> Tensor:
        """Return out [R, hidden] plus the adapters' deltas, summed over the ranks."""
        _add(out, x, gated, deltas)
        return out if self._ranks is None else self._ranks.sum(out)


def _add(y: Tensor, x: Tensor, gated: Sequence[GatedRows], deltas: Sequence[GatedDelta | None]) -> None:
    """Add each adapter's delta to its rows of y = f(x), in place. `deltas`: by adapter."""
    for run in gated:
        delta = deltas[run.adapter]
        if delta is not None:
            delta.add_to(y, x, run.slice)


def _take_apart(layer: nn.Module, ops: Ops, window: int | None, adapters: Sequence[GatedLora], path: str) -> FusedLayer:
    """Concatenate a transformers decoder layer's weights and free the originals. `window`: if it has none."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    sizes = [int(getattr(attention, f"{name}_proj").out_features) for name in "qkv"]
    hidden, inner = int(mlp.down_proj.out_features), int(mlp.down_proj.in_features)  # type: ignore[arg-type,union-attr]
    head_norm = None
    if hasattr(attention, "q_norm"):
        query, key = Norm.of(attention.get_submodule("q_norm")), Norm.of(attention.get_submodule("k_norm"))
        head_norm = HeadNorm(query.weight, key.weight, query.eps)
    return FusedLayer(
        attention_norm=Norm.of(layer.get_submodule("input_layernorm")),
        query_key_value=_joined(attention, ["q_proj", "k_proj", "v_proj"], ops),
        head_norm=head_norm,
        output=_joined(attention, ["o_proj"], ops),
        window=getattr(attention, "sliding_window", window),
        mlp_norm=Norm.of(layer.get_submodule("post_attention_layernorm")),
        gate_up=_joined(mlp, ["gate_proj", "up_proj"], ops),
        down=_joined(mlp, ["down_proj"], ops),
        deltas=tuple(layer_deltas(adapter, path, sizes, hidden, inner) for adapter in adapters),
    )


def _joined(parent: nn.Module, names: Sequence[str], ops: Ops) -> nn.Module:
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
