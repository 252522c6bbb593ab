"""The compact network of the Llama family on a CPU: fused projections, and as few calls per layer as possible.

For models of a few million weights the calls cost more than the arithmetic; this network makes about half as many as
the transformers module. It takes a loaded transformers model apart, so it needs no weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from space_kernels.attention.torch_backend import space_attention
from space_kernels.layers.activation import silu
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.linear.int8_linear import Int8Linear
from space_kernels.linear.packed_linear import ROW_TILE, PackedLinear, can_pack
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from space_model.adapters.gated_lora import GatedLora
from space_model.geometry.forward_batch import ForwardBatch, GatedRows
from space_model.mapped_files import let_go
from space_model.networks.paged_kv import PagedKV
from space_model.networks.tensor_parallel import Ranks

Linear = PackedLinear | Int8Linear
Pack = Callable[[Tensor, Tensor | None], Linear]
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        """Convert a transformers norm."""
        return cls(module.get_parameter("weight").detach(), float(module.variance_epsilon))  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class LayerDeltas:
    """One adapter's deltas in one layer; None: no delta."""

    query_key_value: GatedDelta | None
    output: GatedDelta | None
    gate_up: GatedDelta | None
    down: GatedDelta | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention_norm: Norm
    query_key_value: Linear  # [(H + 2G)·D, hidden]
    query_norm: Norm | None  # over the head dimension (Qwen3)
    key_norm: Norm | None
    output: Linear
    window: int | None
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    deltas: tuple[LayerDeltas, ...]  # by adapter
    gates_mlp: bool  # some adapter changes gate or up: gated rows run the MLP unfused


class LlamaNetwork:
    """Llama, Mistral, Qwen2 or Qwen3 from ids to the final norm."""

    def __init__(
        self,
        base: PreTrainedModel,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
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
        pack: Pack = Int8Linear if eight_bits else PackedLinear
        self._ranks = ranks
        self._heads = (num_heads, kv_heads, head_dim)
        self._embedding: Tensor = base.get_input_embeddings().weight.detach()
        self._rotary = base.rotary_emb
        self._norm = Norm.of(base.norm)
        everywhere = base.config.sliding_window if base.config.model_type == "mistral" else None
        self._layers = [
            _take_apart(pack, layer, everywhere, adapters, f"{prefix}.layers.{number}")
            for number, layer in enumerate(base.layers)
        ]
        self._mask_embeddings = [adapter.mask_embeddings for adapter in adapters]
        self._scale = head_dim**-0.5

    @staticmethod
    def fits(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
        """Return whether this network supports the config."""
        return config.model_type in FAMILIES and config.hidden_act == "silu" and can_pack(dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return F.embedding(ids, self._embedding)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm."""
        x = self.enter(batch)
        for run in batch.gated:
            x[run.slice] = self._mask_embeddings[run.adapter][run.masks]
        angles = self._angles(x, batch)
        for number in range(len(self._layers)):
            x = self._layer(number, x, angles, batch, kv)
        return self._norm(x)

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        return F.embedding(batch.ids, self._embedding)

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone."""
        return self._layer(number, hidden, self._angles(hidden, batch), batch, kv)

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        return self._norm(hidden)

    def _angles(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rows' rotary angles, [R, 1, head dim] each."""
        cos, sin = self._rotary(x, batch.positions[None])
        shape = len(batch.ids), 1, self._heads[2]
        return cos.view(shape), sin.view(shape)

    def _layer(self, number: int, x: Tensor, angles: tuple[Tensor, Tensor], batch: ForwardBatch, kv: PagedKV) -> Tensor:
        num_heads, kv_heads, head_dim = self._heads
        turned, num_rows = num_heads + kv_heads, len(batch.ids)
        layer, gated, ranks = self._layers[number], batch.gated, self._ranks
        y = layer.attention_norm(x)
        fused = layer.query_key_value(y)
        for run in gated:
            if (delta := layer.deltas[run.adapter].query_key_value) is not None:
                delta.add_to(fused, y, run.slice)
        fused = fused.view(num_rows, turned + kv_heads, head_dim)
        query_key, value = fused[:, :turned], fused[:, turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            normed = layer.query_norm(query_key[:, :num_heads]), layer.key_norm(query_key[:, num_heads:])
            query_key = torch.cat(normed, dim=1)
        query_key = _rotate(query_key, *angles)
        attended = space_attention(
            query_key[:, :num_heads],
            query_key[:, num_heads:],
            value,
            kv.keys[number],
            kv.values[number],
            batch.rows,
            scale=self._scale,
            window=layer.window,
        )
        joined = attended.view(num_rows, num_heads * head_dim)
        summed = layer.output.plus(joined, x) if ranks is None else layer.output(joined)
        for run in gated:
            if (delta := layer.deltas[run.adapter].output) is not None:
                delta.add_to(summed, joined, run.slice)
        x = summed if ranks is None else ranks.sum(summed).add_(x)
        y = layer.mlp_norm(x)
        inner = _gated_inner(layer, y, gated) if layer.gates_mlp and gated else layer.up.times(y, layer.gate.silu(y))
        summed = layer.down.plus(inner, x) if ranks is None else layer.down(inner)
        for run in gated:
            if (delta := layer.deltas[run.adapter].down) is not None:
                delta.add_to(summed, inner, run.slice)
        return summed if ranks is None else ranks.sum(summed).add_(x)


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


def _take_apart(pack: Pack, layer: nn.Module, window: int | None, adapters: Sequence[GatedLora], path: str) -> Layer:
    """Pack a transformers decoder layer's weights and free the originals. `window`: if the layer has none."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    projections = [attention.get_submodule(f"{name}_proj") for name in ("q", "k", "v")]
    weights = torch.cat([projection.get_parameter("weight") for projection in projections])
    biases = [projection.bias for projection in projections]
    bias = None if biases[0] is None else torch.cat([b for b in biases if isinstance(b, Tensor)])
    query_key_value = pack(weights, bias)
    for name, projection in zip(("q", "k", "v"), projections, strict=True):
        delattr(attention, f"{name}_proj")
        let_go(projection.get_parameter("weight"))
    window = getattr(attention, "sliding_window", window)
    sizes = [projection.get_parameter("weight").shape[0] for projection in projections]
    hidden, inner = mlp.get_submodule("down_proj").get_parameter("weight").shape
    deltas = tuple(layer_deltas(adapter, path, sizes, hidden, inner) for adapter in adapters)
    return Layer(
        attention_norm=Norm.of(layer.get_submodule("input_layernorm")),
        query_key_value=query_key_value,
        query_norm=Norm.of(attention.get_submodule("q_norm")) if hasattr(attention, "q_norm") else None,
        key_norm=Norm.of(attention.get_submodule("k_norm")) if hasattr(attention, "k_norm") else None,
        output=_packed(pack, attention, "o_proj"),
        window=window,
        mlp_norm=Norm.of(layer.get_submodule("post_attention_layernorm")),
        gate=_packed(pack, mlp, "gate_proj"),
        up=_packed(pack, mlp, "up_proj"),
        down=_packed(pack, mlp, "down_proj"),
        deltas=deltas,
        gates_mlp=any(of_one.gate_up is not None for of_one in deltas),
    )


def layer_deltas(
    adapter: GatedLora, path: str, sizes: Sequence[int], hidden: int, inner: int, *, turns: bool = False
) -> LayerDeltas:
    """Return one adapter's deltas in the layer at `path`. `sizes`: output sizes of query, key and value.

    `turns`: outputs of gate and up are interleaved.
    """

    def delta(names: Sequence[str], outs: Sequence[int], *, turns: bool = False) -> GatedDelta | None:
        pairs = [adapter.pairs.get(f"{path}.{name}_proj") for name in names]
        return None if not any(pairs) else GatedDelta(pairs, outs, adapter.scale, turns=turns)

    return LayerDeltas(
        query_key_value=delta(["self_attn.q", "self_attn.k", "self_attn.v"], sizes),
        output=delta(["self_attn.o"], [hidden]),
        gate_up=delta(["mlp.gate", "mlp.up"], [inner, inner], turns=turns),
        down=delta(["mlp.down"], [hidden]),
    )


def _packed(pack: Pack, parent: nn.Module, name: str) -> Linear:
    """Pack the linear `name` of `parent` and free the original."""
    linear = parent.get_submodule(name)
    bias = linear.bias
    packed = pack(linear.get_parameter("weight"), bias if isinstance(bias, Tensor) else None)
    delattr(parent, name)
    let_go(linear.get_parameter("weight"))
    return packed
