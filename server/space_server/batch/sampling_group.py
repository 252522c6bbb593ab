"""Sequences sampled together, with what stays the same while the group does not change."""

from __future__ import annotations

from collections.abc import Sequence as Run
from functools import cached_property

import torch
from space_kernels.sampling.sampling_rows import BatchSamplingParams
from space_kernels.step.draft_head import SamplingColumns

from space_server.batch.sequence import RunningSequence


class SamplingGroup:
    """An ordered group of sequences with their sampling parameters batched once."""

    def __init__(self, sequences: list[RunningSequence]) -> None:
        self.sequences = sequences
        self.batch_params = BatchSamplingParams([sequence.sampling_params for sequence in sequences])
        self.wants_logprobs = any(sequence.num_logprobs is not None for sequence in sequences)
        self._columns: dict[torch.device, SamplingColumns] = {}

    @cached_property
    def is_alike(self) -> bool:
        """Whether all draft with the same adapter's masks and none has a grammar."""
        adapter = self.sequences[0].adapter
        return all(sequence.adapter == adapter and sequence.grammar is None for sequence in self.sequences)

    def columns(self, device: torch.device) -> SamplingColumns:
        """Return the sampling parameters that the draft head needs, on the device."""
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = SamplingColumns.of(self.batch_params, device)
        return columns


class SamplingGroups:
    """Caches the last group: consecutive steps mostly sample and draft for the same sequences."""

    def __init__(self) -> None:
        self._last = SamplingGroup([])

    def of(self, sequences: Run[RunningSequence]) -> SamplingGroup:
        """Return the group of these sequences, compared by identity."""
        if sequences != self._last.sequences:
            self._last = SamplingGroup([*sequences])
        return self._last
