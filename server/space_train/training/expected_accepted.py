"""Accepted drafts of a step, teacher-forced over texts: what a checkpoint's drafts are worth, without decoding.

At every few tokens of a text the drafts of one step are computed behind its own tokens. Draft j is accepted if it is
the token that the model chooses there with the same noise, as the server decides (SPACE §3); a step accepts the drafts
up to the first that is not. A draft head rescores the mask's best ids, given the text's token before its target: that
is what it gets in a step whose earlier drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from space_kernels.sampling.sampler import sample_rows
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow
from space_kernels.step.draft_head import DRAFT_SHARPNESS, NUM_CANDIDATES, NUM_GREEDY_CANDIDATES
from space_model.adapters import GatedLora
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.space_section import SpaceSection
from space_model.heads import BaseSpec
from torch import Tensor
from transformers import PreTrainedModel

from space_train.data.train_batch import AnchorRows, Texts, anchor_rows, within_documents
from space_train.networks.recurrent_head import RecurrentHeadModule
from space_train.networks.trainee import Trainee
from space_train.train_plan import HeadForm, InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint import OwnRecurrentHead, read_head

EVERY = 8
"""Tokens from one step to the next."""

_ROWS_AT_ONCE = 256  # [rows, V] float32 logits of teacher and student


@dataclass(frozen=True)
class AcceptedDrafts:
    """Which drafts of each step were accepted, by one kind of drafts at one temperature."""

    drafts: str  # "masks", "head" (masks with their draft head) or "recurrent"
    temperature: float
    accepted: NDArray[np.bool_]  # [steps, k] draft j is the model's own choice, whatever came before it
    row: NDArray[np.int64]  # [steps] row of text
    root: NDArray[np.int64]  # [steps] position in its row of the token that the drafts follow

    @property
    def per_step(self) -> NDArray[np.int64]:
        """Return the drafts that each step accepts: [steps], 0 to k."""
        return np.asarray(np.cumprod(self.accepted, axis=1).sum(axis=1), dtype=np.int64)

    @property
    def mean(self) -> float:
        """Accepted drafts per step: E-1."""
        return float(self.per_step.mean())

    @property
    def conditional(self) -> list[float]:
        """Share of the drafts 1, 2, … that are accepted where those before them are; nan where none are."""
        reached = np.cumprod(self.accepted, axis=1).mean(axis=0)
        before = np.concatenate(([1.0], reached[:-1]))
        return [float(here / there) if there else float("nan") for here, there in zip(reached, before, strict=True)]


def drafting_plan(checkpoint: Checkpoint, *, precision: str, length: int) -> TrainPlan:
    """Return the plan under which a run would have written the masks and draft heads of `checkpoint`. `precision`: of
    products; `length`: ids of a row. Raises InvalidPlan if nothing in it drafts."""
    config = family.read_config(checkpoint)
    section, adapter = _drafters(checkpoint, int(config.vocab_size), int(config.hidden_size))
    recurrent = section.recurrent_head
    num_masks = len(section.mask_ids) if adapter is None else adapter.num_masks
    plan = TrainPlan(precision=precision, length=length)
    if num_masks:
        head = section.draft_head
        plan = replace(
            plan,
            method=Method.FULL if adapter is None else Method.GATED_LORA,
            num_masks=num_masks,
            head=HeadForm.NONE if head is None else HeadForm(head.form),
        )
        if adapter is not None:
            plan = replace(plan, lora_rank=adapter.rank, lora_alpha=adapter.scale * adapter.rank)
        return plan if head is None else replace(plan, head_hidden=head.hidden, head_scale=head.embedding_scale)
    if recurrent is None:
        raise InvalidPlan(f"{checkpoint.name} has neither masks nor a recurrent head, so it drafts nothing.")
    plan = replace(plan, recurrent_head=recurrent.hidden, recurrent_drafts=recurrent.num_drafts)
    return replace(plan, method=Method.HEAD, head=HeadForm.NONE)


def drafting_model(model: PreTrainedModel, checkpoint: Checkpoint, plan: TrainPlan) -> Trainee:
    """Return the masks and draft heads of `checkpoint` over its base `model`, to be read and not trained. `plan` is
    `drafting_plan` of the same checkpoint."""
    vocab_size, hidden_size = len(model.get_input_embeddings().weight), int(model.config.hidden_size)
    section, adapter = _drafters(checkpoint, vocab_size, hidden_size)
    trainee = Trainee(model, plan, list(section.mask_ids))
    if trainee.adapters is not None and adapter is not None:
        trainee.adapters.take(adapter)
    if trainee.head is not None and section.draft_head is not None:
        read_head(trainee.head, checkpoint.home / section.draft_head.file)
    if section.recurrent_head is not None:
        found = section.recurrent_head
        own = OwnRecurrentHead.load(checkpoint.home / found.file)
        trainee.recurrent = RecurrentHeadModule(hidden_size, found.hidden, found.embedding_scale, own.ids)
        own.copy_to(trainee.recurrent)
    return trainee.requires_grad_(False).eval()


def _drafters(checkpoint: Checkpoint, vocab_size: int, hidden_size: int) -> tuple[SpaceSection, GatedLora | None]:
    section = SpaceSection.parse(checkpoint.config, mask_ids=None, num_masks=None, vocab_size=vocab_size)
    if section.mask_inputs is not None:
        raise InvalidPlan(
            f"{checkpoint.name} has an adapter of {section.mask_inputs.format}, whose drafts are not computed here: "
            "`spaceserve eval acceptance` decodes with them."
        )
    if section.adapter is None:
        return section, None
    return section, GatedLora.load(
        checkpoint.home / section.adapter, BaseSpec(hidden_size, torch.float32), section.num_masks
    )


@torch.no_grad()
def accepted_drafts(
    trainee: Trainee,
    texts: Texts,
    *,
    num_drafts: int,
    temperatures: Sequence[float],
    every: int = EVERY,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[AcceptedDrafts]:
    """Compute the drafts of a step at every `every`-th token of `texts`, and which of them the model itself chooses,
    for each kind of drafts that `trainee` has and each temperature.

    `num_drafts`: at most the masks (and the drafts of a recurrent head). Steps of which a draft has no target, because
    the text ends, are left out. The noise depends on seed, row and position, so it is the same for two checkpoints of
    one vocabulary, and their difference can be taken step by step. `progress` is called with 1 after each row.
    """
    found: dict[tuple[str, float], list[NDArray[np.bool_]]] = {}
    rows, roots = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    length, device = texts.ids.shape[1], trainee.decoder.embedding.device
    places = [(m, num_drafts) for m in range(2, length - num_drafts - 1, every)]
    for row in range(len(texts.ids)):
        one = texts.part(slice(row, row + 1)).to(device)
        anchors = within_documents(anchor_rows([places], one.is_target.cpu().numpy()).to(device), one)
        whole = anchors.learns.view(-1, num_drafts).all(1)
        count = int(whole.sum())
        if count:
            chosen = whole.repeat_interleave(num_drafts)
            teacher, students = _rows_of(trainee, one, anchors, chosen)
            positions = row * length + anchors.target[0, chosen]
            for key, agreed in _agreement(trainee, teacher, students, positions, temperatures, seed).items():
                found.setdefault(key, []).append(agreed.view(count, num_drafts).cpu().numpy())
            rows.append(np.full(count, row))
            roots.append(anchors.root[0, chosen][::num_drafts].cpu().numpy())
        if progress is not None:
            progress(1)
    if not rows:
        raise InvalidPlan(f"No text has {num_drafts + 1} tokens in a row that the model would have to write.")
    places_of = np.concatenate(rows), np.concatenate(roots)
    return [AcceptedDrafts(kind, t, np.concatenate(parts), *places_of) for (kind, t), parts in found.items()]


def _rows_of(trainee: Trainee, texts: Texts, anchors: AnchorRows, chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return hidden rows [N, E] of the model before each target, and of each kind of drafts, where `chosen` [M]."""
    students = dict[str, Tensor]()
    if trainee.plan.has_masks:
        real, masks = trainee.hidden_rows(texts, anchors)
        students["masks"] = masks[0, chosen]
        if trainee.head is not None:
            previous = trainee.decoder.embed(texts.ids.gather(1, anchors.positions))
            students["head"] = trainee.head(masks, previous)[0, chosen]
    else:
        real = trainee.real_rows(texts)
    if trainee.recurrent is not None:
        states = trainee.recurrent.unroll(real, texts.ids, anchors, trainee.decoder.embed)
        students["recurrent"] = states[0, chosen]
    return real[0, anchors.positions[0, chosen]], students


def _agreement(
    trainee: Trainee,
    teacher: Tensor,
    students: dict[str, Tensor],
    positions: Tensor,
    temperatures: Sequence[float],
    seed: int,
) -> dict[tuple[str, float], Tensor]:
    """Return [N] bool for each kind and temperature: the draft is what the model chooses. positions [N] int64."""
    parts: dict[tuple[str, float], list[Tensor]] = {}
    for begin in range(0, len(teacher), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        here = positions[part]
        own = _without(trainee.mask_ids, trainee.decoder.logits(teacher[part]))
        chosen = [chosen_ids(own, temperature, here, seed) for temperature in temperatures]
        drafts = {kind: _draft_logits(trainee, kind, hidden[part]) for kind, hidden in students.items()}
        for kind, logits in drafts.items():
            for temperature, wanted in zip(temperatures, chosen, strict=True):
                possible = logits
                if kind == "head":
                    possible = _among_best(logits, drafts["masks"], is_sampled=bool(temperature))
                sharper = possible * DRAFT_SHARPNESS if kind == "head" else possible
                parts.setdefault((kind, temperature), []).append(chosen_ids(sharper, temperature, here, seed) == wanted)
    return {key: torch.cat(some) for key, some in parts.items()}


def _draft_logits(trainee: Trainee, kind: str, hidden: Tensor) -> Tensor:
    """Return [N, V] float32 logits of one kind of drafts, -inf where it cannot draft an id."""
    if kind != "recurrent":
        return _without(trainee.mask_ids, trainee.decoder.logits(hidden))
    logits, recurrent = trainee.draft_logits(hidden), trainee.recurrent
    if recurrent is not None and recurrent.ids is not None:
        whole = logits.new_full((len(logits), len(trainee.decoder.embedding)), -torch.inf)
        logits = whole.index_copy_(1, recurrent.ids, logits)
    return _without(trainee.mask_ids, logits)


def _among_best(head: Tensor, masks: Tensor, *, is_sampled: bool) -> Tensor:
    """Return the head's logits [N, V] for the ids that the masks' logits rank best, which are those that serving
    rescores; -inf for the others."""
    count = min(NUM_CANDIDATES if is_sampled else NUM_GREEDY_CANDIDATES, masks.shape[1])
    best = masks.topk(count, dim=1, sorted=False).indices
    return torch.full_like(head, -torch.inf).scatter_(1, best, head.gather(1, best))


def _without(mask_ids: Sequence[int], logits: Tensor) -> Tensor:
    """Return `logits` [N, V] with the masks' own ids impossible, as they are in serving."""
    if not mask_ids:
        return logits
    return logits.index_fill(1, torch.tensor(sorted(set(mask_ids)), device=logits.device), -torch.inf)


def chosen_ids(logits: Tensor, temperature: float, positions: Tensor, seed: int) -> Tensor:
    """Return the ids [N] that rows of `logits` [N, V] float32 choose at `positions` [N]: absolute, of those ids."""
    if not temperature:
        return logits.argmax(1)
    params = SamplingParams(temperature=temperature, key=seed)
    rows = [SamplingRow(params, range(position), num_prompt=0) for position in positions.tolist()]
    return sample_rows(logits.clone(), rows, positions.new_empty(0)).ids
