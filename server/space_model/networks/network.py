"""The seam between a step and the network that computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.paged_kv import PagedKV


class Network(Protocol):
    """Everything between the ids and the head."""

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] after the final norm."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]: rows of the embedding table, unscaled."""
        ...

    # The parts of `forward`, one by one, for the check at load. The batch has no masks.

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: what the first layer is given."""
        ...

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer by itself; K and V are left in its pages."""
        ...

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm by itself."""
        ...
