"""Held-out figures of a run: next-token loss, and how often each draft is the model's own most likely token."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from space_train.data.train_batch import Texts, anchor_rows, causal, within_documents
from space_train.networks.losses import best
from space_train.networks.trainee import Trainee
from space_train.training.stage import Measures

EVERY = 8
"""Tokens from one anchor to the next."""


@torch.no_grad()
def held_out_figures(trainee: Trainee, held_out: Texts, *, rows_at_once: int = 8) -> Measures:
    """`loss`, `mask_j` and `head_j` over the rows of `held_out`.

    Teacher-forced: draft j counts if it equals the model's most likely token, given that everything before it is right;
    the draft head gets the text's token before its target.
    """
    plan = trainee.plan
    num_masks = plan.num_masks if plan.has_masks else 0
    nats, num_targets = 0.0, 0
    agreed = {name: torch.zeros(num_masks) for name in ("mask", "head")}
    counted = torch.zeros(num_masks)
    for begin in range(0, len(held_out.ids), rows_at_once):
        part = slice(begin, begin + rows_at_once)
        texts = held_out.part(part)
        target, length = texts.is_target, texts.ids.shape[1]
        places = [(m, num_masks) for m in range(2, length - num_masks - 1, EVERY)] if num_masks else []
        if not places:
            positions = torch.arange(length, device=texts.ids.device).expand_as(texts.ids)
            real = trainee.decoder.rows(texts.ids, positions, causal(texts.document))
        else:
            anchors = anchor_rows([places] * len(texts.ids), target.cpu().numpy()).to(texts.ids.device)
            anchors = within_documents(anchors, texts)
            real, masks = trainee.hidden_rows(texts, anchors)
            source = anchors.source
            teacher = real.gather(1, source[..., None].expand(-1, -1, real.shape[2]))
            own = best(trainee.decoder.logits, teacher.flatten(0, 1)).view_as(source)
            guesses = {"mask": masks}
            if trainee.head is not None:
                previous = trainee.decoder.embed(texts.ids.gather(1, source))
                guesses["head"] = trainee.head(masks, previous)
            learns = anchors.learns.view(len(source), -1, num_masks)
            counted += learns.sum((0, 1)).cpu()
            for name, hidden in guesses.items():
                agree = best(trainee.decoder.logits, hidden.flatten(0, 1)).view_as(own) == own
                agreed[name] += (agree.view_as(learns) & learns).sum((0, 1)).cpu()
        for row, wanted, ids in zip(real, target, texts.ids, strict=True):
            logits = trainee.decoder.logits(row[:-1][wanted[1:]])
            nats += float(F.cross_entropy(logits, ids[1:][wanted[1:]], reduction="sum"))
        num_targets += int(target.sum())
    figures: Measures = {"loss": nats / max(num_targets, 1)}
    for name in ("mask", "head") if trainee.head is not None else ("mask",):
        for j in range(num_masks):
            if counted[j]:  # short texts may be too short for deep masks
                figures[f"{name}_{j + 1}"] = float(agreed[name][j] / counted[j])
    return figures


def draft_agreement(figures: Measures) -> list[float]:
    """Return the agreement of draft 1, 2, …, with the head if there is one."""
    name = "head" if "head_1" in figures else "mask"
    return [value for key, value in figures.items() if key.startswith(f"{name}_")]


def tokens_per_step(figures: Measures) -> float:
    """Return 1 + Σ_j Π_{i≤j} of the agreements, with the head if there is one: the tokens per greedy step if the
    agreements were independent."""
    return float(1.0 + np.cumprod(draft_agreement(figures)).sum())
