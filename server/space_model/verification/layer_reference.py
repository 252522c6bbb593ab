"""Reference outputs of each part of a transformers model for the same rows: in a wide dtype, and in the serving dtype.

    ids | embeddings | layer 0 | layer 1 | … | final norm | head
         ^ each part's input is the previous part's wide output, rounded once to the serving dtype

Errors do not accumulate over parts, so each part is compared with a bound for its own roundings. Attention is
transformers' own, with its masks, over a synthetic context: the rows follow so many keys that a sliding window cuts
some off, and far enough from position 0 that a wrong angle shows. Half of the rows are scaled down so far before each
part that a norm's epsilon shows, and that the residual does not hide the layer's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from space_kernels.fp8 import FORMAT, nearest
from space_kernels.linear import stored_parts
from space_kernels.linear.cpu_linear import STORED
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.group_weights import GroupWeights, group_form
from space_kernels.linear.int8_linear import Int8Weights
from space_kernels.linear.rounded_inputs import rounded
from space_kernels.linear.stored_parts import chosen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from space_model.checkpoint import family
from space_model.checkpoint.recurrent_layers import WITHOUT_ATTENTION
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts
from space_model.networks.altup import coefficient_linears
from space_model.networks.experts_module import is_experts, is_transposed, router_linears
from space_model.networks.latent_heads import expansions
from space_model.networks.own_attention.attach import usual_attention
from space_model.networks.transformers_network import AroundLayer, RunLayer, each_layer
from space_model.stored_weights import (
    numbers_of,
    release,
    rows_of,
    stored_experts_of,
    stored_of,
    table_of,
    unread_of,
)
from space_model.verification.state_reference import InFloat64, StateBefore, StateLayer

NUM_ROWS = 24  # more than a page of 16

CONTEXT, LONGEST_CONTEXT = 768, 8192
"""Keys before the rows: at least the first, or as many as the widest sliding window of at most the second."""

FREQUENT_IDS = 1536  # embedded ids are below this: the bytes and first merges of most vocabularies
HEAD_IDS = 4096  # number of ids whose logits are compared, spread over the vocabulary

SMALL_ROWS = (-3.3, -0.3)
"""Range (powers of ten) of the root mean square to which half of a part's input rows are scaled."""

LARGE_ROWS = (0.0, 1.5)  # range (powers of ten) of the factors by which half of the head's input rows are enlarged

CHECKED_WEIGHTS = 250_000_000
"""Limit on the weights of checked layers: each kind of layer, the last one, and others spread evenly."""


@dataclass(frozen=True)
class ProbeRows:
    """The rows of the check."""

    ids: tuple[int, ...]
    start: int  # position of the first row, which is the context's length

    @classmethod
    def of(cls, model: PreTrainedModel, window: int) -> ProbeRows:
        """Choose rows for a model with sequences of up to `window` positions."""
        vocab_size = len(model.get_input_embeddings().weight)
        count = min(NUM_ROWS, window)
        most = min(vocab_size, FREQUENT_IDS)
        ids = tuple((251 * i * i + 97 * i + 31) % most for i in range(count))
        context = CONTEXT
        for sliding in _windows(model):
            if sliding <= LONGEST_CONTEXT:
                context = max(context, sliding)
        chunk = getattr(model.config, "attention_chunk_size", None) if family.is_chunked(model.config) else None
        if chunk is not None and chunk <= LONGEST_CONTEXT:  # the rows' middle is the end of a chunk
            context = -(-context // chunk) * chunk - count // 2
        return cls(ids, max(0, min(context, window - count)))


@dataclass(frozen=True)
class Made:
    """One part's outputs for the rows."""

    exact: Tensor  # in the wide dtype
    usual: Tensor  # transformers', in the serving dtype

    def beside(self, other: Made) -> Made:
        """Return both parts' outputs as one, joined in the last dimension."""
        return Made(torch.cat([self.exact, other.exact], -1), torch.cat([self.usual, other.usual], -1))


@dataclass
class LayerRows:
    """One layer's input and outputs."""

    number: int
    given: Tensor  # [R, hidden]
    out: Made  # [R, hidden]
    keys: Made | None  # [G, R, head dim], as written to the cache; None: the layer does not attend
    values: Made | None
    before: StateBefore | None  # a recurrent layer's memory before the rows
    inputs_left: Made | None  # [taps - 1, C]: the last rows' inputs to its convolution
    states_left: Made | None  # [heads, …]: its state behind the rows
    is_routed: bool  # has experts, so rounding may select another one


@dataclass
class Reference:
    """The model's outputs for the rows, part by part."""

    rows: ProbeRows
    entry: Made  # [R, hidden]: the input of the first layer
    layers: list[LayerRows]
    norm_given: Tensor
    norm: Made
    head_given: Tensor
    head_ids: Tensor  # ids of the logits
    logits: Made | None  # [R, ids]; None: the model's head is not loaded
    contexts: Contexts
    longest_sum: int  # terms of the longest sum

    def with_head(self, weight: Tensor, dtype: torch.dtype) -> Reference:
        """Return this with the logits of a plain head [ids, hidden]; a last rank may have no ids."""
        if not len(weight):
            return self
        wide = self.norm.exact.dtype
        ids = _spread(len(weight), weight.device)
        exact = F.linear(self.head_given.to(wide), weight[ids].to(wide))
        return replace(self, head_ids=ids, logits=Made(exact, F.linear(self.head_given, weight[ids].to(dtype))))


def _spread(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(0, vocab_size, max(1, -(-vocab_size // HEAD_IDS)), device=device)


@torch.no_grad()
def reference(model: PreTrainedModel, facts: ModelFacts) -> Reference:
    """Compute the outputs of a loaded model before it is taken apart; it is left unchanged. One layer at a time is in
    memory in the wide dtype. A rank's part is treated as a model of its own: the other ranks' terms are left out.
    Raises UnsupportedModel if the model cannot be run this way."""
    walk = _Walk(model, facts)
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation(usual_attention(model))
    model.set_experts_implementation("eager")  # other implementations do not support the wide dtype
    try:
        return walk.run()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run layer by layer: {error}") from error
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)


class _Walk:
    def __init__(self, model: PreTrainedModel, facts: ModelFacts) -> None:
        self._model, self._base, self._facts = model, model.base_model, facts
        self._rows = ProbeRows.of(model, facts.window)
        self._dtype = facts.dtype
        self._wide = torch.float64 if facts.dtype is torch.float32 else torch.float32
        _, layers = family.decoder_layers(self._base)
        self._layers = list(layers)
        self._checked = set(with_sources(_checked(self._layers), facts))
        modules = (*model.base_model.modules(), model.config)
        capped = any(getattr(module, "attn_logit_softcapping", None) is not None for module in modules)
        self._contexts = Contexts(facts, self._rows.start, _windows(model), capped=capped)
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        self._has_head = isinstance(getattr(head, "weight", None), Tensor) and head.weight.device.type != "meta"
        vocab_size = len(head.weight) if self._has_head else len(embedding)
        self._head_ids = _spread(vocab_size, facts.device)
        self._rounded = _RoundedInputs()

    def run(self) -> Reference:
        rows, parts = self._rows, len(self._layers)
        given: dict[int, Tensor] = {}
        exact_out: dict[int, Tensor] = {}
        usual_out: dict[int, Tensor] = {}
        cache = [self._cached(number) for number in range(parts)]
        entries: list[Tensor] = []
        norms: list[Tensor] = []
        logits: list[Tensor | None] = []

        def exactly(number: int, hidden: Tensor, run: RunLayer) -> Tensor:
            if number == 0:
                entries.append(hidden[0])
            if number in self._checked:
                given[number] = self._input(hidden[0])
                with self._held(number, self._wide), self._widened(number):
                    hidden = run(given[number][None].to(self._wide))
                exact_out[number] = hidden[0]
            if number == parts - 1:
                given[parts] = self._input(hidden[0])
                hidden = given[parts][None].to(self._wide)
            return hidden

        with self._around_layers(self._wide):
            logits.append(self._pass(exactly, cache, norms))

        def usually(number: int, hidden: Tensor, run: RunLayer) -> Tensor:
            if number == 0:
                entries.append(hidden[0])
            if number in self._checked:
                with self._held(number, self._dtype):
                    usual_out[number] = run(given[number][None])[0]
            return given[parts][None] if number == parts - 1 else hidden

        with self._around_layers(self._dtype):
            logits.append(self._pass(usually, cache, norms))
        return Reference(
            rows=rows,
            entry=Made(*entries),
            layers=[
                LayerRows(
                    n,
                    given[n],
                    Made(exact_out[n], usual_out[n]),
                    is_routed=_is_routed(self._layers[n]),
                    **self._seen(cache, n),
                )
                for n in sorted(self._checked)
            ],
            norm_given=given[parts],
            norm=Made(*norms),
            head_given=self._head_input(norms[0]),
            head_ids=self._head_ids,
            logits=None if logits[0] is None or logits[1] is None else Made(logits[0], logits[1]),
            contexts=self._contexts,
            longest_sum=max(rows.start + len(rows.ids), *(max(p.shape) for m in self._layers for p in m.parameters())),
        )

    def _input(self, hidden: Tensor) -> Tensor:
        """[R, hidden] as a part's input: half of the rows unchanged, half scaled down until an epsilon matters."""
        whole = len(hidden) // 2
        sizes = torch.logspace(*SMALL_ROWS, len(hidden) - whole, dtype=self._wide, device=hidden.device)
        small = hidden[whole:].to(self._wide)
        small = small * (sizes[:, None] / small.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-30))
        return torch.cat([hidden[:whole].to(self._wide), small]).to(self._dtype)

    def _head_input(self, normed: Tensor) -> Tensor:
        """[R, hidden] as the head's input: half of the rows unchanged, half scaled up until a cap on logits matters."""
        whole = len(normed) // 2
        sizes = torch.logspace(*LARGE_ROWS, len(normed) - whole, dtype=self._wide, device=normed.device)
        return torch.cat([normed[:whole], normed[whole:] * sizes[:, None]]).to(self._dtype)

    def _cached(self, number: int) -> _ContextLayer | StateLayer:
        """Return a layer of the cache."""
        state = self._facts.states[number] if self._facts.states else None
        if state is None:
            return _ContextLayer(self._contexts, number)
        before = StateBefore(state, number, self._dtype, self._facts.device)
        if self._facts.kv_of(number).kv_heads:
            return _ContextAndStateLayer(self._contexts, number, before)
        return StateLayer(before)

    def _seen(self, cache: Sequence[_ContextLayer | StateLayer], number: int) -> dict[str, Any]:
        """Return what a layer wrote: keys, values; its memory before the rows, and inputs and states behind them."""
        kept = self._facts.kv_of(number)
        source, layer = cache[kept.source], cache[number]
        keys, values = source.made() if isinstance(source, _ContextLayer) and kept.kv_heads else (None, None)
        seen: dict[str, Any] = {"keys": keys, "values": values, "before": None, "inputs_left": None}
        seen["states_left"] = None
        if isinstance(layer, StateLayer):
            seen["before"], seen["inputs_left"] = layer.before, Made(*layer.inputs_left)
            seen["states_left"] = Made(*layer.states_left) if layer.states_left else None
        return seen

    def _widened(self, number: int) -> AbstractContextManager[Any]:
        """Let a recurrent layer compute in float64 where that is the wide dtype."""
        is_recurrent = bool(self._facts.states) and self._facts.states[number] is not None
        return InFloat64() if is_recurrent and self._wide is torch.float64 else nullcontext()

    def _held(self, number: int, dtype: torch.dtype) -> AbstractContextManager[None]:
        return _held(self._layers[number], self._dtype, dtype, self._facts.weights, self._rounded)

    def _pass(
        self, around: AroundLayer, cache: Sequence[_ContextLayer | StateLayer], norms: list[Tensor]
    ) -> Tensor | None:
        """Return the logits of the head's input. Appends the final norm's output to `norms`, the exact one first."""
        rows, device = self._rows, self._facts.device

        def note(base: nn.Module, inputs: object, out: Any) -> Any:
            norms.append(out.last_hidden_state[0])
            out.last_hidden_state = self._head_input(norms[0]).to(norms[-1].dtype)[None]
            return out

        path, _ = family.decoder_layers(self._base)  # OPT's forward calls the module with the layers, not its base
        hook = self._base.get_submodule(path.rpartition(".")[0]).register_forward_hook(note)
        try:
            with each_layer(self._base, around):
                out = (self._model if self._has_head else self._base)(
                    input_ids=torch.tensor([rows.ids], device=device),
                    position_ids=torch.arange(rows.start, rows.start + len(rows.ids), device=device)[None],
                    use_cache=True,
                    **{self._cache_name: Cache(layers=list(cache))},
                )
        finally:
            hook.remove()
        logits: Tensor | None = out.logits[0] if self._has_head else None
        return logits

    @property
    def _cache_name(self) -> str:
        """Return the keyword of transformers' forward for the cache."""
        return "cache_params" if self._base.config.model_type in WITHOUT_ATTENTION else "past_key_values"

    @contextmanager
    def _around_layers(self, dtype: torch.dtype) -> Iterator[None]:
        """Hold everything around the layers in `dtype`: of the embedding the frequent ids, of the head the compared
        ids."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        inside = {module for layer in self._layers for module in layer.modules()}
        swaps = _Swaps()
        table = table_of(embedding)
        frequent = table.rows(torch.arange(min(FREQUENT_IDS, len(table)), device=embedding.weight.device))
        swaps.put(embedding._parameters, "weight", frequent.to(dtype))
        padding = getattr(embedding, "padding_idx", None)
        embedding.padding_idx = None
        if self._has_head:
            if (stored := stored_of(head)) is not None:
                weight = chosen(stored, self._head_ids)
            else:
                weight = rows_of(head).rows(self._head_ids)
                if self._facts.quantizes_head:
                    weight = _dequantized(weight, self._facts.weights, head=True)
            swaps.put(head._parameters, "weight", weight.to(dtype))
            if dtype is self._dtype and (stored is not None or self._facts.weights in ("int8", "int4")):
                self._rounded.take(head.weight)
            if head.bias is not None:
                swaps.put(head._parameters, "bias", head.bias[self._head_ids].to(dtype))
        for name, module in self._model.named_modules():
            if name.endswith("embed_tokens_per_layer"):  # Gemma's, as large as all others together
                swaps.put(module._parameters, "weight", module.get_parameter("weight")[:FREQUENT_IDS].to(dtype))
            elif module not in inside and module is not embedding and module is not head:
                swaps.widen(module, self._dtype, dtype)
        try:
            with self._rounded:
                yield
        finally:
            if self._has_head:
                self._rounded.drop(head.weight)
            swaps.undo()
            embedding.padding_idx = padding
            if self._has_head:
                release(head)


class Contexts:
    """Keys and values before the rows: similar to those of the rows, plus noise. Values at the edges of sliding windows
    are large, so that an off-by-one window shows. If attention scores have a cap, one key in eight is large enough to
    reach it."""

    def __init__(self, facts: ModelFacts, length: int, windows: Sequence[int], *, capped: bool) -> None:
        self._facts, self.length, self._capped = facts, length, capped
        self._noise: dict[tuple[int, ...], Tensor] = {}
        self._edges = [(length - window, window) for window in windows if 0 <= length - window < length]

    def of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [G, R, head dim] of the rows -> [G, length, head dim] in the serving dtype, as the KV cache
        stores them."""
        loudness = torch.ones(self.length, device=keys.device)
        for first, window in self._edges:
            loudness[first : first + keys.shape[1]] = 2.0 * window**0.5
        size = torch.ones(self.length, device=keys.device)
        if self._capped:
            size[::8] = torch.logspace(0.3, 1.2, len(size[::8]), device=keys.device)
        return self.kept(self._like(keys, 1) * size[:, None]), self.kept(self._like(values, 2) * loudness[:, None])

    def copies(self, keys: Tensor, layer: int) -> int:
        """Return how often a family hands over each key head in turn: Falcon as often as it has queries for it.
        keys [1, heads, R, head dim]"""
        copies, rest = divmod(keys.shape[1], self._facts.kv_of(layer).kv_heads)
        return copies if copies and not rest and self._facts.num_heads == keys.shape[1] else 1

    @property
    def has_fp8(self) -> bool:
        return self._facts.kv_dtype is FORMAT

    def kept(self, rows: Tensor) -> Tensor:
        """Return the values as the KV cache would store them, in the serving dtype."""
        rows = rows.to(self._facts.dtype)
        return nearest(rows).to(rows.dtype) if self.has_fp8 else rows

    def _like(self, rows: Tensor, seed: int) -> Tensor:
        rows = rows.to(self._facts.dtype).float()
        heads, count, width = rows.shape
        shape = (seed, heads, self.length, width)
        if shape not in self._noise:
            generator = torch.Generator().manual_seed(seed)
            self._noise[shape] = torch.randn(shape[1:], generator=generator).to(rows.device)
        of_row = torch.arange(self.length, device=rows.device) % count
        size = rows.pow(2).mean((1, 2), keepdim=True).sqrt()
        mixed: Tensor = 0.5**0.5 * (rows[:, of_row] + size * self._noise[shape])
        return mixed


class _ContextLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a cache: the context, then the rows' keys and values, first wide, then in the serving dtype."""

    def __init__(self, contexts: Contexts, number: int) -> None:
        DynamicLayer.__init__(self)
        self._number = number
        self.keys_seen: list[Tensor] = []
        self.values_seen: list[Tensor] = []
        self._contexts = contexts

    def made(self) -> tuple[Made, Made]:
        """Return keys and values, as written to the cache."""
        return Made(*self.keys_seen), Made(*self.values_seen)

    def get_seq_length(self) -> int:
        return self._contexts.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._contexts.length + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        joined = []
        copies = self._contexts.copies(key_states, self._number)
        for seen, states in ((self.keys_seen, key_states[0, ::copies]), (self.values_seen, value_states[0, ::copies])):
            kept = self._contexts.kept(states).to(states.dtype) if self._contexts.has_fp8 else states
            seen.append(states if not seen else kept)
            joined.append(kept)
        in_front = self._contexts.of(self.keys_seen[0], self.values_seen[0])
        keys, values = (torch.cat([a.to(b.dtype), b], dim=1)[None] for a, b in zip(in_front, joined, strict=True))
        if copies == 1:  # repeat_interleave would copy
            return keys, values
        return keys.repeat_interleave(copies, 1), values.repeat_interleave(copies, 1)


class _ContextAndStateLayer(_ContextLayer, StateLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer that attends and is recurrent, both on what the layer above gave."""

    def __init__(self, contexts: Contexts, number: int, before: StateBefore) -> None:
        LinearAttentionLayer.__init__(self)
        _ContextLayer.__init__(self, contexts, number)
        self._begin_with(before)


class _Swaps:
    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, where: dict[str, Any], name: str, tensor: Tensor | EachExpert) -> None:
        """Replace a tensor; `where`: a module's parameters or buffers."""
        self._undo.append((where, name, where[name]))
        if isinstance(where[name], nn.Parameter) and isinstance(tensor, Tensor):
            tensor = nn.Parameter(tensor, requires_grad=False)
        where[name] = tensor

    def put_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self._undo.append((parent._modules, name, parent._modules[name]))
        parent._modules[name] = module

    def widen(self, module: nn.Module, narrow: torch.dtype, dtype: torch.dtype) -> None:
        """Replace the module's own tensors of the serving dtype."""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, Tensor) and tensor.dtype is narrow and tensor.dtype is not dtype:
                    self.put(tensors, name, tensor.to(dtype))

    def undo(self) -> None:
        for where, name, was in reversed(self._undo):
            where[name] = was


class _Dense(nn.Module):
    """x·Wᵀ + b"""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of `F.linear` and `@` with some weights to whole numbers, group by group, as int8, int4 and
    stored linears do."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def take(self, weight: Tensor) -> None:
        self._storages.add(weight.untyped_storage().data_ptr())

    def drop(self, weight: Tensor) -> None:
        self._storages.discard(weight.untyped_storage().data_ptr())

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_product = function is F.linear or function is torch.Tensor.matmul
        if is_product and self._storages and args[1].untyped_storage().data_ptr() in self._storages:
            x, *others = args
            return function(rounded(x).to(x.dtype), *others, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dequantized(weight: Tensor, weights: str, *, head: bool = False) -> Tensor:
    """Return a weight [out, in] as `--weights` would hold it, in float32."""
    if weights in STORED:  # what is not stored is plain
        return weight
    form = group_form(weights, head=head)
    return Int8Weights.of(weight).dense() if form is None else GroupWeights.of(weight, form).dense()


class EachExpert:
    """Stands for the weights of all experts [E, …]: an expert's are made when it is asked for, and only the last one's
    are in memory."""

    def __init__(self, make: Callable[[int], Tensor], count: int, inputs: _RoundedInputs | None) -> None:
        """`inputs`: rounds the inputs of products with these weights."""
        self._make, self._count, self._inputs = make, count, inputs
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        number = int(expert)
        if self._last is None or self._last[0] != number:
            self.forget()
            self._last = number, self._make(number)
            if self._inputs is not None:
                self._inputs.take(self._last[1])
        return self._last[1]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._count, *self[0].shape))

    def transpose(self, first: int, second: int) -> Tensor:
        return self._whole().transpose(first, second)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with all experts at once, where a family does (Llama 4)."""
        return function(*(one._whole() if isinstance(one, cls) else one for one in args), **(kwargs or {}))

    def _whole(self) -> Tensor:
        return torch.stack([self._make(number) for number in range(self._count)])

    def forget(self) -> None:
        """Free the last expert's weights."""
        if self._last is not None and self._inputs is not None:
            self._inputs.drop(self._last[1])
        self._last = None


@contextmanager
def _held(
    layer: nn.Module, narrow: torch.dtype, dtype: torch.dtype, weights: str, inputs: _RoundedInputs
) -> Iterator[None]:
    """Hold the layer's weights in `dtype`; quantised weights are dequantised. In the serving dtype the inputs of int8,
    int4 and stored linears are rounded: that is part of the deviation that is usual."""
    swaps = _Swaps()
    taken: list[Tensor] = []
    each: list[EachExpert] = []
    plain = frozenset((*router_linears(layer), *coefficient_linears(layer), *expansions(layer)))
    try:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if dtype is not narrow and (dense := _dense(child, narrow, dtype)) is not None:
                    swaps.put_module(parent, name, dense)
        for module in layer.modules():
            form = "plain" if module in plain else weights
            is_stored = stored_of(module) is not None or stored_experts_of(module) is not None
            rounds = is_stored or form in ("int8", "int4")
            if is_experts(module) and (is_stored or rounds or dtype is not narrow):
                for name, make in _one_by_one(module, dtype, form).items():
                    each.append(
                        EachExpert(
                            make, len(module.get_parameter(name)), inputs if rounds and dtype is narrow else None
                        )
                    )
                    swaps.put(module._parameters, name, each[-1])
            else:
                for name, weight in _made(module, dtype, form):
                    swaps.put(module._parameters, name, weight)
                    if rounds and dtype is narrow:
                        taken.append(module.get_parameter(name))
                        inputs.take(taken[-1])
            swaps.widen(module, narrow, dtype)
        yield
    finally:
        for one in taken:
            inputs.drop(one)
        for experts in each:
            experts.forget()
        swaps.undo()
        release(*(module for module in layer.modules() if type(module) is nn.Linear))


def _made(module: nn.Module, dtype: torch.dtype, weights: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and numbers of the module's own weights that are not plain (see make_row_invariant), one at a
    time; not those of experts."""
    if (stored := stored_of(module)) is not None:
        yield "weight", stored_parts.dense(stored).to(dtype)
    elif weights in ("int8", "int4") and type(module) is nn.Linear:
        yield "weight", _dequantized(numbers_of(module), weights).to(dtype)
    elif unread_of(module) is not None:
        yield "weight", numbers_of(module).to(dtype)


def _one_by_one(module: nn.Module, dtype: torch.dtype, weights: str) -> dict[str, Callable[[int], Tensor]]:
    """Return what makes the numbers of one expert, as the module has them, of each of its two weights."""
    turned, stored = is_transposed(module), stored_experts_of(module)
    wholes = {name: module.get_parameter(name) for name in ("gate_up_proj", "down_proj")}

    def made(name: str, expert: int) -> Tensor:
        if stored is not None:
            found = stored.numbers(name, expert, in_turn=not getattr(module, "is_concatenated", True)).to(dtype)
        else:
            found = wholes[name][expert]
            if weights not in ("int8", "int4"):
                return found.to(dtype)
            found = _dequantized((found.mT if turned else found).contiguous(), weights).to(dtype)
        return found.mT if turned else found

    return {name: partial(made, name) for name in wholes}


def _dense(module: nn.Module, narrow: torch.dtype, dtype: torch.dtype) -> nn.Module | None:
    """Return a dequantised replacement for a quantised linear; None if the module is not one."""
    if isinstance(module, Fp8Linear):
        bias = None if module.bias is None else module.bias.to(dtype)
        return _Dense(module.numbers.to(dtype) * module.scale.to(dtype)[:, None], bias)
    size = getattr(module, "in_features", None)
    if isinstance(module, nn.Linear) or not isinstance(size, int) or not hasattr(module, "out_features"):
        return None
    # a library's own linear: multiplying the identity recovers its weight
    some = next((t for t in (*module.parameters(), *module.buffers())), None)
    device = None if some is None else some.device
    none = module(torch.zeros(1, size, dtype=narrow, device=device))
    weight = module(torch.eye(size, dtype=narrow, device=device)).to(dtype) - none.to(dtype)
    return _Dense(weight.T, none[0].to(dtype))


def _windows(model: PreTrainedModel) -> list[int]:
    modules = (*model.base_model.modules(), model.config)
    found = {getattr(module, "sliding_window", None) for module in modules}
    return sorted(window for window in found if isinstance(window, int) and window > 0)


def _is_routed(layer: nn.Module) -> bool:
    return any("expert" in name for name, _ in layer.named_modules())


def _checked(layers: Sequence[nn.Module]) -> list[int]:
    """Return the layers to check: the first of each kind, the last, and as many others as the limit allows."""
    chosen = {*first_of_kinds(layers), len(layers) - 1}
    room = CHECKED_WEIGHTS // max(1, *(sum(p.numel() for p in layer.parameters()) for layer in layers))
    if room >= len(layers):
        return list(range(len(layers)))
    return sorted(chosen | {number * len(layers) // room for number in range(room - len(chosen))})


def first_of_kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Return the first layer of each kind; layers of a kind have the same modules and windows."""
    kinds: dict[object, int] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(tuple((type(m), getattr(m, "sliding_window", None)) for m in layer.modules()), number)
    return list(kinds.values())


def with_sources(numbers: Iterable[int], facts: ModelFacts) -> list[int]:
    """Return the layers, ascending, with those whose keys and values they read."""
    return sorted({one for number in numbers for one in (number, facts.kv_of(number).source)})
