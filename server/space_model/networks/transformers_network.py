"""Any transformers decoder as a Network, with our attention; on the CPU also our linears, activations and experts.

Our paged attention is registered as a transformers attention implementation. `each_layer` runs a decoder with its
layers replaced; embedding, masks and norm stay transformers'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from space_kernels.attention.alibi import Alibi
from space_kernels.attention.attention import QKV, Attention, AttentionSpec
from space_kernels.attention.torch_backend import space_attention
from space_kernels.layers.layers import RowInvariantActivation, gelu, gelu_tanh, same_function, silu
from space_kernels.layers.row_invariant_calls import GuardedActivation, calls_any, guard, guarded
from space_kernels.linear.cpu_linear import cpu_linear
from space_kernels.linear.experts import RowInvariantRouter
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.recurrence.states import LayerMemory, StateStep
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.cache_utils import KVSharingDict
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.pytorch_utils import Conv1D

from space_model.adapters import GatedLora
from space_model.checkpoint.family import decoder_layers
from space_model.checkpoint.weight_files import let_go
from space_model.geometry.forward_batch import ForwardBatch, GatedRows, LoraRows, Segment
from space_model.lora import Lora
from space_model.model_error import UnsupportedModel
from space_model.networks.altup import apart, beside, coefficient_linears, is_altup, num_versions, predict_by_row
from space_model.networks.experts_module import experts_for, is_experts, router_linears
from space_model.networks.fixed_rope import LongRope
from space_model.networks.latent_heads import EXPANSION, LatentHeads
from space_model.networks.network import PagedKV, Taps
from space_model.networks.scaled_experts import ScaledRowExperts
from space_model.stored_weights import release, table_of, weight_of


class ServedGate:
    """The rows of the current step that each adapter acts on."""

    def __init__(self) -> None:
        self.runs: Sequence[GatedRows] = ()
        self.positions = torch.empty(0, dtype=torch.int64)  # [R], of the step's rows
        self.num_rows = 0  # of the step, including padding
        self.loras: Sequence[LoraRows] = ()

    def open_for(self, batch: ForwardBatch) -> None:
        """Set the rows of this step; they stay until the next call."""
        self.runs, self.num_rows, self.positions = batch.gated, len(batch.ids), batch.positions
        self.loras = batch.loras


class GatedLinear(nn.Module):
    """A linear plus the delta of each adapter and LoRA on the rows it acts on."""

    def __init__(self, linear: nn.Module, deltas: Mapping[int, GatedDelta], gate: ServedGate) -> None:
        super().__init__()
        self.linear = linear
        self._deltas, self._gate = dict(deltas), gate
        self.loras: dict[int, GatedDelta] = {}

    @property
    def weight(self) -> Tensor:
        """The linear's weight [out, in]; the router of Hunyuan's experts reads its dtype."""
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """[1, R, in] -> [1, R, out], or both without the first dimension (a linear that chooses experts)"""
        y: Tensor = self.linear(x)
        found = [(self._deltas.get(run.adapter), run.slice) for run in self._gate.runs]
        found += [(self.loras.get(rows.lora), rows.slice) for rows in self._gate.loras]
        for delta, rows in found:
            if delta is not None:
                if x.shape[:-1] not in ((1, self._gate.num_rows), (self._gate.num_rows,)):
                    raise RuntimeError(
                        f"An adapted linear was given {tuple(x.shape)} in a step of {self._gate.num_rows}."
                    )
                delta.add_to(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), rows)
        return y


def attach(base: PreTrainedModel, adapters: Sequence[GatedLora], prefix: str) -> ServedGate:
    """Attach the adapters to the decoder `base`, at path `prefix` of the whole model; return the gate that controls
    them. Mask embeddings replace rows of the first layer's input, after anything that the family does to embeddings;
    where layers pass on several versions of a row, they replace rows of the embedding, of which versions are made."""
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

    def embed(table: nn.Module, ids: object, rows: Tensor) -> Tensor:
        return place_masks(rows, gate, adapters) if gate.runs else rows

    if num_versions(base.config) > 1:
        base.get_input_embeddings().register_forward_hook(embed)
        return gate

    def enter(layer: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not gate.runs:
            return None
        if rows:
            return (place_masks(rows[0], gate, adapters), *rows[1:]), keywords
        return rows, keywords | {"hidden_states": place_masks(keywords["hidden_states"], gate, adapters)}

    _, layers = decoder_layers(base)
    layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    return gate


def place_masks(hidden: Tensor, gate: ServedGate, adapters: Sequence[GatedLora]) -> Tensor:
    """Return a copy of hidden [1, R, hidden] with the adapters' mask rows replaced by their own embeddings."""
    hidden = hidden.clone()
    for run in gate.runs:
        adapter = adapters[run.adapter]
        hidden[0, run.slice] = adapter.mask_embeddings[adapter.inputs_of(run, gate.positions)]
    return hidden


RunLayer = Callable[[Tensor], Tensor]
"""The original layer, applied to other rows [1, R, hidden] with the same remaining arguments."""

AroundLayer = Callable[[int, Tensor, RunLayer], Tensor]
"""Layer number, layer input [1, R, hidden], original layer -> the output to use instead. Versions of a row lie beside
each other: [1, R, V·hidden] (altup.py)."""


@contextmanager
def each_layer(base: PreTrainedModel, around: AroundLayer, shared: Mapping[str, Any] | None = None) -> Iterator[None]:
    """In the block, a forward pass of `base` calls `around` instead of each decoder layer. `shared`: where layers leave
    keys and values for others, instead of the pass's own."""
    _, layers = decoder_layers(base)
    guarded_forwards = [layer.__dict__.get("forward") for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = _wrapped(number, layer.forward, around, base, shared)
    try:
        yield
    finally:
        for layer, forward in zip(layers, guarded_forwards, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


_TUPLES: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()  # bases whose layers return tuples, and lengths


def layers_return_tuples(base: PreTrainedModel, length: int = 1) -> None:
    """Say so of a base before its layers run for the first time."""
    _TUPLES[base] = length


def _wrapped(
    number: int,
    forward: Callable[..., Any],
    around: AroundLayer,
    base: PreTrainedModel,
    shared: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    versions = num_versions(base.config)

    def stand_in(*inputs: Any, **keywords: Any) -> Any:
        if shared is not None:
            keywords["shared_kv_states"] = shared

        def run(rows: Tensor) -> Tensor:
            rows = rows if versions == 1 else apart(rows, versions)
            named = keywords if inputs else keywords | {"hidden_states": rows}
            out = forward(*(rows, *inputs[1:])[: len(inputs)], **named)
            if isinstance(out, tuple):
                _TUPLES[base] = len(out)
            made: Tensor = out[0] if isinstance(out, tuple) else out
            return made if versions == 1 else beside(made)

        given = inputs[0] if inputs else keywords["hidden_states"]
        rows = around(number, given if versions == 1 else beside(given), run)
        rows = rows if versions == 1 else apart(rows, versions)
        return (rows, *[None] * (_TUPLES[base] - 1)) if base in _TUPLES else rows

    return stand_in


@contextmanager
def tapping(base: PreTrainedModel, taps: Taps) -> Iterator[None]:
    """In the block, a forward pass of `base` fills `taps`. Raises UnsupportedModel where layers have other inputs than
    rows [1, R, hidden]."""
    _, layers = decoder_layers(base)

    def take(number: int, rows: Any) -> None:
        if not isinstance(rows, Tensor) or rows.dim() != 3 or rows.shape[0] != 1:
            raise UnsupportedModel(
                f"The layers of {type(base).__name__} have other inputs than a hidden state a token."
            )
        taps.take(number, rows[0])

    def before(number: int, layer: nn.Module, rows: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(number, rows[0] if rows else named.get("hidden_states"))

    def behind(layer: nn.Module, rows: tuple[Any, ...], out: Any) -> None:
        take(len(layers), out[0] if isinstance(out, tuple) else out)

    inner = [number for number in set(taps.layers) if number < len(layers)]
    hooks = [layers[n].register_forward_pre_hook(partial(before, n), with_kwargs=True) for n in inner]
    if len(layers) in taps.layers:
        hooks.append(layers[-1].register_forward_hook(behind))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


ATTENTION_NAME = "spaceserve"

_MEANINGLESS_HERE = {"position_ids", "cache_position", "use_cache", "is_causal"}
"""Keywords to ignore: the batch already defines rows and masks."""


class CurrentStep:
    """The step that is being computed, for attention modules that are not handed the keywords of forward."""

    def __init__(self) -> None:
        self.step: AttentionStep | None = None
        self.keywords: Mapping[str, Any] = {}  # further ones of every call of the base model

    @classmethod
    def of(cls, base: nn.Module) -> CurrentStep:
        """Return the one of a base model; it has one from the first call on."""
        found = base.__dict__.setdefault("current_step", cls())
        assert isinstance(found, cls)
        return found

    def share_with(self, module: nn.Module) -> None:
        """Let `paged_attention` find the step by this module."""
        module.__dict__["current_step"] = self

    @contextmanager
    def running(self, step: AttentionStep | None) -> Iterator[None]:
        """In the block, this step is computed."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass
class AttentionStep:
    """What every layer's attention needs, passed through the model's forward as one keyword argument."""

    batch: ForwardBatch
    kv: PagedKV
    attention: Attention = space_attention
    layers_seen: list[int] = field(default_factory=list)  # that attended
    recurrent_seen: list[int] = field(default_factory=list)  # that advanced their states
    states: StateStep | None = None  # made by the first recurrent layer

    def states_of(self, layer: int) -> tuple[LayerMemory, StateStep]:
        """Return what a recurrent layer remembers, and the rows that advance it. Raises UnsupportedModel for a layer
        without memory."""
        kept = self.kv.states
        if kept is None or layer not in kept.layers:
            raise UnsupportedModel(f"Layer {layer} is recurrent, which config.json does not say.")
        if self.states is None:
            self.states = kept.begin(self.batch.rows)
        self.recurrent_seen.append(layer)
        return kept.layers[layer], self.states

    def commit(self) -> None:
        """All layers were computed: keep the states that they wrote."""
        if self.states is not None and self.kv.states is not None:
            self.kv.states.commit(self.states)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | EllipsisType | None = ...,
    softcap: float | None = None,
    alibi: Alibi | None = None,
    chunk: int | None = None,
    space_step: AttentionStep | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """query [1, H, R, D], key [1, G, R, D] and value [1, G, R, E] -> [1, R, H, E].

    `sliding_window`: not given by families that leave it to the mask, which here means the config's (Phi-MoE).
    """
    if space_step is None and "current_step" in module.__dict__:
        space_step = CurrentStep.of(module).step
    if space_step is None:
        raise UnsupportedModel(
            f"{type(module).__name__} is not handed what its model is called with (keywords of forward), so its keys "
            "and values cannot be paged."
        )
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModel(
            f"{type(module).__name__} attends to later tokens, too: the model is no causal language model, and writes "
            "no text. Use a checkpoint of one."
        )
    sinks = others.pop("s_aux", None)
    asked = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(asked - _MEANINGLESS_HERE)
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "dropout")
        raise UnsupportedModel(
            f"The attention of {type(module).__name__} asks for {what}, which paged attention does not do."
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pages = space_step.kv.layer(layer)
    latent: LatentHeads | None = module.__dict__.get("latent_heads")
    if latent is not None:
        query = latent.queries(query)
    _, heads, _, size = pages.keys.shape
    value_size = pages.values.shape[3] if latent is None else latent.latent_dim
    if not query.shape[-1] == key.shape[-1] == size or value.shape[-1] != value_size or key.shape[1] != heads:
        raise UnsupportedModel(
            f"{type(module).__name__} has {key.shape[1]} heads of keys, of size {key.shape[-1]}, and values of size "
            f"{value.shape[-1]}, where config.json says {heads} of size {size} (num_key_value_heads, head_dim): pages "
            "hold keys and values of one size."
        )
    window = _window_of_mask(module, layer) if isinstance(sliding_window, EllipsisType) else sliding_window
    space_step.layers_seen.append(layer)
    out = space_step.attention(
        QKV(*(part[0].transpose(0, 1) for part in (query, key, value))),
        pages,
        space_step.batch.rows,
        AttentionSpec(
            float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            window,
            softcap,
            alibi,
            sinks.detach().float() if isinstance(sinks, Tensor) else None,
            latent is not None,
            chunk,
        ),
    )
    return (out if latent is None else latent.outputs(out))[None], None


def _window_of_mask(module: nn.Module, layer: int) -> int | None:
    """Return the window of the mask that transformers makes for a layer by the config, if the family's file does."""
    if not hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask"):
        return None
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class TransformersNetwork:
    """The base model of a transformers decoder (ids to the final norm)."""

    def __init__(
        self,
        base: PreTrainedModel,
        gate: ServedGate | None = None,
        attend: Attention = space_attention,
        prefix: str = "model",
    ) -> None:
        """`gate`: of the adapters that are attached to `base`, if any; `prefix`: path of `base` in the whole model."""
        self.base = base
        self._prefix = f"{prefix}."
        self._attention = attend
        self._embedding = table_of(base.get_input_embeddings())
        self._dtype = base.get_input_embeddings().weight.dtype
        self._gate = gate or ServedGate()
        self._current = CurrentStep.of(base)
        self._ropes = [module for module in base.modules() if isinstance(module, LongRope)]
        self._shared = KVSharingDict() if "reuse" in (getattr(base.config, "kv_sharing_modes", None) or ()) else None

    def forward(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None = None) -> Tensor:
        """[R, hidden] after the final norm. `taps`: filled with the inputs of its layers. Raises UnsupportedModel where
        these are no rows of [hidden]."""
        self._gate.open_for(batch)
        step = AttentionStep(batch, kv, self._attention)
        with nullcontext() if taps is None else tapping(self.base, taps):
            hidden = self._run(batch, step)
        step.commit()
        return hidden

    def add_lora(self, number: int, lora: Lora) -> None:
        """Let a LoRA act on the rows that name it by `number`. Raises UnsupportedModel for one of a linear that is part
        of another operation here."""
        linears: dict[str, nn.Module] = {}
        for path in lora.pairs:
            try:
                linears[path] = self.base.get_submodule(path.removeprefix(self._prefix))
            except AttributeError:
                raise UnsupportedModel(f"{path} is computed with others at once here, and has no LoRA.") from None
        for path, linear in linears.items():
            pair = lora.pairs[path]
            if not isinstance(linear, GatedLinear):
                parent, _, name = path.removeprefix(self._prefix).rpartition(".")
                linear = GatedLinear(linear, {}, self._gate)
                setattr(self.base.get_submodule(parent), name, linear)
            linear.loras[number] = GatedDelta([pair], [len(pair[1])], lora.scale)

    def remove_lora(self, number: int) -> None:
        """Drop a LoRA."""
        for module in self.base.modules():
            if isinstance(module, GatedLinear):
                module.loras.pop(number, None)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return self._embedding.rows(ids)

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        given: list[Tensor] = []

        def note(number: int, rows: Tensor, run: RunLayer) -> Tensor:
            if number == 0:
                given.append(rows[0])
            return rows

        self._by_parts(note, batch)
        return given[0]

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone; one that shares keys and values after the one that makes them.
        Raises UnsupportedModel if it does not use our attention."""
        made: list[Tensor] = []

        def run_one(at: int, rows: Tensor, run: RunLayer) -> Tensor:
            if at == number:
                made.append(run(hidden[None])[0])
            return rows

        step = AttentionStep(batch, kv, self._attention)
        try:
            self._by_parts(run_one, batch, step)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UnsupportedModel(f"{type(self.base).__name__} does not run on paged attention: {error}") from error
        if step.layers_seen != [number] * kv.attends(number):
            raise UnsupportedModel(
                f"Layer {number} of {type(self.base).__name__} attends through transformers' AttentionInterface as "
                f"{step.layers_seen}; every layer must, once, and as itself."
            )
        if step.recurrent_seen != [number] * kv.recurs(number):
            raise UnsupportedModel(
                f"Layer {number} of {type(self.base).__name__} advances recurrent states as {step.recurrent_seen}; a "
                "recurrent layer must, once, and no other."
            )
        return made[0]

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        batch = ForwardBatch.build(
            [Segment([0] * len(hidden), 0, [0])], block_size=len(hidden), mask_ids=(), device=hidden.device
        )
        return self._by_parts(lambda at, rows, run: hidden[None], batch)

    def _by_parts(self, around: AroundLayer, batch: ForwardBatch, step: AttentionStep | None = None) -> Tensor:
        with each_layer(self.base, around, self._shared):
            return self._run(batch, step)

    def _run(self, batch: ForwardBatch, step: AttentionStep | None) -> Tensor:
        ids, positions = batch.ids[None], batch.positions[None]
        for rope in self._ropes:
            rope.long_rows = batch.long_rows
        with self._current.running(step):
            named = {**self._current.keywords, "space_step": step}
            out = self.base(input_ids=ids, position_ids=positions, use_cache=False, **named)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden.to(self._dtype)  # Mamba's residuals are in float32, and so is what its last norm returns


def make_row_invariant(base: nn.Module, num_threads: int, *, weights: str = "plain") -> None:
    """Replace CPU modules whose results depend on the number of rows: linears (packed, too), activations, experts,
    routers; and functions that do in the code of others.

    `weights`: int8 or int4: linears and experts of the layers are quantised; gguf or packed: linears may be stored.

    One module at a time, so that only one weight is in memory twice.
    """
    plain = {*router_linears(base), *coefficient_linears(base)}
    if isinstance(base, PreTrainedModel):  # the check at load holds what is around the layers as plain numbers
        plain |= _around_layers(base)
    _replace_children(base, num_threads, weights, frozenset(plain))


def _around_layers(base: PreTrainedModel) -> set[nn.Module]:
    """Return the linears outside the decoder layers. Refers to no others, which are freed as they are replaced."""
    inside = {module for layer in decoder_layers(base)[1] for module in layer.modules()}
    return {module for module in base.modules() if type(module) is nn.Linear and module not in inside}


_ACTIVATIONS = (
    *{entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()},
    *(nn.SiLU, nn.GELU, BloomGelu),
)
"""Classes of activations, torch's and transformers'."""


def _replace_children(base: nn.Module, num_threads: int, weights: str, plain: frozenset[nn.Module]) -> None:
    """As `make_row_invariant`; `plain`: linears that are not quantised."""
    for name in [name for name, _ in base.named_children()]:  # names only: replaced modules must be freed
        child = base.get_submodule(name)
        if name == EXPANSION and "latent_heads" in base.__dict__:
            setattr(base, name, base.__dict__["latent_heads"].row_invariant(child))
            release(child)
        elif type(child) is nn.Linear:
            form = "plain" if child in plain else weights
            setattr(base, name, cpu_linear(weight_of(child), child.bias, weights=form))
            release(child)
        elif type(child) is Conv1D:  # GPT-2's linear, whose weight is transposed
            weight, bias = child.get_parameter("weight"), child.get_parameter("bias")
            setattr(base, name, cpu_linear(weight.t().contiguous(), bias, weights=weights))
            let_go(weight)
        elif isinstance(child, _ACTIVATIONS):
            setattr(base, name, row_invariant(child, num_threads))
        elif type(child).__name__ == "Llama4TextMoe":
            _replace_children(child, num_threads, weights, plain)
            setattr(base, name, ScaledRowExperts(child))
        elif is_experts(child):
            setattr(base, name, experts_for(child, partial(row_invariant, num_threads=num_threads), weights))
        elif "Experts" in type(child).__name__ and any(weight.dim() > 2 for weight in child.parameters(recurse=False)):
            raise UnsupportedModel(
                f"{type(child).__name__} is no mixture of experts that this server computes row by row on a CPU: it "
                "has no gate_up_proj. Serve the model on a GPU."
            )
        else:
            _replace_children(child, num_threads, weights, plain)
            if is_altup(child):
                predict_by_row(child)
            own = child._parameters.get("weight")
            if own is not None and own.dim() == 2 and not isinstance(child, nn.Embedding):
                setattr(base, name, RowInvariantRouter(child))  # it has its own matrix
            elif calls_any(child):
                guard(child)


def row_invariant(activation: Callable[[Tensor], Tensor], num_threads: int) -> Callable[[Tensor], Tensor]:
    """Return a row-invariant form of the activation for up to `num_threads` threads."""
    if isinstance(activation, nn.ReLU | RowInvariantActivation | GuardedActivation):
        return activation
    for composed in (silu, gelu, gelu_tanh):
        if same_function(activation, composed):
            return RowInvariantActivation(activation, composed, num_threads)
    try:
        return guarded(activation)
    except ValueError as error:
        raise UnsupportedModel(
            f"{error}, which are not known to give a row the same bits in any company, so this activation is not "
            "served on a CPU. Serve the model on a GPU."
        ) from error
