"""Who is stepped together, and what of them stays the same while nobody comes or goes."""

from __future__ import annotations

from collections.abc import Sequence as Run
from functools import cached_property

import torch
from space_kernels.sampling.sampling_rows import BatchSamplingParams
from space_kernels.step.draft_head import SamplingColumns

from space_server.batch.sequence import RunningSequence


class SamplingGroup:
    """Some sequences, in an order. What a step asks of their laws is answered without looking at each of them."""

    def __init__(self, sequences: list[RunningSequence]) -> None:
        self.sequences = sequences
        self.batch_params = BatchSamplingParams([sequence.sampling_params for sequence in sequences])
        self.wants_logprobs = any(sequence.num_logprobs is not None for sequence in sequences)
        self._columns: dict[torch.device, SamplingColumns] = {}

    @cached_property
    def is_alike(self) -> bool:
        """All draft with the masks of one adapter, or with the checkpoint's own, and no grammar bounds anybody."""
        adapter = self.sequences[0].adapter
        return all(sequence.adapter == adapter and sequence.grammar is None for sequence in self.sequences)

    def columns(self, device: torch.device) -> SamplingColumns:
        """What the draft head's choice needs of the laws, on the device."""
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = SamplingColumns.of(self.batch_params, device)
        return columns


class SamplingGroups:
    """Knows the last one again. Steps ask for who chooses in them, and for who drafts."""

    def __init__(self) -> None:
        self._last = SamplingGroup([])

    def of(self, sequences: Run[RunningSequence]) -> SamplingGroup:
        """The company of these, which are equal where they are the same objects."""
        if sequences != self._last.sequences:
            self._last = SamplingGroup([*sequences])
        return self._last
