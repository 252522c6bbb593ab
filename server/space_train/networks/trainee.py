"""Everything a run trains, and its losses: decoder, masks, gated adapters and draft head (SPACE §4), as one module.

Training runs mask rows in a separate pass, so the adapters' gate is a switch: on in that pass only. Losses are
sums over rows, so that parts of an update and processes add up exactly.

Letters: `B` texts, `R` rows, `K` keys, `N` rows of a loss, `E` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from space_model.adapters import GatedLora
from space_model.checkpoint import family
from space_model.model_error import UnsupportedModel
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, causal
from space_train.train_plan import HeadForm, Method, TrainPlan

CHUNK = 4096  # rows whose logits are in memory at once

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """Sums in nats."""

    next_token: Tensor
    masks: Tensor  # masks alone
    head: Tensor  # masks with the draft head

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.next_token + other.next_token, self.masks + other.masks, self.head + other.head)

    @classmethod
    def zero(cls, device: torch.device) -> Losses:
        return cls(*(torch.zeros((), device=device) for _ in range(3)))


def hard(logits: Logits, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log q(label) over rows: hidden [N, E], labels [N]."""

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits(rows), wanted, reduction="sum")

    return _in_chunks(part, hidden, labels)


def soft(logits: Logits, hidden: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -w·Σ p·log q over rows: hidden [N, E]; p from the teacher's hidden rows [N, E]; weights [N]."""

    def part(rows: Tensor, teachers: Tensor, some: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits(teachers).softmax(-1)
        return -((p * F.log_softmax(logits(rows), dim=-1)).sum(-1) * some).sum()

    return _in_chunks(part, hidden, teacher, weights)


def weighted(logits: Logits, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -w·log q(label) over rows."""

    def part(rows: Tensor, wanted: Tensor, some: Tensor) -> Tensor:
        return (F.cross_entropy(logits(rows), wanted, reduction="none") * some).sum()

    return _in_chunks(part, hidden, labels, weights)


@torch.no_grad()
def chances(logits: Logits, hidden: Tensor, ids: Tensor) -> Tensor:
    """[N] log-probability of each row's id, from `hidden` [N, E]."""
    parts = zip(torch.split(hidden, CHUNK), torch.split(ids, CHUNK), strict=True)
    return torch.cat([logits(rows).log_softmax(-1).gather(1, some[:, None])[:, 0] for rows, some in parts])


@torch.no_grad()
def best(logits: Logits, hidden: Tensor) -> Tensor:
    """[N] most likely id of each row."""
    return torch.cat([logits(rows).argmax(-1) for rows in torch.split(hidden, CHUNK)])


def survival(chance: Tensor, depth: Tensor) -> Tensor:
    """[B, M] probability that all drafts before each mask are accepted: the product of the teacher's in its group.
    `chance` [B, M]: log-probability of each mask's own target; groups are consecutive, each from depth 1 on."""
    chance = chance.double()  # cumulative sums over a whole row lose precision in float32
    before = chance.cumsum(1) - chance
    first = torch.arange(depth.shape[1], device=depth.device) - (depth - 1)
    return (before - before.gather(1, first)).exp().float()


def _in_chunks(part: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of `part` over chunks of rows; with several chunks, the backward pass recomputes their logits."""
    if len(hidden) <= CHUNK:
        return part(hidden, *others)
    pieces = zip(*(torch.split(tensor, CHUNK) for tensor in (hidden, *others)), strict=True)
    total = hidden.new_zeros((), dtype=torch.float32)
    for piece in pieces:
        total = total + checkpoint(part, *piece, use_reentrant=False)
    return total


class AdaptedLinear(nn.Module):
    """W·x, plus scale·B·A·x while the gate is on."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, gate: Gate) -> None:
        super().__init__()
        self.linear, self.scale, self.gate = linear, scale, gate
        self.a = nn.Parameter(torch.zeros(rank, linear.in_features, device=linear.weight.device))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if not self.gate.is_on:
            return y
        # A frozen base may be in half precision; the adapters are in float32.
        return y + self.scale * F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


class Gate:
    """Switch that is on while the rows of the current pass are masks."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Switch the adapters on inside the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


class Adapters(nn.Module):
    """The adapters of one model, and the input embeddings of its masks."""

    def __init__(self, model: PreTrainedModel, *, rank: int, alpha: float, num_masks: int) -> None:
        """Put an adapter on every linear of the decoder layers of `model`, in place."""
        super().__init__()
        self.gate, self.rank, self.alpha = Gate(), rank, alpha
        hidden, device = int(model.config.hidden_size), model.get_input_embeddings().weight.device
        self.mask_embeddings = nn.Parameter(torch.zeros(num_masks, hidden, device=device))
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".layers." in f".{name}"
        }
        self._adapted: dict[str, AdaptedLinear] = {}
        for name, linear in linears.items():
            parent, _, leaf = name.rpartition(".")
            adapted = AdaptedLinear(linear, rank, alpha / rank, self.gate)
            setattr(model.get_submodule(parent), leaf, adapted)
            self._adapted[name] = adapted
        self.pairs = nn.ParameterList([part for adapted in self._adapted.values() for part in (adapted.a, adapted.b)])

    def initialise(self, generator: torch.Generator, mean: Tensor, spread: float) -> None:
        """Initialise A randomly, B to zero, and mask inputs near `mean` [E]."""
        with torch.no_grad():
            for adapted in self._adapted.values():
                noise = torch.randn(adapted.a.shape, generator=generator)
                adapted.a.copy_(noise * adapted.a.shape[1] ** -0.5)
            noise = torch.randn(self.mask_embeddings.shape, generator=generator)
            self.mask_embeddings.copy_(mean + spread * noise.to(mean.device))

    def export(self, dtype: torch.dtype) -> GatedLora:
        """Return the adapter in the form used for serving."""
        pairs = {
            name: (adapted.a.detach().to(dtype), adapted.b.detach().to(dtype))
            for name, adapted in self._adapted.items()
        }
        masks = self.mask_embeddings.detach().to(dtype)
        return GatedLora(mask_embeddings=masks, pairs=pairs, scale=self.alpha / self.rank)

    def take(self, adapter: GatedLora) -> None:
        """Load the weights of a trained adapter, rescaled to this alpha."""
        with torch.no_grad():
            self.mask_embeddings.copy_(adapter.mask_embeddings)
            for name, (a, b) in adapter.pairs.items():
                self._adapted[name].a.copy_(a)
                self._adapted[name].b.copy_(b * (adapter.scale * self.rank / self.alpha))


class DraftHead(nn.Module):
    """The hidden row of a mask, corrected by the token before its target. mlp: h' = h + W2·silu(W1·[h ; s·e(previous)])
    low-rank: h' = h + W2·W1·(s·e(previous))"""

    def __init__(
        self, hidden_size: int, width: int = 384, embedding_scale: float = 8.0, form: HeadForm = HeadForm.MLP
    ) -> None:
        super().__init__()
        inputs = 2 * hidden_size if form is HeadForm.MLP else hidden_size
        self.w1 = nn.Parameter(torch.zeros(width, inputs))
        self.w2 = nn.Parameter(torch.zeros(hidden_size, width))
        self.embedding_scale, self.form = embedding_scale, form

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise W1 randomly and W2 to zero, so that the head starts as the identity."""
        with torch.no_grad():
            self.w1.copy_(torch.randn(self.w1.shape, generator=generator) * self.w1.shape[1] ** -0.5)
            self.w2.zero_()

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Correct `hidden` [..., E] (after the final norm) by the embedding `previous` [..., E]; returns [..., E]."""
        scaled = self.embedding_scale * previous.to(hidden.dtype)
        w1, w2 = self.w1.to(hidden.dtype), self.w2.to(hidden.dtype)
        if self.form is HeadForm.LOW_RANK:
            return hidden + F.linear(F.linear(scaled, w1), w2)
        return hidden + F.linear(F.silu(F.linear(torch.cat((hidden, scaled), dim=-1), w1)), w2)


class Decoder(nn.Module):
    """The model's body, output head and embedding. Letters: `B` texts, `R` rows, `K` keys, `E` hidden size, `V`
    vocabulary."""

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        super().__init__()
        check_is_trainable(model)
        self.model = model
        config = model.config
        attention = attention_for(model)
        if attention != config._attn_implementation:
            model.set_attn_implementation(attention)
        self.attention = attention
        self._scale, self._softcap = family.head_scale(config), family.head_softcap(config)
        self._windows = _windows(config)
        self._entering: Tensor | None = None  # first-layer inputs that replace the embeddings of the current pass
        model.base_model.layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        body: Any = torch.compile(model.base_model, dynamic=False) if compile else model.base_model
        self._body: Callable[..., Any] = body.__call__  # not a submodule: the state would contain each weight twice

    @property
    def hidden_size(self) -> int:
        """E"""
        return int(self.model.config.hidden_size)

    @property
    def embedding(self) -> Tensor:
        """[V, E], unscaled"""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def rows(
        self,
        ids: Tensor,
        positions: Tensor,
        visible: Tensor,
        *,
        key_positions: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return hidden rows [B, R, E], after the final norm, of `ids` [B, R] at `positions` [B, R]. `visible` [B, R,
        K] bool; `key_positions` [B, K], if keys are not the rows themselves. Keys of `cache` come first, and the rows'
        own are appended to it. `inputs` [B, R, E] replace the embeddings of `ids`."""
        keys = positions if key_positions is None else key_positions
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._masks(visible, positions, keys),
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        self._entering = inputs
        try:
            hidden: Tensor = self._body(**arguments).last_hidden_state
        finally:
            self._entering = None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V] float32, with the family's scale and soft cap."""
        logits = self.model.get_output_embeddings()(hidden).float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E], unscaled"""
        return F.embedding(ids, self.embedding)

    def _enter(self, _: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before the first layer: replace the (scaled) embeddings by `inputs`."""
        if self._entering is None:
            return rows, keywords
        if rows:
            return (self._entering.to(rows[0].dtype), *rows[1:]), keywords
        return rows, keywords | {"hidden_states": self._entering.to(keywords["hidden_states"].dtype)}

    def _masks(self, visible: Tensor, positions: Tensor, keys: Tensor) -> Any:
        """Return the attention masks for transformers: one, or one per layer type."""
        if not self._windows:
            return self._mask(visible)
        near = {
            kind: self._mask(visible if window is None else visible & (positions[..., None] - keys[:, None] < window))
            for kind, window in self._windows.items()
        }
        return near if len(near) > 1 or "full_attention" in near else next(iter(near.values()))

    def _mask(self, visible: Tensor) -> Tensor | BlockMask:
        """Convert `visible` [B, R, K] bool to the form of the model's attention function."""
        if self.attention == "flex_attention":
            return block_mask(visible)
        if self.attention == "eager":  # adds it to the scores
            scores = torch.zeros(visible.shape, dtype=self.embedding.dtype, device=visible.device)
            return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)[:, None]
        return visible[:, None]


def check_is_trainable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if the body is not built like Llama's. Works on a meta model, without weights."""
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise UnsupportedModel(
            f"Models of type {model.config.model_type!r} cannot be trained: training puts rows at free positions, in "
            f"decoders of the Llama kind, and {type(model.base_model).__name__} has no list of `layers` right in its "
            "body. Take a model that has, such as Llama, Mistral, Qwen, Gemma or Phi."
        )


def attention_for(model: PreTrainedModel) -> str:
    """Return the attention function of transformers to use: it must accept our masks and fit the model family. Flash
    attention takes no masks; sdpa leaves out a soft cap of the scores; flex_attention, fastest on a GPU, has no
    dropout."""
    config, own = model.config, str(model.config._attn_implementation)
    has_dropout = bool(getattr(config, "attention_dropout", None))
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if model._supports_flex_attn and not has_dropout and (own == "flex_attention" or torch.cuda.is_available()):
        return "flex_attention"
    return "sdpa" if model._supports_sdpa and not has_softcap and own != "eager" else "eager"


def block_mask(visible: Tensor) -> BlockMask:
    """Convert `visible` [B, R, K] bool for flex_attention, which skips blocks of 128 without visible keys."""

    def sees(text: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = visible[text, row, key]
        return seen

    texts, rows, keys = visible.shape
    return create_block_mask(sees, texts, None, rows, keys, device=str(visible.device))


def _windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each layer type; empty if all layers have full attention."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window:
        return {kind: window if kind == "sliding_attention" else None for kind in (*kinds, "full_attention")}
    if window and not kinds and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": int(window)}
    return {}


T = TypeVar("T")


class Trainee(nn.Module):
    """A decoder, its masks (ids of its own vocabulary, or private inputs with adapters) and its draft head."""

    def __init__(self, model: PreTrainedModel, plan: TrainPlan, mask_ids: list[int]) -> None:
        """`mask_ids`: one per mask, a shared one repeated; empty if the masks have their own input embeddings."""
        super().__init__()
        self.plan, self.mask_ids = plan, mask_ids
        model.requires_grad_(plan.trains_base)
        self.adapters: Adapters | None = None
        if not mask_ids and plan.has_masks:
            self.adapters = Adapters(model, rank=plan.lora_rank, alpha=plan.lora_alpha, num_masks=plan.num_masks)
        if self.adapters is not None and plan.method is not Method.GATED_LORA:
            self.adapters.requires_grad_(False)
        self.decoder = Decoder(model, compile=plan.compile)
        self.head: DraftHead | None = None
        if plan.has_head:
            self.head = DraftHead(self.decoder.hidden_size, plan.head_hidden, plan.head_scale, plan.head)
        if plan.activation_checkpointing and plan.trains_base:
            # transformers renamed it.
            renamed = hasattr(model, "activation_checkpointing_enable")
            name = "activation_checkpointing" if renamed else "gradient_checkpointing"
            getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def forward(self, batch: TrainBatch) -> Losses:
        """Return the losses, summed over the rows of `batch`."""
        losses = Losses.zero(self.decoder.embedding.device)
        if batch.plain is not None:
            losses = losses + self._plain(batch.plain)
        if batch.masked is not None and batch.anchors is not None:
            return losses + self._masked(batch.masked, batch.anchors, batch.own_draft_rows)
        # Processes wait for each other's gradients, so these parts need zero gradients even without masks.
        taught = [part for part in (self.adapters, self.head) if part is not None]
        learning = [p for part in taught for p in part.parameters() if p.requires_grad]
        nothing = sum((0.0 * parameter.sum() for parameter in learning), start=losses.head)
        return Losses(losses.next_token, losses.masks, nothing)

    def reading(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads the weights, and return its result; sharded weights are gathered meanwhile."""
        return work()

    def _plain(self, texts: Texts) -> Losses:
        """Return the ordinary loss alone, which is not computed for a frozen base."""
        zero = Losses.zero(texts.ids.device)
        if not self.plan.trains_base:
            return zero
        positions = self._positions(texts)
        hidden = self.decoder.rows(texts.ids, positions, causal(texts.document))
        return Losses(self._next_token(hidden, texts), zero.masks, zero.head)

    def _masked(self, texts: Texts, anchors: AnchorRows, own_draft_rows: Tensor | None) -> Losses:
        plan, last = self.plan, texts.ids.shape[1] - 1
        real, masks = self.hidden_rows(texts, anchors)
        zero = Losses.zero(texts.ids.device)
        next_token = self._next_token(real, texts) if plan.trains_base else zero.next_token

        learns = anchors.learns
        source = anchors.positions.clamp(max=last)
        labels = texts.ids.gather(1, anchors.target.clamp(max=last))
        teacher = real.detach().gather(1, source[..., None].expand(-1, -1, real.shape[2]))  # [B, M, E]
        weights = torch.ones_like(learns, dtype=torch.float32)
        if plan.survival:
            chance = chances(self.decoder.logits, teacher.flatten(0, 1), labels.flatten()).view_as(weights)
            weights = survival(chance, anchors.depth)
        mask_loss = zero.masks
        if plan.mask_loss_weight and (plan.method is not Method.HEAD):
            mask_loss = self._learn(masks[learns], teacher[learns], labels[learns], weights[learns])
        if self.head is None:
            return Losses(next_token, mask_loss, zero.head)
        previous = texts.ids.gather(1, source)
        if own_draft_rows is not None:
            previous = torch.where(own_draft_rows, self._own_drafts(masks, previous), previous)
        guided = self.head(masks, self.decoder.embed(previous))
        head_loss = self._learn(guided[learns], teacher[learns], labels[learns], weights[learns])
        return Losses(next_token, mask_loss, head_loss)

    def hidden_rows(self, texts: Texts, anchors: AnchorRows) -> tuple[Tensor, Tensor]:
        """Return hidden rows of the real tokens [B, L, E] and of the masks [B, M, E]. A trained base runs both in one
        pass. A frozen base runs real rows once without gradients, and only mask rows are differentiated."""
        positions, seen = self._positions(texts), causal(texts.document)
        visible = anchors.visible(texts.document)
        if self.plan.trains_base:
            L, M = seen.shape[1], visible.shape[1]
            whole = torch.cat((torch.cat((seen, seen.new_zeros(len(seen), L, M)), dim=2), visible), dim=1)
            ids = torch.cat((texts.ids, self._mask_ids(anchors)), dim=1)
            hidden = self.decoder.rows(ids, torch.cat((positions, anchors.positions), dim=1), whole)
            return hidden[:, :L], hidden[:, L:]
        cache = DynamicCache()
        with torch.no_grad():
            real = self.decoder.rows(texts.ids, positions, seen, cache=cache)
        with self._mask_rows():
            ids, keys = self._mask_ids(anchors), torch.cat((positions, anchors.positions), dim=1)
            inputs = None if self.adapters is None else self.adapters.mask_embeddings[anchors.depth - 1]
            placed = ids, anchors.positions, visible
            masks = self.decoder.rows(*placed, key_positions=keys, cache=cache, inputs=inputs)
        return real, masks

    @contextmanager
    def _mask_rows(self) -> Iterator[None]:
        """Context of the mask rows' pass over a frozen base: adapters on, with gradients if they are trained."""
        learning = torch.is_grad_enabled() and self.plan.method is Method.GATED_LORA
        gate = nullcontext() if self.adapters is None else self.adapters.gate.open()
        with gate, torch.set_grad_enabled(learning):
            yield

    def _learn(self, hidden: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        if self.plan.distill:
            return soft(self.decoder.logits, hidden, teacher, weights)
        return weighted(self.decoder.logits, hidden, labels, weights)

    def _next_token(self, real: Tensor, texts: Texts) -> Tensor:
        target = texts.is_ordinary_target[:, 1:]
        return hard(self.decoder.logits, real[:, :-1][target], texts.ids[:, 1:][target])

    @torch.no_grad()
    def _own_drafts(self, masks: Tensor, previous: Tensor) -> Tensor:
        """[B, M] the head's draft in the row before each mask, given the text's token `previous` [B, M] there."""
        assert self.head is not None
        guided = self.head(masks, self.decoder.embed(previous)).flatten(0, 1)
        return best(self.decoder.logits, guided).view_as(previous).roll(1, dims=1)

    def _mask_ids(self, anchors: AnchorRows) -> Tensor:
        """[B, M] mask ids; an arbitrary id if masks have their own input embeddings."""
        if not self.mask_ids:
            return torch.zeros_like(anchors.depth)
        return torch.tensor(self.mask_ids, device=anchors.depth.device)[anchors.depth - 1]

    @staticmethod
    def _positions(texts: Texts) -> Tensor:
        return torch.arange(texts.ids.shape[1], device=texts.ids.device).expand_as(texts.ids)
