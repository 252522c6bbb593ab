"""The Llama family on a CPU by compiled operations: a step is one call, whatever the number of layers.

Steps with adapter rows, and tensor-parallel steps, run layer by layer through the same operations, so chain rows have
the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import partial

import torch
from space_kernels.attention.cpu_backend import CpuRows, attends
from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.build.cpu_structs import AttentionStruct, BuffersStruct, HeadsStruct, LayerStruct, NetworkStruct
from space_kernels.layers.rotary_table import RotaryTable
from space_kernels.linear.cpu_linear import LANES, CompiledLinear, in_turn
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from space_model.adapters.gated_lora import GatedLora
from space_model.geometry.forward_batch import ForwardBatch, GatedRows
from space_model.mapped_files import let_go
from space_model.networks.llama_network import FAMILIES, LayerDeltas, Norm, layer_deltas
from space_model.networks.paged_kv import PagedKV
from space_model.networks.tensor_parallel import Ranks


@dataclass(frozen=True)
class CompiledLayer:
    """One decoder layer."""

    attention_norm: Norm
    query_key_value: CompiledLinear  # [(H + 2G)·D, hidden]
    query_norm: Norm | None  # over the head dimension (Qwen3)
    key_norm: Norm | None
    output: CompiledLinear
    window: int | None
    mlp_norm: Norm
    gate_up: CompiledLinear  # interleaved
    down: CompiledLinear
    deltas: tuple[LayerDeltas, ...]  # by adapter; those of gate and up are interleaved

    def struct(self, keys: Tensor, values: Tensor) -> LayerStruct:
        """Return the C struct of this layer with its KV cache."""
        return LayerStruct(
            self.attention_norm.weight.data_ptr(), self.query_key_value.struct, _address(self.query_norm),
            _address(self.key_norm), self.output.struct, self.mlp_norm.weight.data_ptr(), self.gate_up.struct,
            self.down.struct, keys.data_ptr(), values.data_ptr(), self.window or 0,
        )  # fmt: skip


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


class CompiledLlama:
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm, in bfloat16."""

    def __init__(
        self,
        base: PreTrainedModel,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        library: CpuLibrary,
        adapters: Sequence[GatedLora] = (),
        prefix: str = "model",
        ranks: Ranks | None = None,
        *,
        eight_bits: bool = False,
    ) -> None:
        """Take `base` apart: each of its linears is packed, then freed. `prefix`: its path in the whole model.

        `ranks`: the other ranks that hold parts of the same layers (heads, inner columns); None: no tensor parallelism.
        `eight_bits`: linears are int8 with scales.
        """
        self._library, self._ranks = library, ranks
        pack = partial(CompiledLinear, library, eight_bits=eight_bits)
        self._heads = HeadsStruct(num_heads, kv_heads, head_dim)
        self._embedding: Tensor = base.get_input_embeddings().weight.detach().contiguous()
        self._angles = RotaryTable(base.rotary_emb.inv_freq.float(), float(base.rotary_emb.attention_scaling))
        self._norm = Norm.of(base.norm)
        everywhere = base.config.sliding_window if base.config.model_type == "mistral" else None
        self._layers = [
            _take_apart(pack, layer, everywhere, adapters, f"{prefix}.layers.{number}")
            for number, layer in enumerate(base.layers)
        ]
        self._mask_embeddings = [adapter.mask_embeddings for adapter in adapters]
        self._scale = head_dim**-0.5
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

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return F.embedding(ids, self._embedding)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm; padding rows are undefined."""
        self._angles.reach(int(batch.rows.positions.max(initial=0)) + 1)
        if batch.gated or self._ranks is not None:
            return self._by_layers(batch, kv)
        return self._run(self._network(kv), batch)[1]

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        if self._ranks is not None:
            return F.embedding(batch.ids, self._embedding)
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
        x = F.embedding(batch.ids, self._embedding)  # [R, hidden]
        for run in batch.gated:
            x[run.slice] = self._mask_embeddings[run.adapter][run.masks]
        for number in range(len(self._layers)):
            x = self._one_layer(number, x, batch, kv)
        return self._normed(self._norm, x)

    def _one_layer(self, number: int, x: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        layer, gated, num_rows = self._layers[number], batch.gated, len(x)
        first = gated[0].slice.start if gated else num_rows
        y = self._normed(layer.attention_norm, x)
        fused = layer.query_key_value(y)
        _add(fused, y, gated, [deltas.query_key_value for deltas in layer.deltas])
        attended = self._attended(layer, fused, batch, kv.keys[number], kv.values[number])
        attended = attended.view(num_rows, self._heads.query * self._heads.dim)
        x = self._summed(layer.output, attended, x, gated, [deltas.output for deltas in layer.deltas])
        y = self._normed(layer.mlp_norm, x)
        inner = layer.gate_up.swiglu(y[:first])
        if gated:
            both = layer.gate_up(y[first:])
            for run in gated:
                if (delta := layer.deltas[run.adapter].gate_up) is not None:
                    both[run.slice.start - first : run.slice.stop - first] += delta(y[run.slice])
            inner = torch.cat([inner, _swiglu_in_turn(both)])
        return self._summed(layer.down, inner, x, gated, [deltas.down for deltas in layer.deltas])

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
        self, linear: CompiledLinear, x: Tensor, residual: Tensor, gated: Sequence[GatedRows], deltas: Sequence[object]
    ) -> Tensor:
        """Return the residual plus the matmul, the adapters' deltas, and the other ranks' parts."""
        if self._ranks is None:
            out = linear.plus(x, residual)
            _add(out, x, gated, deltas)
            return out
        out = linear(x)
        _add(out, x, gated, deltas)
        return self._ranks.sum(out).add_(residual)


def _add(y: Tensor, x: Tensor, gated: Sequence[GatedRows], deltas: Sequence[object]) -> None:
    for run in gated:
        if (delta := deltas[run.adapter]) is not None:
            delta.add_to(y, x, run.slice)  # type: ignore[attr-defined]


def _swiglu_in_turn(both: Tensor) -> Tensor:
    """silu(gate)·up of interleaved [R, 2·inner] -> [R, inner], in float32, rounded once."""
    gate, up = both.float().view(len(both), -1, 2, LANES).unbind(2)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(both.dtype).reshape(len(both), -1)


def _take_apart(
    pack: Callable[[Tensor, Tensor | None], CompiledLinear],
    layer: nn.Module,
    window: int | None,
    adapters: Sequence[GatedLora],
    path: str,
) -> CompiledLayer:
    """Pack a transformers decoder layer's weights and free the originals. `window`: if the layer has none."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    sizes = [attention.get_submodule(f"{name}_proj").get_parameter("weight").shape[0] for name in "qkv"]
    hidden, inner = mlp.get_submodule("down_proj").get_parameter("weight").shape
    norms = [
        Norm.of(attention.get_submodule(name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    ]
    return CompiledLayer(
        attention_norm=Norm.of(layer.get_submodule("input_layernorm")),
        query_key_value=_packed(pack, attention, ["q_proj", "k_proj", "v_proj"]),
        query_norm=norms[0],
        key_norm=norms[1],
        output=_packed(pack, attention, ["o_proj"]),
        window=getattr(attention, "sliding_window", window),
        mlp_norm=Norm.of(layer.get_submodule("post_attention_layernorm")),
        gate_up=_packed(pack, mlp, ["gate_proj", "up_proj"], turns=True),
        down=_packed(pack, mlp, ["down_proj"]),
        deltas=tuple(layer_deltas(adapter, path, sizes, hidden, inner, turns=True) for adapter in adapters),
    )


def _packed(
    pack: Callable[[Tensor, Tensor | None], CompiledLinear],
    parent: nn.Module,
    names: Sequence[str],
    *,
    turns: bool = False,
) -> CompiledLinear:
    """Pack the linears `names` of `parent`, concatenated or (two) interleaved, and free the originals."""
    linears = [parent.get_submodule(name) for name in names]
    weights = [linear.get_parameter("weight").detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if isinstance(linear.bias, Tensor)]
    join = in_turn if turns else lambda *parts: torch.cat(parts)
    bias = join(*(b[:, None] for b in biases))[:, 0] if biases else None
    packed = pack(join(*weights), bias)
    for name, weight in zip(names, weights, strict=True):
        delattr(parent, name)
        let_go(weight)
    return packed
