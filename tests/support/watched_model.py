"""A model that is watched while a worker steps it: forward passes are counted, keys and values can be looked at."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from space_kernels.fp8 import FORMAT, NAN, as_kept
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads.draft_head_weights import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.paged_kv import PagedKV
from space_model.space_model import SpaceModel
from torch import Tensor


def without_draft_head(model: SpaceModel) -> SpaceModel:
    """The same weights, and drafts as the masks alone make them."""
    plain = copy.copy(model)
    headless = tuple(replace(adapter, has_draft_head=False) for adapter in model.facts.adapters)
    plain.facts = replace(model.facts, has_draft_head=False, adapters=headless)
    plain.draft_head = None
    plain.adapters = tuple(replace(adapter, draft_head=None) for adapter in model.adapters)
    return plain


class WatchedModel:
    """A SpaceModel behind a counter."""

    def __init__(self, model: SpaceModel) -> None:
        self._model = model
        self.num_forwards = 0
        self.batches: list[ForwardBatch] = []  # of the passes since this was last emptied
        self.kv: PagedKV | None = None  # the pages of the worker that was built last

    @property
    def facts(self) -> ModelFacts:
        return self._model.facts

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        return self._model.draft_head_of(adapter)

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        self.kv = self._model.allocate_kv(num_blocks, block_size)
        return self.kv

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self.num_forwards += 1
        self.batches.append(batch)
        return self._model.forward(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self._model.logits_of(hidden, ids)

    def embed(self, ids: Tensor) -> Tensor:
        return self._model.embed(ids)


def fill_with_nan(kv: PagedKV, kept: Iterable[tuple[int, int]]) -> None:
    """NaN into every slot but the `kept` (block, offset)."""
    stale = torch.ones(kv.num_blocks, kv.block_size, dtype=torch.bool)
    for block, offset in kept:
        stale[block, offset] = False
    where = stale[:, None, :, None]
    for tensor in [*kv.keys, *kv.values]:
        nothing = NAN if tensor.dtype is FORMAT else torch.nan
        as_kept(tensor).masked_fill_(where.to(tensor.device), nothing)
