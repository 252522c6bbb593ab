"""Builds the initial state of a run: masks, adapters and draft head, from the checkpoint or new."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from accelerate import PartialState
from space_model.adapters.gated_lora import GatedLora
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.space_section import DraftHeadSection, SpaceSection
from transformers import PreTrainedModel

from space_train.networks.draft_head import DraftHead
from space_train.networks.masks import embedding_spread, input_scale, mask_ids, start_masks
from space_train.networks.trainee import Trainee
from space_train.train_plan import InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint_writer import read_head


def starting_point(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    plan: TrainPlan,
    generator: torch.Generator,
    tokenizer_size: int,
    given: list[int] | None,
) -> Trainee:
    """Return the initial trainee, with the checkpoint's own parts if they match the plan's kind and sizes.

    The first process prints to stderr which parts of the checkpoint are reused and which are dropped.
    """
    size = len(model.get_input_embeddings().weight)
    section = SpaceSection.parse(checkpoint.config, mask_ids=None, num_masks=None, vocab_size=size)
    adapter: GatedLora | None = None
    own: list[int] | None = None
    ids: list[int] = []
    if section.adapter is not None and plan.method in {Method.HEAD, Method.GATED_LORA}:
        file, hidden = checkpoint.home / section.adapter, int(model.config.hidden_size)
        adapter = GatedLora.load(file, num_masks=section.num_masks, hidden_size=hidden, dtype=torch.float32)
    num_own = len(section.mask_ids) if adapter is None else adapter.num_masks
    if plan.method is Method.HEAD:
        if adapter is not None:
            plan = replace(plan, lora_rank=adapter.rank, lora_alpha=adapter.scale * adapter.rank)
        ids = list(section.mask_ids)
        _check_masks(num_own, plan, checkpoint)
    elif plan.method is Method.FULL:
        own = list(section.mask_ids) if num_own == plan.num_masks else None
        ids = mask_ids(
            model, plan.num_masks, shared=plan.shared_mask_id, given=given or own, tokenizer_size=tokenizer_size
        )
        if ids != own:
            start_masks(model, ids, generator)
    elif adapter is not None and num_own == plan.num_masks:
        _check_rank(adapter, plan, checkpoint)
    else:
        adapter = None
    trainee = Trainee(model, plan, ids)
    if trainee.adapters is not None:
        mean, spread = embedding_spread(model)
        scale = input_scale(model)  # mask inputs bypass this scale
        trainee.adapters.initialise(generator, scale * mean, 0.5 * scale * spread)
        if adapter is not None:
            trainee.adapters.take(adapter)
    has_masks = plan.method is Method.HEAD or adapter is not None or (bool(ids) and ids == own)
    has_head = False
    if trainee.head is not None:
        trainee.head.initialise(generator)
        has_head = has_masks and _go_on(trainee.head, section.draft_head, checkpoint)
    if PartialState().is_main_process:
        for line in _notes(checkpoint.name, section, plan, num_own, has_masks=has_masks, has_head=has_head):
            print(f"start: {line}", file=sys.stderr, flush=True)
    return trainee


def _go_on(head: DraftHead, section: DraftHeadSection | None, checkpoint: Checkpoint) -> bool:
    """Load the checkpoint's draft head if it has the same form and size. Return whether it did."""
    if section is None:
        return False
    own = (section.hidden, section.embedding_scale, section.form)
    is_same = own == (len(head.w1), head.embedding_scale, head.form.value)
    if is_same:
        read_head(head, checkpoint.home / section.file)
    return is_same


def _notes(
    name: str, section: SpaceSection, plan: TrainPlan, num_own: int, *, has_masks: bool, has_head: bool
) -> Iterator[str]:
    """Yield notes on which parts of the checkpoint are reused or dropped, and the flags that change this."""
    if section.adapter is None and not section.mask_ids:
        return
    head = section.draft_head
    kind, method = ("masks", Method.FULL) if section.adapter is None else ("adapter", Method.GATED_LORA)
    if has_masks:
        yield f"from the {kind}{' and the draft head' if has_head else ''} of {name}."
        if head is not None and plan.has_head and not has_head:
            flags = f"--head {head.form} --head-hidden {head.hidden} --head-scale {head.embedding_scale:g}"
            yield f"without the draft head of {name}. Give {flags} to go on from it."
        return
    if plan.method is not method:
        cure = f"Give --method {method} to go on from there."
    elif num_own != plan.num_masks:
        cure = f"It has {num_own} masks, this run {plan.num_masks}: give --num-masks {num_own} to go on from there."
    else:
        cure = "Leave --mask-ids out to go on from there."
    yield f"without the {kind}{' and the draft head' if head else ''} of {name}. {cure}"


def _check_rank(adapter: GatedLora, plan: TrainPlan, checkpoint: Checkpoint) -> None:
    if adapter.pairs and adapter.rank != plan.lora_rank:
        raise InvalidPlan(
            f"{checkpoint.name} has an adapter of rank {adapter.rank}, this run one of rank {plan.lora_rank}: give "
            f"--lora-rank {adapter.rank} to go on from it, or train from its base."
        )


def _check_masks(num_masks: int, plan: TrainPlan, checkpoint: Checkpoint) -> None:
    if not num_masks:
        raise InvalidPlan(
            f"{checkpoint.name} has no masks, so no draft head can stand on them. Use --method gated-lora or full."
        )
    if num_masks != plan.num_masks:
        raise InvalidPlan(f"{checkpoint.name} has {num_masks} masks: give --num-masks {num_masks}.")
