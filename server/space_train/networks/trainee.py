"""Everything a run trains, and its losses: decoder, masks, gated adapters and draft head (SPACE §4), as one module.

Training runs mask rows in a separate pass, so the adapters' gate is a switch: on in that pass only. Losses are
sums over rows, so that parts of an update and processes add up exactly.

Letters: `B` texts, `R` rows, `K` keys, `N` rows of a loss, `E` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from space_kernels.training import DraftLoss
from space_model.checkpoint import family
from space_model.checkpoint.recurrent_layers import layer_states
from space_model.model_error import UnsupportedModel
from space_model.networks.altup import num_versions
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache, PreTrainedModel

from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, causal
from space_train.networks import mask_attention
from space_train.networks.adapters import Adapters, DraftHead
from space_train.networks.frozen_layers import is_frozen_linear, matmul_dtype, replace_frozen_layers
from space_train.networks.losses import FrozenOutput, Losses, distilled, hard, reach_probability, soft
from space_train.networks.mask_attention import QueryBlock, mask_query_blocks, query_blocks, real_query_blocks
from space_train.networks.recurrent_head import RecurrentHeadModule
from space_train.train_plan import DraftObjective, Method, TrainPlan


class Decoder(nn.Module):
    """The model's body, output head and embedding. Letters: `B` texts, `R` rows, `K` keys, `E` hidden size, `V`
    vocabulary."""

    def __init__(self, model: PreTrainedModel, *, compile: bool = False, has_masks: bool = True) -> None:
        super().__init__()
        check_is_trainable(model)
        self.model = model
        config = model.config
        attention = attention_for(model, has_masks=has_masks)
        if attention != config._attn_implementation:
            model.set_attn_implementation(attention)
        self.attention = attention
        goes_by_name = getattr(model, "_supports_attention_backend", False)  # Falcon's layers compare it with "sdpa"
        self._can_use_query_blocks = attention == "sdpa" and not compile and goes_by_name
        if self._can_use_query_blocks:  # computes as sdpa where a pass gives no query blocks
            model.set_attn_implementation(mask_attention.NAME)
        self._scale, self._softcap = family.head_scale(config), family.head_softcap(config)
        self._windows = _windows(model)
        self._entering: Tensor | None = None  # first-layer inputs that replace the embeddings of the current pass
        if num_versions(config) > 1:  # all versions of a row are made of its embedding
            model.get_input_embeddings().register_forward_hook(self._embed)
        else:
            family.decoder_layers(model.base_model)[1][0].register_forward_pre_hook(self._enter, with_kwargs=True)
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
        visible: Tensor | Sequence[QueryBlock],
        *,
        key_positions: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return hidden rows [B, R, E], after the final norm, of `ids` [B, R] at `positions` [B, R]. `visible`: [B, R,
        K] bool, or query blocks if the decoder `uses_query_blocks`; `key_positions` [B, K], if keys are not the rows
        themselves. Keys of `cache` come first, and the rows' own are appended to it. `inputs` [B, R, E] replace the
        embeddings of `ids`."""
        keys = positions if key_positions is None else key_positions
        blocks = None if isinstance(visible, Tensor) else visible
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._masks(visible, positions, keys) if isinstance(visible, Tensor) else _UNUSED_MASK,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        self._entering = inputs
        try:
            with query_blocks(blocks):
                hidden: Tensor = self._body(**arguments).last_hidden_state
        finally:
            self._entering = None
        return hidden

    @property
    def uses_query_blocks(self) -> bool:
        """Whether the attention of a frozen base is computed by query blocks: on a CPU, without windows, and with keys
        and values of one head size."""
        has_one_size = getattr(self.model.config, "v_head_dim", None) is None
        is_on_cpu = self.embedding.device.type == "cpu"
        return self._can_use_query_blocks and not self._windows and has_one_size and is_on_cpu

    @property
    def heads_per_key(self) -> int:
        """Query heads that share a key head."""
        heads, kv_heads, _ = family.sizes(self.model.config)
        return heads // kv_heads

    @property
    def frozen_output(self) -> FrozenOutput | None:
        """The output head, if it is a plain linear that is neither trained nor sharded; else None."""
        output = self.model.get_output_embeddings()
        if not is_frozen_linear(output):
            return None
        dtype, bias = matmul_dtype(output.weight), output.bias
        bias = None if bias is None else bias.to(dtype)
        return FrozenOutput(output.weight.to(dtype), bias, self._scale, self._softcap)

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

    def _embed(self, _: nn.Module, ids: object, rows: Tensor) -> Tensor:
        """Hook behind the embedding: replace the (scaled) embeddings by `inputs`."""
        return rows if self._entering is None else self._entering.to(rows.dtype)

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


_UNUSED_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Keeps transformers from making a mask of its own; query blocks do not read it."""


def check_is_trainable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if its mask rows cannot be computed at any position. Works on a meta model, without
    weights."""
    kind = repr(model.config.model_type)
    if layer_states(model.config):
        raise UnsupportedModel(
            f"Models of type {kind} have recurrent layers and cannot be trained: training adds mask rows at positions "
            "inside a text, and each would need a recurrent state of its own. Take a model whose layers all attend, "
            "such as Llama, Mistral, Qwen3, Gemma or Phi; this one drafts by lookup."
        )
    if family.has_linear_biases(model.config):
        raise UnsupportedModel(
            f"Models of type {kind} have linear biases (ALiBi) and cannot be trained: training adds mask rows at "
            "positions inside a text, and the biases are computed from row numbers. Take a model with rotary "
            "positions, such as Llama, Mistral, Qwen, Gemma or Phi."
        )
    if family.is_chunked(model.config) or "local" in (getattr(model.config, "attention_layers", None) or ()):
        raise UnsupportedModel(
            f"Models of type {kind} limit attention by row numbers (chunks or local windows) and cannot be trained: "
            "training adds mask rows at positions inside a text. Take a model whose layers go by positions, such as "
            "Llama, Mistral, Qwen, Gemma or Phi."
        )
    family.name_base(model)
    family.decoder_layers(model.base_model)


def attention_for(model: PreTrainedModel, *, has_masks: bool = True) -> str:
    """Return the attention function of transformers to use: it must accept our masks and fit the model family. Flash
    attention takes no masks; sdpa leaves out a soft cap of the scores; flex_attention, fastest on a GPU for mask rows,
    has no dropout and compiles before the first update."""
    config, own = model.config, str(model.config._attn_implementation)
    has_dropout = bool(getattr(config, "attention_dropout", None))
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    pays = torch.cuda.is_available() and (has_masks or has_softcap)
    if model._supports_flex_attn and not has_dropout and (own == "flex_attention" or pays):
        return "flex_attention"
    return "sdpa" if model._supports_sdpa and not has_softcap and own != "eager" else "eager"


def block_mask(visible: Tensor) -> BlockMask:
    """Convert `visible` [B, R, K] bool for flex_attention, which skips blocks of 128 without visible keys."""

    def sees(text: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = visible[text, row, key]
        return seen

    texts, rows, keys = visible.shape
    return create_block_mask(sees, texts, None, rows, keys, device=str(visible.device))


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the attention window of each layer type; empty if all layers have full attention."""
    config, base = model.config, model.base_model
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if _has_windows(base) else None
    if "sliding_attention" in kinds and window:
        return {kind: window if kind == "sliding_attention" else None for kind in (*kinds, "full_attention")}
    if window and not kinds and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": int(window)}
    return {}


def _has_windows(base: PreTrainedModel) -> bool:
    """Return whether the family's code makes masks with windows, whatever its config names: that of Moshi and of the
    mixtures of Qwen3-VL and Qwen3-Omni names one, and their layers see all tokens."""
    if not hasattr(sys.modules[type(base).__module__], "create_sliding_window_causal_mask"):
        return False
    _, layers = family.decoder_layers(base)
    spans = [module.sliding_window for module in layers.modules() if hasattr(module, "sliding_window")]
    return not spans or any(spans)


OBJECTIVES = {
    DraftObjective.CROSS_ENTROPY: DraftLoss(),
    DraftObjective.ACCEPTANCE: DraftLoss(entropy=0.0, rejection=1.0),
    DraftObjective.LOG_ACCEPTANCE: DraftLoss(entropy=0.0, surprisal=1.0),
    DraftObjective.EXPECTED: DraftLoss(entropy=0.0, rejection=1.0),  # multiplied within each group in `_distilled`
}

T = TypeVar("T")


class Trainee(nn.Module):
    """A decoder, its masks (ids of its own vocabulary, or private inputs with adapters) and its draft heads."""

    def __init__(
        self, model: PreTrainedModel, plan: TrainPlan, mask_ids: list[int], draft_ids: Tensor | None = None
    ) -> None:
        """`mask_ids`: one per mask, a shared one repeated; empty if the masks have their own input embeddings.
        `draft_ids` [D] int64: the draft vocabulary of the recurrent head; None: the whole vocabulary."""
        super().__init__()
        self.plan, self.mask_ids = plan, mask_ids
        family.name_base(model)
        model.requires_grad_(plan.trains_base)
        if not plan.trains_base and not plan.compile and model.device.type == "cpu":
            replace_frozen_layers(model)
        self.adapters: Adapters | None = None
        if not mask_ids and plan.has_masks:
            self.adapters = Adapters(model, rank=plan.lora_rank, alpha=plan.lora_alpha, num_masks=plan.num_masks)
        if self.adapters is not None and plan.method is not Method.GATED_LORA:
            self.adapters.requires_grad_(False)
        self.decoder = Decoder(model, compile=plan.compile, has_masks=plan.has_masks)
        self.head: DraftHead | None = None
        if plan.has_head:
            self.head = DraftHead(self.decoder.hidden_size, plan.head_hidden, plan.head_scale, plan.head)
        self.recurrent: RecurrentHeadModule | None = None
        if plan.has_recurrent_head:
            self.recurrent = RecurrentHeadModule(
                self.decoder.hidden_size, plan.recurrent_head, plan.head_scale, draft_ids
            )
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
        if batch.masked is not None and batch.recurrent is not None and batch.anchors is None:
            return losses + self._recurrent(batch.masked, self.real_rows(batch.masked), batch.recurrent)
        if batch.masked is not None and batch.anchors is not None:
            return losses + self._masked(batch.masked, batch.anchors, batch.recurrent)
        # Processes wait for each other's gradients, so these parts need zero gradients even without masks.
        taught = [part for part in (self.adapters, self.head, self.recurrent) if part is not None]
        learning = [p for part in taught for p in part.parameters() if p.requires_grad]
        nothing = sum((0.0 * parameter.sum() for parameter in learning), start=losses.head)
        return replace(losses, head=nothing)

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
        return replace(zero, next_token=self._next_token(hidden, texts))

    def _masked(self, texts: Texts, anchors: AnchorRows, recurrent: AnchorRows | None) -> Losses:
        plan, last = self.plan, texts.ids.shape[1] - 1
        real, masks = self.hidden_rows(texts, anchors)
        zero = Losses.zero(texts.ids.device)
        next_token = self._next_token(real, texts) if plan.trains_base else zero.next_token

        learns = anchors.learns
        teacher = self._teacher(real, anchors)
        students = dict[str, Tensor]()
        if plan.mask_loss_weight and plan.method is not Method.HEAD:
            students["masks"] = masks[learns]
        if self.head is not None:
            previous = texts.ids.gather(1, anchors.positions.clamp(max=last))
            students["head"] = self.head(masks, self.decoder.embed(previous))[learns]
        if plan.distill:
            sums = self._distilled(list(students.values()), teacher, anchors)
        else:
            labels = texts.ids.gather(1, anchors.target.clamp(max=last))[learns]
            sums = [hard(self.decoder.logits, student, labels) for student in students.values()]
        found = dict(zip(students, sums, strict=True))
        losses = Losses(next_token, found.get("masks", zero.masks), found.get("head", zero.head), zero.recurrent)
        return losses if recurrent is None else losses + self._recurrent(texts, real, recurrent)

    def _recurrent(self, texts: Texts, real: Tensor, anchors: AnchorRows) -> Losses:
        """Return the loss of the recurrent head against the model's own distribution over the draft vocabulary. `real`:
        hidden rows [B, L, E] of the real tokens."""
        assert self.recurrent is not None
        teacher = self._teacher(real, anchors)
        states = self.recurrent.unroll(real.detach(), texts.ids, anchors, self.decoder.embed)
        zero = Losses.zero(texts.ids.device)
        return replace(zero, recurrent=self._distilled([states[anchors.learns]], teacher, anchors, self.recurrent)[0])

    @staticmethod
    def _teacher(real: Tensor, anchors: AnchorRows) -> Tensor:
        """Return the teacher's hidden rows [N, E] of the learning masks, from the real tokens' [B, L, E]."""
        source = anchors.positions.clamp(max=real.shape[1] - 1)
        return real.detach().gather(1, source[..., None].expand(-1, -1, real.shape[2]))[anchors.learns]

    def real_rows(self, texts: Texts) -> Tensor:
        """Return hidden rows of the real tokens [B, L, E] alone, without gradients."""
        decoder, document = self.decoder, texts.document
        visible: Tensor | list[QueryBlock] = causal(document)
        if decoder.uses_query_blocks and not self.plan.trains_base:
            visible = real_query_blocks(document, decoder.heads_per_key, matmul_dtype(decoder.embedding))
        with torch.no_grad():
            return decoder.rows(texts.ids, self._positions(texts), visible)

    def hidden_rows(self, texts: Texts, anchors: AnchorRows) -> tuple[Tensor, Tensor]:
        """Return hidden rows of the real tokens [B, L, E] and of the masks [B, M, E]. A trained base runs both in one
        pass. A frozen base runs real rows once without gradients, and only mask rows are differentiated."""
        positions, document = self._positions(texts), texts.document
        if self.plan.trains_base:
            seen, masks_see = causal(document), anchors.visible(document)
            L, M = seen.shape[1], masks_see.shape[1]
            whole = torch.cat((torch.cat((seen, seen.new_zeros(len(seen), L, M)), dim=2), masks_see), dim=1)
            ids = torch.cat((texts.ids, self._mask_ids(anchors)), dim=1)
            hidden = self.decoder.rows(ids, torch.cat((positions, anchors.positions), dim=1), whole)
            return hidden[:, :L], hidden[:, L:]
        cache = DynamicCache()
        real_see, visible = self._visibility(document, anchors)
        with torch.no_grad():
            real = self.decoder.rows(texts.ids, positions, real_see, cache=cache)
        with self._mask_rows():
            ids, keys = self._mask_ids(anchors), torch.cat((positions, anchors.positions), dim=1)
            inputs = None if self.adapters is None else self.adapters.mask_embeddings[anchors.depth - 1]
            placed = ids, anchors.positions, visible
            masks = self.decoder.rows(*placed, key_positions=keys, cache=cache, inputs=inputs)
        return real, masks

    def _visibility(
        self, document: Tensor, anchors: AnchorRows
    ) -> tuple[Tensor | list[QueryBlock], Tensor | list[QueryBlock]]:
        """Return what real rows and mask rows see, for `Decoder.rows`."""
        decoder = self.decoder
        if not decoder.uses_query_blocks:
            return causal(document), anchors.visible(document)
        sizes = document, decoder.heads_per_key, matmul_dtype(decoder.embedding)
        return real_query_blocks(*sizes), mask_query_blocks(anchors, *sizes)

    @contextmanager
    def _mask_rows(self) -> Iterator[None]:
        """Switch the adapters on inside the context, and gradients too if the adapters are trained."""
        learning = torch.is_grad_enabled() and self.plan.method is Method.GATED_LORA
        gate = nullcontext() if self.adapters is None else self.adapters.gate.open()
        with gate, torch.set_grad_enabled(learning):
            yield

    def _distilled(
        self,
        students: list[Tensor],
        teacher: Tensor,
        anchors: AnchorRows,
        vocabulary: RecurrentHeadModule | None = None,
    ) -> list[Tensor]:
        """Return the loss of each student's learning rows [N, E] against the model's own distribution, summed: that of
        `teacher` [N, E], over the ids of `vocabulary` where it is given."""
        output = self.decoder.frozen_output
        if output is None:
            logits = self.decoder.logits if vocabulary is None else self.draft_logits
            return [soft(logits, student, teacher) for student in students]
        if vocabulary is not None:
            output = vocabulary.restrict(output)
        values, acceptance = distilled(output, teacher, students, OBJECTIVES[self.plan.loss])
        if self.plan.loss is DraftObjective.EXPECTED:
            with_gradient = [1.0 - row for row in values]  # unlike `acceptance`
            return [-(self._reached(row, anchors) * row).sum() for row in with_gradient]
        if self.plan.focal:
            pairs = zip(values, acceptance, strict=True)
            return [(row * self._reached(own, anchors)).sum() for row, own in pairs]
        return list(values.sum(dim=1))

    @staticmethod
    def _reached(acceptance: Tensor, anchors: AnchorRows) -> Tensor:
        """[N] the chance that all drafts before each learning mask are accepted, from the `acceptance` [N] of each."""
        learns = anchors.learns
        whole = torch.zeros(learns.shape, dtype=acceptance.dtype, device=acceptance.device)
        whole = whole.masked_scatter(learns, acceptance.clamp(min=1e-6).log())
        return reach_probability(whole, anchors.depth)[learns]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., D] float32: logits of the recurrent head's vocabulary."""
        assert self.recurrent is not None
        output, ids = self.decoder.frozen_output, self.recurrent.ids
        if output is None or ids is None:
            logits = self.decoder.logits(hidden)
            return logits if ids is None else logits[..., ids]
        rows = hidden.flatten(0, -2).to(output.weight.dtype)
        some = self.recurrent.restrict(output)
        logits = some.factor * some.logits(rows, rows.new_empty(len(rows), len(ids))).float()
        return logits.view(*hidden.shape[:-1], -1)

    def _next_token(self, real: Tensor, texts: Texts) -> Tensor:
        target = texts.is_ordinary_target[:, 1:]
        return hard(self.decoder.logits, real[:, :-1][target], texts.ids[:, 1:][target])

    def _mask_ids(self, anchors: AnchorRows) -> Tensor:
        """[B, M] mask ids; an arbitrary id if masks have their own input embeddings."""
        if not self.mask_ids:
            return torch.zeros_like(anchors.depth)
        return torch.tensor(self.mask_ids, device=anchors.depth.device)[anchors.depth - 1]

    @staticmethod
    def _positions(texts: Texts) -> Tensor:
        return torch.arange(texts.ids.shape[1], device=texts.ids.device).expand_as(texts.ids)
