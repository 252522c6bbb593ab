"""The Llama family on a CPU by compiled operations: a step is one call, whatever the number of layers.

Tensor-parallel steps run layer by layer through the same operations; sums over ranks are rounded on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import Array, byref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from space_kernels.attention.cpu_backend import CpuRows, attends
from space_kernels.build.cpu_library import (
    AttentionStruct,
    BuffersStruct,
    CpuLibrary,
    DeltaStruct,
    GatedRunStruct,
    HeadsStruct,
    LayerDeltasStruct,
    LayerStruct,
    NetworkStruct,
)
from space_kernels.layers.layers import RotaryTable
from space_kernels.linear.cpu_linear import LANES, LOW_PADDING, CompiledDelta, CompiledLinear, DeltaRows, in_turn
from space_kernels.linear.row_table import RowTable
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.geometry.forward_batch import BatchPattern, ForwardBatch, GatedRows
from space_model.lora import Lora
from space_model.networks.llama_parts import (
    FAMILIES,
    LayerDeltas,
    LlamaLayer,
    LlamaParts,
    LlamaSource,
    Norm,
    Pack,
    layer_fields,
    packed,
)
from space_model.networks.network import PagedKV, Taps
from space_model.stored_weights import alternate


@dataclass(frozen=True)
class CompiledLayer(LlamaLayer[CompiledLinear, CompiledDelta]):
    """One decoder layer; the deltas of gate and up are interleaved."""

    gate_up: CompiledLinear  # interleaved

    def struct(self, keys: Tensor, values: Tensor) -> LayerStruct:
        """Return the C struct of this layer with its KV cache."""
        return LayerStruct(
            self.attention_norm.weight.data_ptr(),
            self.query_key_value.struct,
            _address(self.query_norm),
            _address(self.key_norm),
            self.output.struct,
            self.mlp_norm.weight.data_ptr(),
            self.gate_up.struct,
            self.down.struct,
            keys.data_ptr(),
            values.data_ptr(),
            self.window or 0,
        )

    def deltas_struct(self, adapter: int) -> LayerDeltasStruct:
        """Return the C struct of an adapter's deltas in this layer."""
        return _struct_of(self.deltas[adapter])

    def gated(self, name: str, batch: ForwardBatch) -> list[DeltaRows]:
        """Return the deltas of one of the linears, each with its rows."""
        deltas = self.deltas_of(name)
        return [(delta, run.slice) for run in batch.gated if (delta := deltas[run.adapter]) is not None]


def _struct_of(deltas: LayerDeltas[CompiledDelta]) -> LayerDeltasStruct:
    found = (getattr(deltas, name) for name, _ in LayerDeltasStruct._fields_)
    return LayerDeltasStruct(*(DeltaStruct() if delta is None else delta.struct for delta in found))


@dataclass(frozen=True)
class CompiledLora:
    """One LoRA's deltas in all layers."""

    layers: list[LayerDeltas[CompiledDelta]]  # owns what `structs` points to
    structs: Array[LayerDeltasStruct]
    ranks: int  # most columns of an A·x

    @classmethod
    def of(cls, layers: list[LayerDeltas[CompiledDelta]]) -> CompiledLora:
        """Return these deltas with their C structs."""
        structs = (LayerDeltasStruct * len(layers))(*map(_struct_of, layers))
        return cls(layers, structs, _most_ranks(structs))


def _most_ranks(structs: Iterable[LayerDeltasStruct]) -> int:
    """Return the most columns of an A·x in these layers."""
    linears = (one for each in structs for one in (each.query_key_value, each.output, each.gate_up, each.down))
    return max((one.a.outputs for one in linears), default=0)


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


class CompiledLlama(LlamaParts):
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm, in bfloat16."""

    def __init__(self, source: LlamaSource, library: CpuLibrary) -> None:
        super().__init__(source)
        self._library = library
        rotary = source.base.rotary_emb
        self._heads = HeadsStruct(source.num_heads, source.kv_heads, source.head_dim, source.head_dim)
        self._angles = RotaryTable(rotary.inv_freq.float(), float(rotary.attention_scaling))
        self._layers = [_take_apart(source, library, *layer) for layer in source.layers()]
        self._mask_embeddings = [masks.to(self._embedding.dtype).contiguous() for masks in self._mask_embeddings]
        self._deltas = [
            (LayerDeltasStruct * len(self._layers))(*(layer.deltas_struct(number) for layer in self._layers))
            for number in range(len(source.adapters))
        ]
        self._low_width = LOW_PADDING + max(map(_most_ranks, self._deltas), default=0)
        self._loras: dict[int, CompiledLora] = {}
        self._lora_width = LOW_PADDING  # of A·x of LoRAs, behind that of adapters
        self._whole: tuple[PagedKV, NetworkStruct] | None = None  # for the KV cache of the last step
        self._cosines: Tensor | None = None  # in that struct

    @property
    def whole_library(self) -> CpuLibrary | None:
        """The library that computes whole steps; None: ranks compute layer after layer."""
        return self._library if self._ranks is None else None

    def add_lora(self, number: int, lora: Lora) -> None:
        """Let a LoRA act on the rows that name it by `number`."""
        self._loras[number] = CompiledLora.of([layer.deltas_for(lora) for layer in self._layers])
        self._lora_width = LOW_PADDING + max(one.ranks for one in self._loras.values())

    def remove_lora(self, number: int) -> None:
        """Drop a LoRA."""
        self._loras.pop(number, None)

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

    def forward(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None = None) -> Tensor:
        """[R, hidden] after the final norm; padding rows are undefined. `taps`: filled with the inputs of its
        layers."""
        num_positions = max(batch.rows.positions.tolist(), default=0) + 1
        if self._ranks is not None:
            self._angles.reach(num_positions)
            return self._by_layers(batch, kv, taps)
        inputs = [self._adapters[run.adapter].inputs_of(run, batch.positions) for run in batch.gated]
        network = self.struct(kv, num_positions)
        return self._run(network, batch, gated=self._gated(batch, inputs), taps=taps)[1]

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        if self._ranks is not None:
            return super().enter(batch)
        return self._entered(self._struct_of_layers([], self._embedding, 1), batch)

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone."""
        self._angles.reach(max(batch.rows.positions.tolist(), default=0) + 1)
        if self._ranks is not None:
            return self._one_layer(number, hidden, batch, kv)
        struct = self._layers[number].struct(kv.keys[number], kv.values[number])
        network = self._struct_of_layers([struct], RowTable.of(hidden), kv.block_size)
        return self._entered(network, batch, torch.arange(len(hidden)))

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        return self._normed(self._norm, hidden)

    def _gated(self, batch: ForwardBatch, inputs: Sequence[Tensor]) -> Sequence[GatedRunStruct]:
        """`inputs`: by run, [rows] int64, which must outlive the structs."""
        return self._runs(batch.gated, inputs) + [
            GatedRunStruct(
                run.slice.start, run.slice.stop, self._loras[run.lora].structs, self._low_width, self._lora_width
            )
            for run in batch.loras
        ]

    def _runs(self, gated: Sequence[GatedRows], inputs: Sequence[Tensor]) -> list[GatedRunStruct]:
        """Return the C structs of adapters' mask rows. `inputs`: as for `_gated`."""
        return [
            GatedRunStruct(
                run.slice.start,
                run.slice.stop,
                self._deltas[run.adapter],
                0,
                self._low_width,
                rows.data_ptr(),
                self._mask_embeddings[run.adapter].data_ptr(),
                len(self._mask_embeddings[run.adapter]),
            )
            for run, rows in zip(gated, inputs, strict=True)
        ]

    def _entered(self, network: NetworkStruct, batch: ForwardBatch, ids: Tensor | None = None) -> Tensor:
        """Return [R, hidden] before the final norm."""
        room, normed = self._run(network, batch, ids)
        return room[: normed.numel()].view_as(normed)

    def _run(
        self,
        network: NetworkStruct,
        batch: ForwardBatch,
        ids: Tensor | None = None,
        gated: Sequence[GatedRunStruct] = (),
        taps: Taps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the buffers, which begin with [R, hidden] before the final norm, and [R, hidden] after it. `ids`: rows
        of the network's embedding; None: the batch's."""
        ids, num_rows = batch.ids if ids is None else ids, len(batch.ids)
        buffers, room, normed = self.buffers(network, ids.data_ptr(), num_rows)
        if gated:
            width = self._low_width + (self._lora_width if batch.loras else 0)
            low = normed.new_zeros(num_rows, width)
            buffers.low, buffers.low_stride = low.data_ptr(), width
            buffers.gated, buffers.num_gated = (GatedRunStruct * len(gated))(*gated), len(gated)
        if taps is not None:
            numbers = torch.tensor(taps.layers, dtype=torch.int64)
            buffers.tapped, buffers.num_tapped = numbers.data_ptr(), len(numbers)
            buffers.taps = taps.states.data_ptr()
        threads = torch.get_num_threads()
        if not self._library.forward(byref(network), byref(CpuRows.of(batch.rows).struct), byref(buffers), threads):
            raise unknown_id(network)
        return room, normed

    def buffers(self, network: NetworkStruct, ids: int, num_rows: int) -> tuple[BuffersStruct, Tensor, Tensor]:
        """Return the C struct of new buffers, and the two tensors that they are in: one that begins with [R, hidden]
        before the final norm, and [R, hidden] after it, zeros. `ids`: address of [R] int64."""
        hidden, joined = network.hidden, self._heads.query * self._heads.dim
        fused = joined + 2 * self._heads.kv * self._heads.dim
        normed = torch.zeros(num_rows, hidden, dtype=self._embedding.dtype)
        room = normed.new_empty(num_rows * (hidden + fused + joined + network.inner))
        x, row = room.data_ptr(), num_rows * room.itemsize
        struct = BuffersStruct(
            ids,
            x,
            normed.data_ptr(),
            x + row * hidden,
            x + row * (hidden + fused),
            x + row * (hidden + fused + joined),
        )
        return struct, room, normed

    def gate(self, buffers: BuffersStruct, pattern: BatchPattern, held: list[Any]) -> Tensor | None:
        """Let the adapters of `pattern` act on its mask rows in steps with `buffers`. Return the tensor that must be
        zeros before such a step; None: there are no such rows. `held` gets what the structs point to. Adapters whose
        mask inputs depend on positions are not supported."""
        if not pattern.gated:
            return None
        runs = self._runs(pattern.gated, [run.masks for run in pattern.gated])
        low = torch.zeros(pattern.rows.num_padded, self._low_width, dtype=self._embedding.dtype)
        buffers.low, buffers.low_stride = low.data_ptr(), self._low_width
        buffers.gated, buffers.num_gated = (GatedRunStruct * len(runs))(*runs), len(runs)
        held.extend((low, buffers.gated))
        return low

    def struct(self, kv: PagedKV, num_positions: int) -> NetworkStruct:
        """Return the C struct of the network with this KV cache, for rows at the positions 0 .. num_positions - 1. It
        is the same object for the same KV cache."""
        self._angles.reach(num_positions)
        if self._whole is None or self._whole[0] is not kv:
            structs = [layer.struct(*pages) for layer, *pages in zip(self._layers, kv.keys, kv.values, strict=True)]
            self._whole = kv, self._struct_of_layers(structs, self._embedding, kv.block_size)
        _, network = self._whole
        if self._cosines is not self._angles.cos:
            self._cosines = self._angles.cos
            network.cos, network.sin = self._angles.cos.data_ptr(), self._angles.sin.data_ptr()
        return network

    def _struct_of_layers(self, structs: Sequence[LayerStruct], embedding: RowTable, block_size: int) -> NetworkStruct:
        """Return the C struct of these layers and this embedding [ids, hidden]."""
        inner = self._layers[0].gate_up.out_features // 2
        return NetworkStruct(
            len(structs),
            len(embedding),
            embedding.width,
            inner,
            self._heads,
            self._norm.eps,
            self._scale,
            block_size,
            (LayerStruct * len(structs))(*structs),
            embedding.struct(),
            self._norm.weight.data_ptr(),
            self._angles.cos.data_ptr(),
            self._angles.sin.data_ptr(),
        )

    def _by_layers(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None) -> Tensor:
        """Compute `forward` of cpu/network.cpp, plus sums over ranks."""
        x = self._enter_gated(batch)
        for number in range(len(self._layers)):
            if taps is not None:
                taps.take(number, x)
            x = self._one_layer(number, x, batch, kv)
        if taps is not None:
            taps.take(len(self._layers), x)
        return self._normed(self._norm, x)

    def _one_layer(self, number: int, x: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        layer, num_rows, ranks = self._layers[number], len(x), self._ranks
        assert ranks is not None
        y = self._normed(layer.attention_norm, x)
        fused = layer.query_key_value(y, layer.gated("query_key_value", batch))
        attended = self._attended(layer, fused, batch, kv.keys[number], kv.values[number])
        attended = attended.view(num_rows, self._heads.query * self._heads.dim)
        x = ranks.sum(layer.output(attended, layer.gated("output", batch))).add_(x)
        inner = layer.gate_up.swiglu(self._normed(layer.mlp_norm, x), layer.gated("gate_up", batch))
        return ranks.sum(layer.down(inner, layer.gated("down", batch))).add_(x)

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
            here,
            here + num_heads * size,
            here + (num_heads + kv_heads) * size,
            width,
            width,
            width,
            keys.data_ptr(),
            values.data_ptr(),
            keys.shape[2],
            out.data_ptr(),
            self._scale,
            0.0,
            layer.window or 0,
        )
        those, threads = byref(CpuRows.of(batch.rows).struct), torch.get_num_threads()
        eps = 0.0 if layer.query_norm is None else layer.query_norm.eps
        self._library.store(
            those,
            byref(self._heads),
            byref(attention),
            _address(layer.query_norm),
            _address(layer.key_norm),
            eps,
            self._angles.cos.data_ptr(),
            self._angles.sin.data_ptr(),
            threads,
        )
        self._library.attend(those, byref(self._heads), byref(attention), threads)
        return out


def unknown_id(network: NetworkStruct) -> IndexError:
    """Return the error of a step with an id that the network does not know."""
    return IndexError(f"An id of the step is none of the {network.num_ids} that have embeddings, or a mask.")


def _take_apart(
    source: LlamaSource, library: CpuLibrary, layer: nn.Module, path: str, window: int | None
) -> CompiledLayer:
    pack: Pack[CompiledLinear] = partial(CompiledLinear, library, weights=source.weights)
    delta: Callable[..., CompiledDelta] = partial(CompiledDelta, library, weights=source.weights)
    lora_delta: Callable[..., CompiledDelta] = partial(CompiledDelta, library)
    take = partial(packed, pack)
    fields = layer_fields(source, layer, path, window, take, delta=delta, lora_delta=lora_delta, compiled=True)
    mlp = layer.get_submodule("mlp")
    gate_up = packed(pack, mlp, ["gate_proj", "up_proj"], lambda parts: in_turn(*parts), alternate)
    return CompiledLayer(**fields, gate_up=gate_up)
