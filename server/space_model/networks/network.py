"""The interface between a step and the network that computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.paged_kv import PagedKV


class Network(Protocol):
    """The model from ids to the input of the head."""

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]: rows of the embedding table, unscaled."""
        ...

    # The parts of `forward`, separately, for the check at load. The batch has no masks.

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""
        ...

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone; its K and V are stored in the KV cache."""
        ...

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
        ...
