"""Floating-point operations of a training pass, over all rows, including masks and teachers.

Multiplying a row by a matrix of n weights costs 2n forward. Backward costs 2n for the gradient of the row, if
anything before it is trained, and 2n for that of the matrix, if it is trained itself. Recomputation to save memory is
not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from space_train.data.train_batch import TrainBatch
from space_train.networks.trainee import Trainee
from space_train.train_plan import HeadForm, Method


@dataclass(frozen=True)
class ModelCost:
    """Weights and sizes that determine the cost of a row."""

    body: int  # weights of the decoder layers' linears
    output: int  # vocabulary times hidden size
    adapters: int
    head: int  # weights of the draft head
    attention: int  # operations per row and visible key, over all layers, forward

    @classmethod
    def of(cls, trainee: Trainee) -> ModelCost:
        model = trainee.decoder.model
        config = model.config
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        adapted = 0 if trainee.adapters is None else sum(pair.numel() for pair in trainee.adapters.pairs)
        head = 0 if trainee.head is None else trainee.head.w1.numel() + trainee.head.w2.numel()
        body = sum(_active(module, config) for module in model.base_model.modules())
        attention = 4 * heads * head_dim * int(config.num_hidden_layers)
        return cls(body, trainee.decoder.embedding.numel(), adapted, head, attention)


def _active(module: nn.Module, config: PreTrainedConfig) -> int:
    """Return the number of weights that a row is multiplied with; of experts, only those it is routed to."""
    if isinstance(module, nn.Linear):
        return module.weight.numel()
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]  # [experts, out, in]
    chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
    return sum(weight.numel() // len(weight) * min(chosen, len(weight)) for weight in stacked)


def flops_of(trainee: Trainee, cost: ModelCost, batch: TrainBatch) -> float:
    """Return the operations of one batch, forward and backward."""
    plan, total = trainee.plan, 0.0
    if batch.plain is not None and plan.trains_base:
        keys = batch.plain.num_before.sum().item()
        total += 6 * cost.body * batch.plain.num_real + 3 * cost.attention * keys
        total += 6 * cost.output * int(batch.plain.is_ordinary_target.sum())
    if batch.masked is None or batch.anchors is None:
        return total
    real, masks, before = batch.masked.num_real, batch.anchors.depth.numel(), batch.masked.num_before
    real_keys = before.sum().item()
    mask_keys = (before.gather(1, batch.anchors.root) + batch.anchors.depth).sum().item()
    learning = batch.num_learning_masks
    # 1: forward alone; 2: also the rows' gradients; 3: also the weights'.
    moved = 3 if plan.trains_base else 1
    total += moved * (2 * cost.body * real + cost.attention * real_keys)
    if plan.trains_base:
        total += 6 * cost.output * int(batch.masked.is_ordinary_target.sum())
    through = {Method.FULL: 3, Method.GATED_LORA: 2}.get(plan.method, 1)
    total += through * (2 * cost.body * masks + cost.attention * mask_keys)
    total += (6 if plan.method is Method.GATED_LORA else 2) * cost.adapters * masks
    num_losses = int(plan.mask_loss_weight > 0 and plan.method is not Method.HEAD) + int(plan.has_head)
    # Every method needs the gradients of the output's rows; its weights' only if the base is trained.
    total += num_losses * (6 if plan.trains_base else 4) * cost.output * learning
    total += (int(plan.distill) + int(plan.survival)) * 2 * cost.output * learning
    if plan.head is not HeadForm.NONE:
        total += 6 * cost.head * masks
        if plan.scheduled_drafting:
            total += 2 * (cost.head + cost.output) * masks
    return total
