"""What a step needs of a model: the seam at which tests put a scripted one."""

from __future__ import annotations

from typing import Protocol

from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads.draft_head_weights import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.paged_kv import PagedKV
from torch import Tensor


class StepModel(Protocol):
    """A decoder on paged keys and values; `space_model.SpaceModel` is one."""

    @property
    def facts(self) -> ModelFacts:
        """What it is, in numbers."""
        ...

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """The draft head trained with an adapter's masks, or (None) with the checkpoint's own; None: there is none."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """Pages for num_blocks·block_size slots."""
        ...

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm."""
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
