"""A model whose parts are timed: the network by chain and masks, and the output head."""

from __future__ import annotations

import time
from collections.abc import Callable

from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads.draft_head_weights import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.paged_kv import PagedKV
from space_server.step_model import StepModel
from torch import Tensor


class TimedModel:
    """Passes everything on, and notes how long the network and the head took since `begin`."""

    def __init__(self, model: StepModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self._clock = model, clock
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.network = 0.0  # seconds
        self.heads: list[float] = []  # seconds of each product with the output head
        self._last: tuple[ForwardBatch, PagedKV] | None = None

    @property
    def facts(self) -> ModelFacts:
        """The model's."""
        return self.model.facts

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """The model's."""
        return self.model.draft_head_of(adapter)

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """The model's."""
        return self.model.allocate_kv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Timed."""
        begun = self._clock()
        hidden = self.model.forward(batch, kv)
        self.network += self._clock() - begun
        self._last = batch, kv
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Timed."""
        begun = self._clock()
        logits = self.model.logits(hidden)
        self.heads.append(self._clock() - begun)
        return logits

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The model's: the draft head's few rows."""
        return self.model.logits_of(hidden, ids)

    def embed(self, ids: Tensor) -> Tensor:
        """The model's."""
        return self.model.embed(ids)

    def chain_share(self, *, masks_first: bool) -> float:
        """Of the last step's network time, the share that its chain rows alone would take.

        The step's rows are run once more, and once more without the mask rows, one right after the other. Chain rows
        write what they have written before, so nothing changes. `masks_first`: which of the two goes first.
        """
        if self._last is None:
            raise ValueError("There was no step yet.")
        batch, kv = self._last
        if not batch.num_mask_rows:
            return 1.0
        alone = self._without_masks(batch)
        seconds = {id(batch): 0.0, id(alone): 0.0}
        for one in (batch, alone) if masks_first else (alone, batch):
            begun = self._clock()
            self.model.forward(one, kv)
            seconds[id(one)] = self._clock() - begun
        return seconds[id(alone)] / seconds[id(batch)]

    def _without_masks(self, batch: ForwardBatch) -> ForwardBatch:
        ids, positions = batch.ids.tolist(), batch.rows.positions.tolist()
        segments = [
            Segment(ids[rows.start : rows.stop], positions[rows.start], pages)
            for rows, pages in zip(batch.chain_rows, batch.rows.pages, strict=True)
        ]
        return ForwardBatch.build(
            segments,
            block_size=batch.rows.block_size,
            mask_ids=self.facts.mask_ids,
            adapter_masks=[adapter.num_masks for adapter in self.facts.adapters],
            device=self.facts.device,
        )
