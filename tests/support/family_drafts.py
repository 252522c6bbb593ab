"""What a family drafts by, and what of it can be trained, tried on a tiny checkpoint: an update of gated adapters and a
draft head is computed, and the server's mask rows are held against those of training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from doubles.training import decoder_rows, random_ids, tiny_plan
from space_model.adapters import GATED_LORA_FILE
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.mtp import FORMS
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import ModelError, UnsupportedModel
from space_model.networks.network import Taps
from space_model.space_model import SpaceModel
from space_train.data.train_batch import AnchorRows, Texts, TrainBatch, anchor_rows
from space_train.networks.trainee import Trainee, check_is_trainable
from space_train.session import load_base
from tiny_checkpoints import tiny_adapter
from torch import Tensor

NAME = "drafts"  # of the adapter that the server loads

NUM_MASKS = 3
LENGTH = 40  # beyond the window of a tiny model
GROUPS = ((1, 3), (9, 2), (30, 3), (38, 1))
"""Of the text: how many tokens are before a group of masks, and how many masks it has."""


@dataclass(frozen=True)
class DraftTrial:
    """What became of one family."""

    sources: tuple[str, ...] = ()  # of drafts, beside those that every family has
    trained: tuple[str, ...] = ()  # empty: nothing is
    reason: str = ""  # why nothing is
    unlearned: tuple[str, ...] = ()  # trained weights without a finite gradient, or with none at all
    difference: float = 0.0  # largest difference of mask rows in the server from training's, relative to the largest


@dataclass(frozen=True)
class _Update:
    """An update, and what the trained modules compute behind it."""

    trained: tuple[str, ...]
    unlearned: tuple[str, ...]
    texts: Texts
    anchors: AnchorRows
    masks: Tensor  # [masks, hidden]


def try_drafts(model_type: str, folder: Path) -> tuple[SpaceModel, DraftTrial]:
    """Train on the checkpoint in `folder`, and return it as the server loads it with what was trained, or with random
    adapters where nothing is. Raises ModelError for a checkpoint that is not served."""
    adapter, update, reason = folder / "adapter", None, ""
    try:
        update = _train(Checkpoint.open(folder), adapter)
    except UnsupportedModel as error:
        reason = str(error)
        tiny_adapter(adapter, folder, num_masks=NUM_MASKS, draft_head=False)
    except Exception:  # of a family that is not served either, transformers may raise anything
        load_model(folder, dtype="float32")
        raise
    model = load_model(folder, dtype="float32", adapters={NAME: adapter})
    sources = [name for name, has_it in (("masks", _drafts_by_masks(model)), ("EAGLE-3", _has_taps(model))) if has_it]
    sources += ["MTP"] * (model_type in FORMS)
    if update is None:
        return model, DraftTrial(tuple(sources), reason=reason)
    return model, DraftTrial(tuple(sources), update.trained, "", update.unlearned, _difference(model, update))


def _train(checkpoint: Checkpoint, adapter: Path) -> _Update:
    """Compute one update of the checkpoint's adapters, and write them to the folder `adapter`. Raises UnsupportedModel
    for a family that is not trained."""
    plan = tiny_plan(num_masks=NUM_MASKS)
    base = load_base(checkpoint, plan)
    check_is_trainable(base)
    trainee = Trainee(base, plan, []).eval()
    assert trainee.adapters is not None
    assert trainee.head is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainee.trained.values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    texts, anchors = _text()
    losses = trainee(TrainBatch(None, texts, anchors))
    (losses.masks + losses.head).backward()
    unlearned = tuple(name for name, weight in trainee.trained.items() if not _is_learned(weight.grad))
    with torch.no_grad():
        for weight in trainee.trained.values():
            if weight.grad is not None:
                weight -= 0.01 * weight.grad / weight.grad.norm()
        masks = trainee.hidden_rows(texts, anchors)[1][0]
    gated = trainee.adapters.export(torch.float32)
    adapter.mkdir()
    gated.save(adapter / GATED_LORA_FILE)
    section = {"base": str(checkpoint.folder), "num_masks": NUM_MASKS, "adapter": GATED_LORA_FILE, "draft_head": None}
    (adapter / "config.json").write_text(json.dumps({"space": section | {"mask_token_ids": []}}), encoding="utf-8")
    trained = ("masks", *["adapters"] * bool(gated.pairs), "head")
    return _Update(trained, unlearned, texts, anchors, masks)


def _text() -> tuple[Texts, AnchorRows]:
    ids = torch.tensor([random_ids(LENGTH, 1)])
    texts = Texts(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), torch.ones(1, dtype=torch.bool))
    return texts, anchor_rows([list(GROUPS)], np.ones(ids.shape, dtype=np.bool_))


def _is_learned(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any())


@torch.inference_mode()
def _drafts_by_masks(model: SpaceModel) -> bool:
    """Return whether mask rows are computed, and change no bit of the rows before them."""
    ids = random_ids(LENGTH, 2)
    rows = decoder_rows(model, ids, NUM_MASKS, adapter=0)
    return bool(rows.isfinite().all()) and torch.equal(rows[:LENGTH], decoder_rows(model, ids, 0))


@torch.inference_mode()
def _has_taps(model: SpaceModel) -> bool:
    """Return whether a head of `--draft-head` can read the inputs of its layers."""
    batch = ForwardBatch.build([Segment([20, 21], 0, [0])], block_size=16, mask_ids=())
    try:
        taps = Taps.of((0, model.facts.num_layers), batch, model.facts)
        model.network.forward(batch, model.allocate_kv(1, 16), taps)
    except ModelError:
        return False
    return True


@torch.inference_mode()
def _difference(model: SpaceModel, update: _Update) -> float:
    ids, worst = update.texts.ids[0].tolist(), 0.0
    for number, (start, depth) in enumerate(GROUPS):
        rows = decoder_rows(model, ids[:start], NUM_MASKS, adapter=0)[start : start + depth]
        trained = update.masks[update.anchors.group[0] == number]
        worst = max(worst, float((rows - trained).abs().max() / trained.abs().max()))
    return worst
