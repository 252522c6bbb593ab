"""SAR-SFT with many anchors per sequence: masks, draft head and next token learn from one pass (SPACE §4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from space_train.anchors import AnchorRows, anchor_rows, choose_anchors, keep_counts
from space_train.draft_head import DraftHead
from space_train.network import Network
from space_train.optimiser import Optimiser
from space_train.packed_tokens import PackedTokens
from space_train.pretrain import autocast, can_compile, draw, next_token_loss
from space_train.schedule import Budget, LearningRate
from space_train.stage import DEFAULT_PACE, Counters, Measures, Pace, Stateful, run_stage
from space_train.tokenizer import FIRST_MASK_ID


@dataclass(frozen=True)
class SpacePlan:
    """What mask training does, apart from its budget."""

    seed: int = 0
    num_masks: int = 5
    tokens_per_step: int = 2048
    lengths: tuple[int, ...] = (256, 256, 512)
    # Next-token training costs a third as much a token without masks: each step also takes one window batch of it, as
    # long as the window that is served.
    plain_length: int = 1024
    anchors_per_token: float = 0.375
    function_share: float = 0.4
    # Of so many steps, the last takes text the model wrote itself, where there is any: that is what it will draft for.
    # Such a step teaches masks and head only, never the next token.
    own_text_every: int = 3
    next_token_weight: float = 1.0
    mask_weight: float = 0.5
    head_weight: float = 1.0
    train_network: bool = True
    muon_rate: float = 0.01
    adam_rate: float = 2e-3
    learning_rate: LearningRate = field(default_factory=lambda: LearningRate(warmup=0.03, decay_from=0.2))
    compile: bool = True
    autocast: bool = True


def start_masks(network: Network, num_masks: int, generator: torch.Generator) -> None:
    """Give the mask embeddings, which next-token training only ever pushed away, a fresh start near the mean token."""
    rows = slice(FIRST_MASK_ID, FIRST_MASK_ID + num_masks)
    with torch.no_grad():
        weight = network.embedding.weight
        noise = torch.randn(num_masks, weight.shape[1], generator=generator)
        weight[rows] = weight[FIRST_MASK_ID + 8 :].mean(0) + 0.5 * weight[FIRST_MASK_ID + 8 :].std() * noise


def mask_pass(network: Network, ids: Tensor, rows: AnchorRows) -> tuple[Tensor, Tensor]:
    """Hidden rows of the real tokens [B, L, E] and of the masks [B, M, E] of `ids` [B, L]."""
    mask_ids = (FIRST_MASK_ID - 1 + rows.depth).expand(len(ids), -1)
    hidden = network(torch.cat((ids, mask_ids), dim=1), rows.positions, rows.visible)
    return hidden[:, : rows.num_real], hidden[:, rows.num_real :]


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """-Σ p·log q over the last dimension, averaged over rows; `logits` and `teacher` (probabilities) [N, V]."""
    return -(teacher * F.log_softmax(logits.float(), dim=-1)).sum(-1).mean()


def space_loss(network: Network, head: DraftHead, ids: Tensor, rows: AnchorRows) -> tuple[Tensor, Tensor, Tensor]:
    """Mean losses in nats: next token, masks alone, masks with the draft head; `ids` [B, L].

    Labels of the masks are soft: the model's own distribution at the real row before the target, which knows all that
    the mask does not. With the head, the mask is told the true token before its target (teacher forcing).
    """
    real, masks = mask_pass(network, ids, rows)
    logits = network.logits(real).float()  # [B, L, V]
    next_token = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    teacher = logits.detach()[:, rows.source].softmax(-1).flatten(0, 1)  # [B·M, V]
    previous = network.embedding(ids[:, rows.source])
    # The loss of the masks alone only steadies them: half of the batch is enough, and saves much of the head.
    half = max(1, len(ids) // 2)
    mask = soft_cross_entropy(network.logits(masks[:half]).flatten(0, 1), teacher[: half * masks.shape[1]])
    guided = soft_cross_entropy(network.logits(head(masks, previous)).flatten(0, 1), teacher)
    return next_token, mask, guided


def teacher_forced_acceptance(network: Network, head: DraftHead, held_out: Tensor, num_masks: int) -> Measures:
    """How often mask j's best token is the model's own best token there, plain (`mask_j`) and with the head (`head_j`).

    Held-out `held_out` [N, L]; anchors every few tokens; the head is told the true token before the target.
    """
    length = held_out.shape[1]
    rows = anchor_rows(length, [(m, num_masks) for m in range(8, length - num_masks, 4)])
    plain, guided, count = torch.zeros(num_masks), torch.zeros(num_masks), 0
    with torch.no_grad():
        for ids in torch.split(held_out, 8):
            real, masks = mask_pass(network, ids, rows)
            own = network.logits(real).argmax(-1)[:, rows.source]  # [B, M]
            previous = network.embedding(ids[:, rows.source])
            for total, hidden in ((plain, masks), (guided, head(masks, previous))):
                agree = network.logits(hidden).argmax(-1) == own
                total += agree.view(len(ids), -1, num_masks).float().sum((0, 1))
            count += len(ids) * (len(rows.depth) // num_masks)
    totals = {"mask": plain, "head": guided}
    return {f"{name}_{j + 1}": float(total[j]) / count for name, total in totals.items() for j in range(num_masks)}


def train_space(
    network: Network,
    head: DraftHead,
    streams: Mapping[str, PackedTokens],
    evaluate: Callable[[], Measures],
    plan: SpacePlan,
    budget: Budget,
    checkpoint: Path,
    *,
    name: str = "space",
    pace: Pace = DEFAULT_PACE,
    stop_after_steps: int | None = None,
) -> Counters:
    """Train masks and head (and, unless the plan freezes it, the network) in place; resumed from `checkpoint`.

    `streams` holds `files`, `functions` and, where the model wrote text itself, `own`.
    """
    trained = [network, head] if plan.train_network else [head]
    network.requires_grad_(plan.train_network)
    optimiser = Optimiser(trained, muon_rate=plan.muon_rate, adam_rate=plan.adam_rate)
    compiled = plan.compile and can_compile()
    loss_of = torch.compile(space_loss, dynamic=False) if compiled else space_loss
    plain_loss_of = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss

    def step(counters: Counters, progress: float) -> Measures:
        is_own = "own" in streams and counters.step % plan.own_text_every == plan.own_text_every - 1
        length = plan.lengths[0] if is_own else plan.lengths[counters.step % len(plan.lengths)]
        if is_own:
            drawn, count = counters.drawn.get("own", 0), max(1, plan.tokens_per_step // length)
            ids = streams["own"].windows(drawn, count, length)
            counters.drawn["own"] = drawn + ids.numel()
        else:
            ids = draw(streams, counters, length, plan.tokens_per_step, plan.function_share)
        counts = keep_counts(round(plan.anchors_per_token * length), plan.num_masks)
        rng = np.random.default_rng([plan.seed, counters.step])
        rows = anchor_rows(length, choose_anchors(length, counts, rng))
        with autocast(plan.autocast):
            next_token, mask, guided = loss_of(network, head, ids, rows)
        if plan.train_network:
            plain = draw(streams, counters, plan.plain_length, plan.tokens_per_step, plan.function_share)
            with autocast(plan.autocast):
                plain_loss = plan.next_token_weight * plain_loss_of(network, plain)
            plain_loss.backward()  # type: ignore[no-untyped-call]
            counters.num_tokens += plain.numel()
        weighted = plan.mask_weight * mask + plan.head_weight * guided
        total = weighted if is_own else weighted + plan.next_token_weight * next_token
        total.backward()  # type: ignore[no-untyped-call]
        optimiser.step(plan.learning_rate.at(progress))
        counters.num_tokens += ids.numel()
        suffix = "_own" if is_own else ""
        measures = {"loss": next_token, "mask_loss": mask, "head_loss": guided}
        return {key + suffix: float(value.detach()) for key, value in measures.items()}

    parts: dict[str, Stateful] = {"network": network, "head": head, "optimiser": optimiser}
    return run_stage(name, budget, parts, step, evaluate, checkpoint, pace=pace, stop_after_steps=stop_after_steps)
