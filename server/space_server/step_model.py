"""The interface that a step needs of a model. Tests implement it with a scripted model."""

from __future__ import annotations

from typing import Protocol

from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from torch import Tensor


class StepModel(Protocol):
    """A decoder on a paged KV cache. `space_model.SpaceModel` implements it."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes, token ids and device of the model."""
        ...

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """Return the draft head of an adapter's masks (None: the checkpoint's own), or None if there is none."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """Allocate a KV cache of num_blocks · block_size slots."""
        ...

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Return [R, hidden] after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32."""
        ...

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]."""
        ...
