"""What each part of a transformers model makes of the same rows: in wide numbers, and in the serving dtype.

    ids | embeddings | layer 0 | layer 1 | … | final norm | head
         ^ every part is given what the part in front makes of it in wide numbers, rounded once to the serving dtype

Errors do not add up from part to part, so each is compared with what its own roundings allow. Attention is
transformers' own, with its masks, over a made-up context: the rows stand behind so many keys that a sliding window
cuts some off, and far enough from position 0 that a wrong angle shows. Half of the rows enter each part so small that
an epsilon shows, and that what a layer adds is not hidden by what it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from space_kernels.fp8 import FORMAT, nearest
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.int8_linear import Int8Weights
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from space_model.checkpoint import family
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts
from space_model.networks.each_layer import AroundLayer, RunLayer, each_layer

NUM_ROWS = 24
"""More than a page of 16."""

CONTEXT, LONGEST_CONTEXT = 768, 8192
"""Keys in front of the rows: so many, or as many as the widest sliding window up to the other has."""

FREQUENT_IDS = 1536
"""Ids below are the bytes and the first merges of most vocabularies; all that are embedded lie there."""

HEAD_IDS = 4096
"""Logits of so many ids are compared, all over the vocabulary."""

SMALL_ROWS = (-3.3, -0.3)
"""Powers of ten: from and to what root mean square rows enter a part that do not enter it as they are."""

LARGE_ROWS = (0.0, 1.5)
"""Powers of ten: how many times larger than they are rows enter the head."""

CHECKED_WEIGHTS = 250_000_000
"""Layers are checked up to so many weights: each kind of layer, the last one, and others evenly."""


@dataclass(frozen=True)
class ProbeRows:
    """The rows of the check."""

    ids: tuple[int, ...]
    start: int  # position of the first: the keys of the context

    @classmethod
    def of(cls, model: PreTrainedModel, window: int) -> ProbeRows:
        """For a model that sequences of up to `window` positions go through."""
        vocab_size = len(model.get_input_embeddings().weight)
        count = min(NUM_ROWS, window)
        most = min(vocab_size, FREQUENT_IDS)
        ids = tuple((251 * i * i + 97 * i + 31) % most for i in range(count))
        context = CONTEXT
        for sliding in _windows(model):
            if sliding <= LONGEST_CONTEXT:
                context = max(context, sliding)
        return cls(ids, max(0, min(context, window - count)))


@dataclass(frozen=True)
class Made:
    """One part's results for the rows."""

    exact: Tensor  # in wide numbers
    usual: Tensor  # transformers', in the serving dtype


@dataclass
class LayerRows:
    """One layer's."""

    number: int
    given: Tensor  # [R, hidden]
    out: Made  # [R, hidden]
    keys: Made  # [G, R, head dim], as they go into the cache
    values: Made
    is_routed: bool  # has experts, of which a rounding may choose another


@dataclass
class Reference:
    """What the model says of the rows, part by part."""

    rows: ProbeRows
    entry: Made  # [R, hidden]: what the first layer is given
    layers: list[LayerRows]
    norm_given: Tensor
    norm: Made
    head_given: Tensor
    head_ids: Tensor  # of which the logits are
    logits: Made | None  # [R, ids]; None: the model's head is not read
    contexts: Contexts
    longest_sum: int  # terms of one

    def with_head(self, weight: Tensor, dtype: torch.dtype) -> Reference:
        """With the logits of a plain head, [ids, hidden]; a last rank may have no ids."""
        if not len(weight):
            return self
        wide = self.norm.exact.dtype
        ids = _spread(len(weight), weight.device)
        exact = F.linear(self.head_given.to(wide), weight[ids].to(wide))
        return replace(self, head_ids=ids, logits=Made(exact, F.linear(self.head_given, weight[ids].to(dtype))))


def _spread(vocab_size: int, device: torch.device) -> Tensor:
    """Ids all over the vocabulary."""
    return torch.arange(0, vocab_size, max(1, -(-vocab_size // HEAD_IDS)), device=device)


@torch.no_grad()
def reference(model: PreTrainedModel, facts: ModelFacts) -> Reference:
    """Of a model that was loaded and not taken apart yet; it is left as it was. One layer is in memory in wide numbers.

    A rank's part is a model of its own here: what others would add to its sums is left out. Raises UnsupportedModel if
    the model cannot be run so.
    """
    walk = _Walk(model, facts)
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # others take no wide numbers
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
        self._checked = set(_checked(self._layers))
        self._contexts = Contexts(facts, self._rows.start, _windows(model), capped=_has_caps(model))
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        self._has_head = isinstance(getattr(head, "weight", None), Tensor) and head.weight.device.type != "meta"
        vocab_size = len(head.weight) if self._has_head else len(embedding)
        self._head_ids = _spread(vocab_size, facts.device)

    def run(self) -> Reference:
        rows, parts = self._rows, len(self._layers)
        given: dict[int, Tensor] = {}
        exact_out: dict[int, Tensor] = {}
        usual_out: dict[int, Tensor] = {}
        cache = [_ContextLayer(self._contexts) for _ in range(parts)]
        entries: list[Tensor] = []
        norms: list[Tensor] = []
        logits: list[Tensor | None] = []

        def exactly(number: int, hidden: Tensor, run: RunLayer) -> Tensor:
            if number == 0:
                entries.append(hidden[0])
            if number in self._checked:
                given[number] = self._input(hidden[0])
                with self._held(number, self._wide):
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
                    number,
                    given[number],
                    Made(exact_out[number], usual_out[number]),
                    Made(*cache[number].keys_seen),
                    Made(*cache[number].values_seen),
                    _is_routed(self._layers[number]),
                )
                for number in sorted(self._checked)
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
        """[R, hidden] for a part: half of the rows as they are, half from so small that an epsilon counts."""
        whole = len(hidden) // 2
        sizes = torch.logspace(*SMALL_ROWS, len(hidden) - whole, dtype=self._wide, device=hidden.device)
        small = hidden[whole:].to(self._wide)
        small = small * (sizes[:, None] / small.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-30))
        return torch.cat([hidden[:whole].to(self._wide), small]).to(self._dtype)

    def _head_input(self, normed: Tensor) -> Tensor:
        """[R, hidden] for the head: half of the rows as they are, half so large that a cap on logits counts."""
        whole = len(normed) // 2
        sizes = torch.logspace(*LARGE_ROWS, len(normed) - whole, dtype=self._wide, device=normed.device)
        return torch.cat([normed[:whole], normed[whole:] * sizes[:, None]]).to(self._dtype)

    def _held(self, number: int, dtype: torch.dtype) -> AbstractContextManager[None]:
        return _held(self._layers[number], self._dtype, dtype, eight_bits=self._facts.eight_bits)

    def _pass(self, around: AroundLayer, cache: Sequence[_ContextLayer], norms: list[Tensor]) -> Tensor | None:
        """The logits of the head's input. What the norm makes of its own is put on `norms`, the exact first."""
        rows, device = self._rows, self._facts.device

        def note(base: nn.Module, inputs: object, out: Any) -> Any:
            norms.append(out.last_hidden_state[0])
            out.last_hidden_state = self._head_input(norms[0]).to(norms[-1].dtype)[None]
            return out

        path, _ = family.decoder_layers(self._base)  # OPT's whole model calls what has the layers, and not its base
        hook = self._base.get_submodule(path.rpartition(".")[0]).register_forward_hook(note)
        try:
            with each_layer(self._base, around):
                out = (self._model if self._has_head else self._base)(
                    input_ids=torch.tensor([rows.ids], device=device),
                    position_ids=torch.arange(rows.start, rows.start + len(rows.ids), device=device)[None],
                    past_key_values=Cache(layers=list(cache)),
                    use_cache=True,
                )
        finally:
            hook.remove()
        logits: Tensor | None = out.logits[0] if self._has_head else None
        return logits

    @contextmanager
    def _around_layers(self, dtype: torch.dtype) -> Iterator[None]:
        """What stands around the layers in `dtype`: of the embedding the frequent ids, of the head those compared."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        inside = {module for layer in self._layers for module in layer.modules()}
        swaps = _Swaps()
        swaps.put(embedding._parameters, "weight", embedding.weight[:FREQUENT_IDS].to(dtype))
        padding = getattr(embedding, "padding_idx", None)
        embedding.padding_idx = None
        if self._has_head:
            weight = head.weight[self._head_ids]
            if self._facts.eight_bits:
                weight = Int8Weights.of(weight).dense()
            swaps.put(head._parameters, "weight", weight.to(dtype))
            if head.bias is not None:
                swaps.put(head._parameters, "bias", head.bias[self._head_ids].to(dtype))
        for module in self._model.modules():
            if module not in inside and module is not embedding and module is not head:
                swaps.widen(module, self._dtype, dtype)
        try:
            yield
        finally:
            swaps.undo()
            embedding.padding_idx = padding


class Contexts:
    """Keys and values that the rows stand behind: like those of the rows themselves, and as different as noise.

    Values at the edges of the sliding windows are loud: a window that is off by one shows. Where scores have a cap, one
    key in eight is so large that it is reached.
    """

    def __init__(self, facts: ModelFacts, length: int, windows: Sequence[int], *, capped: bool) -> None:
        self._facts, self.length, self._capped = facts, length, capped
        self._noise: dict[tuple[int, ...], Tensor] = {}
        self._edges = [(length - window, window) for window in windows if 0 <= length - window < length]

    def of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """[G, R, head dim] of the rows -> [G, length, head dim] in the serving dtype, as pages keep them."""
        loudness = torch.ones(self.length, device=keys.device)
        for first, window in self._edges:
            loudness[first : first + keys.shape[1]] = 2.0 * window**0.5
        size = torch.ones(self.length, device=keys.device)
        if self._capped:
            size[::8] = torch.logspace(0.3, 1.2, len(size[::8]), device=keys.device)
        return self.kept(self._like(keys, 1) * size[:, None]), self.kept(self._like(values, 2) * loudness[:, None])

    @property
    def has_float8(self) -> bool:
        """Pages are of eight bits."""
        return self._facts.kv_dtype is FORMAT

    def kept(self, rows: Tensor) -> Tensor:
        """As pages keep keys and values, in the serving dtype."""
        rows = rows.to(self._facts.dtype)
        return nearest(rows).to(rows.dtype) if self.has_float8 else rows

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
    """One layer of a cache: the context, and what comes behind it, first in wide numbers, then in the serving dtype."""

    def __init__(self, contexts: Contexts) -> None:
        super().__init__()
        self.keys_seen: list[Tensor] = []
        self.values_seen: list[Tensor] = []
        self._contexts = contexts

    def get_seq_length(self) -> int:
        return self._contexts.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._contexts.length + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *others: object, **more: object
    ) -> tuple[Tensor, Tensor]:
        joined = []
        for seen, states in ((self.keys_seen, key_states[0]), (self.values_seen, value_states[0])):
            kept = self._contexts.kept(states).to(states.dtype) if self._contexts.has_float8 else states
            seen.append(states if not seen else kept)
            joined.append(kept)
        in_front = self._contexts.of(self.keys_seen[0], self.values_seen[0])
        keys, values = (torch.cat([a.to(b.dtype), b], dim=1)[None] for a, b in zip(in_front, joined, strict=True))
        return keys, values


class _Swaps:
    """Tensors of modules that others stand in for, for a while."""

    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, where: dict[str, Any], name: str, tensor: Tensor) -> None:
        """`where`: a module's parameters, or buffers."""
        self._undo.append((where, name, where[name]))
        where[name] = nn.Parameter(tensor, requires_grad=False) if isinstance(where[name], nn.Parameter) else tensor

    def put_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self._undo.append((parent._modules, name, parent._modules[name]))
        parent._modules[name] = module

    def widen(self, module: nn.Module, narrow: torch.dtype, dtype: torch.dtype) -> None:
        """The module's own tensors of the serving dtype."""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and tensor.dtype is narrow and tensor.dtype is not dtype:
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


@contextmanager
def _held(layer: nn.Module, narrow: torch.dtype, dtype: torch.dtype, *, eight_bits: bool) -> Iterator[None]:
    """The layer with its weights as they are held, in `dtype`: where they have eight bits, what these stand for."""
    swaps = _Swaps()
    try:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if dtype is not narrow and (dense := _dense(child, narrow, dtype)) is not None:
                    swaps.put_module(parent, name, dense)
        for module in layer.modules():
            if eight_bits:
                for name in _quantised(module):
                    weight = module.get_parameter(name)
                    whole = [Int8Weights.of(part).dense().to(dtype) for part in weight.view(-1, *weight.shape[-2:])]
                    swaps.put(module._parameters, name, torch.stack(whole).view(weight.shape))
            swaps.widen(module, narrow, dtype)
        yield
    finally:
        swaps.undo()


def _quantised(module: nn.Module) -> Sequence[str]:
    """The module's weights that are held in whole numbers where any are (see make_row_invariant)."""
    if type(module) is nn.Linear:
        return ["weight"]
    return ["gate_up_proj", "down_proj"] if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) else []


def _dense(module: nn.Module, narrow: torch.dtype, dtype: torch.dtype) -> nn.Module | None:
    """What stands for a linear that is held in few bits; None: it is none."""
    if isinstance(module, Fp8Linear):
        bias = None if module.bias is None else module.bias.to(dtype)
        return _Dense(module.numbers.to(dtype) * module.scale.to(dtype)[:, None], bias)
    size = getattr(module, "in_features", None)
    if isinstance(module, nn.Linear) or not isinstance(size, int) or not hasattr(module, "out_features"):
        return None
    # a library's own: its product with ones says what it multiplies by
    some = next((t for t in (*module.parameters(), *module.buffers())), None)
    device = None if some is None else some.device
    none = module(torch.zeros(1, size, dtype=narrow, device=device))
    weight = module(torch.eye(size, dtype=narrow, device=device)).to(dtype) - none.to(dtype)
    return _Dense(weight.T, none[0].to(dtype))


def _windows(model: PreTrainedModel) -> list[int]:
    """The sliding windows of the model's layers."""
    modules = (*model.base_model.modules(), model.config)
    found = {getattr(module, "sliding_window", None) for module in modules}
    return sorted(window for window in found if isinstance(window, int) and window > 0)


def _has_caps(model: PreTrainedModel) -> bool:
    """Scores of attention go through a cap."""
    caps = {getattr(module, "attn_logit_softcapping", None) for module in (*model.base_model.modules(), model.config)}
    return caps != {None}


def _is_routed(layer: nn.Module) -> bool:
    return any("expert" in name for name, _ in layer.named_modules())


def _checked(layers: Sequence[nn.Module]) -> list[int]:
    """Numbers of the layers to check: the first of each kind, the last, and as many others as are not too many."""
    chosen = {*first_of_kinds(layers), len(layers) - 1}
    room = CHECKED_WEIGHTS // max(1, *(sum(p.numel() for p in layer.parameters()) for layer in layers))
    if room >= len(layers):
        return list(range(len(layers)))
    return sorted(chosen | {number * len(layers) // room for number in range(room - len(chosen))})


def first_of_kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Numbers of the first layers of each kind: they have the same modules and windows as those of their kind."""
    kinds: dict[object, int] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(tuple((type(m), getattr(m, "sliding_window", None)) for m in layer.modules()), number)
    return list(kinds.values())
