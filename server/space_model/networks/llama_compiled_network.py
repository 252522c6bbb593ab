"""The Llama family on a CPU by compiled operations: a step is one call, whatever the number of layers.

Steps with adapter rows, and tensor-parallel steps, run layer by layer through the same operations, so chain rows have
the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import partial

import torch
from space_kernels.attention.cpu_backend import CpuRows, attends
from space_kernels.build.cpu_library import (
    AttentionStruct,
    BuffersStruct,
    CpuLibrary,
    HeadsStruct,
    LayerStruct,
    NetworkStruct,
)
from space_kernels.layers.rotary import RotaryTable
from space_kernels.linear.cpu_linear import LANES, CompiledLinear, in_turn
from space_kernels.linear.gated_delta import GatedDelta
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.geometry.forward_batch import ForwardBatch, GatedRows
from space_model.networks.llama_parts import (
    FAMILIES,
    LlamaLayer,
    LlamaParts,
    LlamaSource,
    Norm,
    Pack,
    add_deltas,
    layer_fields,
    packed,
)
from space_model.networks.network import PagedKV


@dataclass(frozen=True)
class CompiledLayer(LlamaLayer[CompiledLinear]):
    """One decoder layer; the deltas of gate and up are interleaved."""

    gate_up: CompiledLinear  # interleaved

    def struct(self, keys: Tensor, values: Tensor) -> LayerStruct:
        """Return the C struct of this layer with its KV cache."""
        return LayerStruct(
            self.attention_norm.weight.data_ptr(), self.query_key_value.struct, _address(self.query_norm),
            _address(self.key_norm), self.output.struct, self.mlp_norm.weight.data_ptr(), self.gate_up.struct,
            self.down.struct, keys.data_ptr(), values.data_ptr(), self.window or 0,
        )  # fmt: skip


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


class CompiledLlama(LlamaParts):
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm, in bfloat16."""

    def __init__(self, source: LlamaSource, library: CpuLibrary) -> None:
        super().__init__(source)
        self._library = library
        rotary = source.base.rotary_emb
        self._heads = HeadsStruct(source.num_heads, source.kv_heads, source.head_dim)
        self._embedding = self._embedding.contiguous()
        self._angles = RotaryTable(rotary.inv_freq.float(), float(rotary.attention_scaling))
        pack: Pack[CompiledLinear] = partial(CompiledLinear, library, int8=source.int8)
        self._layers = [_take_apart(source, pack, *layer) for layer in source.layers()]
        self._whole: tuple[PagedKV, NetworkStruct] | None = None  # for the KV cache of the last step

    @staticmethod
    def fits(base: PreTrainedModel, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether this network computes the same as `base`."""
        known = base.config.model_type in FAMILIES and base.config.hidden_act == "silu"
        even = base.config.hidden_size % 2 == 0
        plain = all(type(linear) is nn.Linear for path, linear in base.named_modules() if path.endswith("_proj"))
        return (
            known
            and even
            and plain
            and attends(dtype, head_dim)
            and all(
                len(linear.weight) % LANES == 0 for path, linear in base.named_modules() if path.endswith("gate_proj")
            )
        )

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm; padding rows are undefined."""
        self._angles.reach(int(batch.rows.positions.max(initial=0)) + 1)
        if batch.gated or self._ranks is not None:
            return self._by_layers(batch, kv)
        return self._run(self._network(kv), batch)[1]

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        if self._ranks is not None:
            return super().enter(batch)
        return self._run(self._struct([], self._embedding, 1), batch)[0]

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone."""
        self._angles.reach(int(batch.rows.positions.max(initial=0)) + 1)
        if self._ranks is not None:
            return self._one_layer(number, hidden, batch, kv)
        struct = self._layers[number].struct(kv.keys[number], kv.values[number])
        return self._run(self._struct([struct], hidden, kv.block_size), batch, torch.arange(len(hidden)))[0]

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        return self._normed(self._norm, hidden)

    def _run(self, network: NetworkStruct, batch: ForwardBatch, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return [R, hidden] before and after the final norm. `ids`: rows of the network's embedding; None: the
        batch's.
        """
        ids, num_rows = batch.ids if ids is None else ids, len(batch.ids)
        hidden, joined = network.hidden, self._heads.query * self._heads.dim
        fused = joined + 2 * self._heads.kv * self._heads.dim
        normed = self._embedding.new_zeros(num_rows, hidden)
        room = normed.new_empty(num_rows * (hidden + fused + joined + network.inner))
        x, row = room.data_ptr(), num_rows * room.itemsize
        buffers = BuffersStruct(
            ids.data_ptr(), x, normed.data_ptr(), x + row * hidden, x + row * (hidden + fused),
            x + row * (hidden + fused + joined),
        )  # fmt: skip
        threads = torch.get_num_threads()
        if not self._library.forward(byref(network), byref(CpuRows.of(batch.rows).struct), byref(buffers), threads):
            raise IndexError(f"An id of the step is none of the {network.num_ids} that have embeddings.")
        return room[: num_rows * hidden].view(num_rows, hidden), normed

    def _network(self, kv: PagedKV) -> NetworkStruct:
        if self._whole is None or self._whole[0] is not kv:
            structs = [layer.struct(*pages) for layer, *pages in zip(self._layers, kv.keys, kv.values, strict=True)]
            self._whole = kv, self._struct(structs, self._embedding, kv.block_size)
        _, network = self._whole
        network.cos, network.sin = self._angles.cos.data_ptr(), self._angles.sin.data_ptr()
        return network

    def _struct(self, structs: Sequence[LayerStruct], embedding: Tensor, block_size: int) -> NetworkStruct:
        """Return the C struct of these layers and this embedding [ids, hidden]."""
        inner = self._layers[0].gate_up.out_features // 2
        return NetworkStruct(
            len(structs), *embedding.shape, inner, self._heads, self._norm.eps, self._scale, block_size,
            (LayerStruct * len(structs))(*structs), embedding.data_ptr(), self._norm.weight.data_ptr(),
            self._angles.cos.data_ptr(), self._angles.sin.data_ptr(),
        )  # fmt: skip

    def _by_layers(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Compute `forward` of cpu/network.cpp, plus adapter deltas and sums over ranks."""
        x = self._enter_gated(batch)
        for number in range(len(self._layers)):
            x = self._one_layer(number, x, batch, kv)
        return self._normed(self._norm, x)

    def _one_layer(self, number: int, x: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        layer, gated, num_rows = self._layers[number], batch.gated, len(x)
        first = gated[0].slice.start if gated else num_rows
        y = self._normed(layer.attention_norm, x)
        fused = layer.query_key_value(y)
        add_deltas(fused, y, gated, layer.deltas_of("query_key_value"))
        attended = self._attended(layer, fused, batch, kv.keys[number], kv.values[number])
        attended = attended.view(num_rows, self._heads.query * self._heads.dim)
        x = self._summed(layer.output, attended, x, gated, layer.deltas_of("output"))
        y = self._normed(layer.mlp_norm, x)
        inner = layer.gate_up.swiglu(y[:first])
        if gated:
            both = layer.gate_up(y[first:])
            for run in gated:
                if (delta := layer.deltas[run.adapter].gate_up) is not None:
                    both[run.slice.start - first : run.slice.stop - first] += delta(y[run.slice])
            inner = torch.cat([inner, _swiglu_in_turn(both)])
        return self._summed(layer.down, inner, x, gated, layer.deltas_of("down"))

    def _normed(self, norm: Norm, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        num_rows, width = x.shape
        self._library.norm(
            x.data_ptr(), norm.weight.data_ptr(), num_rows, width, norm.eps, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def _attended(
        self, layer: CompiledLayer, fused: Tensor, batch: ForwardBatch, keys: Tensor, values: Tensor
    ) -> Tensor:
        num_heads, kv_heads, head_dim = self._heads.query, self._heads.kv, self._heads.dim
        out = fused.new_zeros(len(fused), num_heads, head_dim)
        here, size, width = fused.data_ptr(), head_dim * fused.itemsize, fused.shape[1]
        attention = AttentionStruct(
            here, here + num_heads * size, here + (num_heads + kv_heads) * size, width, width, keys.data_ptr(),
            values.data_ptr(), keys.shape[2], out.data_ptr(), self._scale, 0.0, layer.window or 0,
        )  # fmt: skip
        those, threads = byref(CpuRows.of(batch.rows).struct), torch.get_num_threads()
        eps = 0.0 if layer.query_norm is None else layer.query_norm.eps
        self._library.store(
            those, byref(self._heads), byref(attention), _address(layer.query_norm), _address(layer.key_norm), eps,
            self._angles.cos.data_ptr(), self._angles.sin.data_ptr(), threads,
        )  # fmt: skip
        self._library.attend(those, byref(self._heads), byref(attention), threads)
        return out

    def _summed(
        self,
        linear: CompiledLinear,
        x: Tensor,
        residual: Tensor,
        gated: Sequence[GatedRows],
        deltas: Sequence[GatedDelta | None],
    ) -> Tensor:
        """Return the residual plus the matmul, the adapters' deltas, and the other ranks' parts."""
        out = linear.plus(x, residual) if self._ranks is None else linear(x)
        add_deltas(out, x, gated, deltas)
        return out if self._ranks is None else self._ranks.sum(out).add_(residual)


def _swiglu_in_turn(both: Tensor) -> Tensor:
    """silu(gate)·up of interleaved [R, 2·inner] -> [R, inner], in float32, rounded once."""
    gate, up = both.float().view(len(both), -1, 2, LANES).unbind(2)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(both.dtype).reshape(len(both), -1)


def _take_apart(
    source: LlamaSource, pack: Pack[CompiledLinear], layer: nn.Module, path: str, window: int | None
) -> CompiledLayer:
    fields = layer_fields(source, layer, path, window, partial(packed, pack), interleaved=True)
    gate_up = packed(pack, layer.get_submodule("mlp"), ["gate_proj", "up_proj"], lambda parts: in_turn(*parts))
    return CompiledLayer(**fields, gate_up=gate_up)
