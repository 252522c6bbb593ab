"""What the compact networks of the Llama family share: taking a loaded transformers model apart, and its parts.

A compact network needs no weights of its own: each linear of the loaded model is packed, then freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.linear.group_weights import Parts
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from space_model.adapters import GatedLora
from space_model.checkpoint.stored_weight import StoredWeight
from space_model.checkpoint.weight_files import let_go
from space_model.geometry.forward_batch import ForwardBatch, GatedRows, LoraRows
from space_model.lora import Lora
from space_model.model_facts import Ranks
from space_model.stored_weights import below, numbers_of, release, stored_of, table_of

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}

Linear = TypeVar("Linear", bound=nn.Module)
Delta = TypeVar("Delta")
Pack = Callable[[Tensor | Parts, Tensor | None], Linear]
"""Returns a linear layer for a weight [out, in], as numbers or stored, and a bias [out]."""
Take = Callable[[nn.Module, Sequence[str]], Linear]
"""Returns the named linears of a module as one, and frees the originals."""


class LowRankPairs(Protocol):
    """A gated adapter or a LoRA."""

    @property
    def pairs(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the pairs by the path of their linear in the whole model: a [rank, in], b [out, rank]."""

    @property
    def scale(self) -> float:
        """Return the factor of B·A."""


@dataclass(frozen=True)
class LlamaSource:
    """A loaded transformers model, to be taken apart, and what its compact network needs besides."""

    base: PreTrainedModel
    num_heads: int
    kv_heads: int
    head_dim: int
    adapters: Sequence[GatedLora] = ()
    prefix: str = "model"  # path of `base` in the whole model
    ranks: Ranks | None = None  # that hold parts of the same layers (heads, inner columns); None: no tensor parallelism
    weights: str = "plain"  # int8 or int4: linears are quantised; gguf or packed: they may be stored

    def layers(self) -> list[tuple[nn.Module, str, int | None]]:
        """Return each decoder layer, its path in the whole model, and its sliding window."""
        config = self.base.config
        everywhere = config.sliding_window if config.model_type == "mistral" else None
        return [
            (layer, f"{self.prefix}.layers.{number}", getattr(layer.self_attn, "sliding_window", everywhere))
            for number, layer in enumerate(self.base.layers)
        ]


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
class LayerDeltas(Generic[Delta]):
    """One adapter's deltas in one layer; None: no delta."""

    query_key_value: Delta | None
    output: Delta | None
    gate_up: Delta | None
    down: Delta | None


@dataclass(frozen=True)
class LlamaLayer(Generic[Linear, Delta]):
    """One decoder layer without its first two feed-forward matrices, whose layout the networks choose."""

    attention_norm: Norm
    query_key_value: Linear  # [(H + 2G)·D, hidden]
    query_norm: Norm | None  # over the head dimension (Qwen3)
    key_norm: Norm | None
    output: Linear
    window: int | None
    mlp_norm: Norm
    down: Linear
    deltas: tuple[LayerDeltas[Delta], ...]  # by adapter
    deltas_for: Callable[[Lora], LayerDeltas[Delta]]  # makes those of a LoRA that is loaded later

    def deltas_of(self, name: str) -> list[Delta | None]:
        """Return the adapters' deltas of one of the linears."""
        return [getattr(deltas, name) for deltas in self.deltas]


def layer_fields(
    source: LlamaSource,
    layer: nn.Module,
    path: str,
    window: int | None,
    take: Take[Linear],
    *,
    delta: Callable[..., Any] = GatedDelta,
    lora_delta: Callable[..., Any] = GatedDelta,
    compiled: bool = False,
) -> dict[str, Any]:
    """Return the fields of a LlamaLayer. `delta`, `lora_delta`: the class of deltas of adapters, and of LoRAs;
    `compiled`: it is CompiledDelta, the outputs of gate and up alternate, and A·x of adapters takes the inputs in the
    order of the linears.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    sizes = [int(getattr(attention, f"{name}_proj").out_features) for name in "qkv"]
    hidden, inner = int(mlp.down_proj.out_features), int(mlp.down_proj.in_features)  # type: ignore[arg-type,union-attr]
    orders = {name: _input_order(layer, name) if compiled else None for name in _FIRST}
    head_norms = [
        Norm.of(attention.get_submodule(name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    ]
    fields = {
        "attention_norm": Norm.of(layer.get_submodule("input_layernorm")),
        "query_key_value": take(attention, ["q_proj", "k_proj", "v_proj"]),
        "query_norm": head_norms[0],
        "key_norm": head_norms[1],
        "output": take(attention, ["o_proj"]),
        "window": window,
        "mlp_norm": Norm.of(layer.get_submodule("post_attention_layernorm")),
        "down": take(mlp, ["down_proj"]),
        "deltas": tuple(
            _layer_deltas(adapter, path, sizes, hidden, inner, delta, orders, compiled=compiled)
            for adapter in source.adapters
        ),
        "deltas_for": partial(
            _layer_deltas,
            path=path,
            sizes=sizes,
            hidden=hidden,
            inner=inner,
            kind=lora_delta,
            orders=dict.fromkeys(_FIRST),
            compiled=compiled,
        ),
    }
    pairs = [pair for adapter in source.adapters for name, pair in adapter.pairs.items() if name.startswith(f"{path}.")]
    let_go(*chain.from_iterable(pairs))
    return fields


def packed(
    pack: Pack[Linear],
    parent: nn.Module,
    names: Sequence[str],
    join: Callable[[Sequence[Tensor]], Tensor] = torch.cat,  # type: ignore[assignment]
    join_stored: Callable[[Sequence[StoredWeight]], Parts] = below,
) -> Linear:
    """Pack the linears `names` of `parent` as one, their outputs joined by `join`, and free the originals. Either all
    of them are stored or none is."""
    linears = [parent.get_submodule(name) for name in names]
    stored = [weight for linear in linears if (weight := stored_of(linear)) is not None]
    biases = [linear.bias.detach() for linear in linears if isinstance(linear.bias, Tensor)]
    bias = None
    if biases:
        bias = biases[0] if len(names) == 1 else join([bias[:, None] for bias in biases])[:, 0]
    if stored:
        made = pack(join_stored(stored) if len(names) > 1 else stored[0], bias)
    else:
        weights = [numbers_of(linear) for linear in linears]
        made = pack(weights[0] if len(names) == 1 else join(weights), bias)
    release(*linears)
    for name in names:
        delattr(parent, name)
    return made


def _layer_deltas(
    adapter: LowRankPairs,
    path: str,
    sizes: Sequence[int],
    hidden: int,
    inner: int,
    kind: Callable[..., Delta],
    orders: Mapping[str, Tensor | None],
    *,
    compiled: bool,
) -> LayerDeltas[Delta]:
    """Return one adapter's deltas in the layer at `path`. `sizes`: output sizes of query, key and value; `orders`: of
    the inputs, by the first of the linears that have them."""

    def delta(names: Sequence[str], outs: Sequence[int], *, turns: bool = False) -> Delta | None:
        pairs = [adapter.pairs.get(f"{path}.{name}_proj") for name in names]
        order = orders[names[0]]
        more = {} if order is None else {"input_order": order}
        return None if not any(pairs) else kind(pairs, outs, adapter.scale, turns=turns, **more)

    return LayerDeltas(
        query_key_value=delta(["self_attn.q", "self_attn.k", "self_attn.v"], sizes),
        output=delta(["self_attn.o"], [hidden]),
        gate_up=delta(["mlp.gate", "mlp.up"], [inner, inner], turns=compiled),
        down=delta(["mlp.down"], [hidden]),
    )


_FIRST = ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.down")
"""The first linear with each of a layer's inputs."""


def _input_order(layer: nn.Module, name: str) -> Tensor | None:
    """Return the order that a linear takes its inputs in; None: as they are."""
    stored = stored_of(layer.get_submodule(f"{name}_proj"))
    return None if stored is None else stored[0].input_order


class LlamaParts:
    """The parts of a network around its layers."""

    def __init__(self, source: LlamaSource) -> None:
        self._ranks = source.ranks
        self._embedding = table_of(source.base.get_input_embeddings())
        self._norm = Norm.of(source.base.norm)
        self._adapters = source.adapters
        self._mask_embeddings = [adapter.mask_embeddings for adapter in source.adapters]
        self._scale = source.head_dim**-0.5

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return self._embedding.rows(ids)

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        return self.embed(batch.ids)

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        return self._norm(hidden)

    def _enter_gated(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer, with the adapters' own mask embeddings."""
        x = self.embed(batch.ids)
        for run in batch.gated:
            inputs = self._adapters[run.adapter].inputs_of(run, batch.positions)
            x[run.slice] = F.embedding(inputs, self._mask_embeddings[run.adapter])
        return x


def add_lora_deltas(y: Tensor, x: Tensor, rows: Sequence[LoraRows], deltas: Mapping[int, GatedDelta | None]) -> None:
    """Add each LoRA's delta to its rows of y = f(x), in place. `deltas`: by LoRA."""
    for run in rows:
        delta = deltas[run.lora]
        if delta is not None:
            delta.add_to(y, x, run.slice)


def add_deltas(y: Tensor, x: Tensor, gated: Sequence[GatedRows], deltas: Sequence[GatedDelta | None]) -> None:
    """Add each adapter's delta to its rows of y = f(x), in place. `deltas`: by adapter."""
    for run in gated:
        delta = deltas[run.adapter]
        if delta is not None:
            delta.add_to(y, x, run.slice)
