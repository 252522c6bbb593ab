"""What a run trains, as it starts: masks, adapters and draft head, the checkpoint's own or fresh."""

from __future__ import annotations

from dataclasses import replace

import torch
from space_model.checkpoint import Checkpoint
from space_model.gated_lora import GatedLora
from space_model.space_section import DraftHeadSection, SpaceSection
from transformers import PreTrainedModel

from space_train.checkpoint_writer import read_head
from space_train.draft_head import DraftHead
from space_train.masks import embedding_spread, mask_ids, start_masks
from space_train.train_plan import InvalidPlan, Method, TrainPlan
from space_train.trainee import Trainee


def starting_point(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    plan: TrainPlan,
    generator: torch.Generator,
    tokenizer_size: int,
    given: list[int] | None,
) -> Trainee:
    """What is trained, as it starts. Masks that have ids, and all of method head, start as the checkpoint has them."""
    size = len(model.get_input_embeddings().weight)
    section = SpaceSection.parse(checkpoint.config, mask_ids=None, num_masks=None, vocab_size=size)
    adapter: GatedLora | None = None
    own: list[int] | None = None
    ids: list[int] = []
    if plan.method is Method.HEAD:
        hidden = int(model.config.hidden_size)
        if section.adapter is not None:
            file = checkpoint.home / section.adapter
            adapter = GatedLora.load(file, num_masks=section.num_masks, hidden_size=hidden, dtype=torch.float32)
            plan = replace(plan, lora_rank=adapter.rank, lora_alpha=adapter.scale * adapter.rank)
        ids = list(section.mask_ids)
        _check_masks(len(ids) if adapter is None else adapter.num_masks, plan, checkpoint)
    elif plan.method is Method.FULL:
        own = list(section.mask_ids) if len(section.mask_ids) == plan.num_masks else None
        ids = mask_ids(
            model, plan.num_masks, shared=plan.shared_mask_id, given=given or own, tokenizer_size=tokenizer_size
        )
        if ids != own:
            start_masks(model, ids, generator)
    trainee = Trainee(model, plan, ids)
    if trainee.adapters is not None:
        if adapter is not None:
            trainee.adapters.take(adapter)
        else:
            mean, spread = embedding_spread(model)
            trainee.adapters.initialise(generator, mean, 0.5 * spread)
    if trainee.head is not None:
        trainee.head.initialise(generator)
        if plan.method is Method.HEAD or (ids and ids == own):
            _go_on(trainee.head, section.draft_head, checkpoint)
    return trainee


def _go_on(head: DraftHead, section: DraftHeadSection | None, checkpoint: Checkpoint) -> None:
    """Start from the head that the checkpoint has, where it is of the same form and size."""
    if section is None:
        return
    own = (section.hidden, section.embedding_scale, section.form)
    if own == (len(head.w1), head.embedding_scale, head.form.value):
        read_head(head, checkpoint.home / section.file)


def _check_masks(num_masks: int, plan: TrainPlan, checkpoint: Checkpoint) -> None:
    if not num_masks:
        raise InvalidPlan(
            f"{checkpoint.name} has no masks, so no draft head can stand on them. Use --method gated-lora or full."
        )
    if num_masks != plan.num_masks:
        raise InvalidPlan(f"{checkpoint.name} has {num_masks} masks: give --num-masks {num_masks}.")
