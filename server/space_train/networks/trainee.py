"""Everything a run trains, and the losses of one batch, as the one module that is distributed over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, causal
from space_train.networks.adapters import Adapters, DraftHead
from space_train.networks.decoder import Decoder
from space_train.networks.losses import Losses, best, chances, hard, soft, survival, weighted
from space_train.train_plan import Method, TrainPlan

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
        source = anchors.source.clamp(max=last)
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
        """Return hidden rows of the real tokens [B, L, E] and of the masks [B, M, E].

        A trained base runs both in one pass. A frozen base runs real rows once without gradients, and only mask rows
        are differentiated.
        """
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
            masks = self.decoder.rows(
                self._mask_ids(anchors),
                anchors.positions,
                visible,
                key_positions=torch.cat((positions, anchors.positions), dim=1),
                cache=cache,
                inputs=None if self.adapters is None else self.adapters.mask_embeddings[anchors.depth - 1],
            )
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
