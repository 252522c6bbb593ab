"""Drafts of the recurrent head, on the host: from the hidden states of the last accepted chain rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from space_server.drafters.mask_drafter import SamplingGroups, Stopwatch
from space_server.drafters.sequential_drafts import HeadRun, SequentialDrafts
from space_server.model_runner import StepModel


class RecurrentDrafter:
    """Drafts by the recurrent heads of a model and its adapters."""

    def __init__(self, model: StepModel, banned_ids: Tensor, clock: Callable[[], float]) -> None:
        self._model, self._banned = model, banned_ids
        self._computing = Stopwatch(clock)
        self._sampling_groups = SamplingGroups()

    @property
    def seconds(self) -> float:
        """Seconds of tensor work so far."""
        return self._computing.seconds

    def take_catching_up(self) -> bool:
        """Return whether the steps since the last call read older text: never."""
        return False

    def draft(self, hidden: Tensor, runs: Sequence[HeadRun]) -> list[list[int]]:
        """Return the drafts of each run. hidden [R, hidden]: of the step's rows."""
        drafts: list[list[int]] = [[] for _ in runs]
        for adapter in {run.sequence.adapter for run in runs}:
            numbers = [number for number, run in enumerate(runs) if run.sequence.adapter == adapter]
            made = self._draft(hidden, [runs[number] for number in numbers])
            for number, ids in zip(numbers, made, strict=True):
                drafts[number] = ids
        return drafts

    def _draft(self, hidden: Tensor, runs: Sequence[HeadRun]) -> list[list[int]]:
        """Return the drafts of runs with the same adapter."""
        head = self._model.recurrent_head_of(runs[0].sequence.adapter)
        assert head is not None
        made = SequentialDrafts(
            runs,
            head,
            vocab_size=self._model.facts.vocab_size,
            banned_ids=self._banned,
            sampling_groups=self._sampling_groups,
            computing=self._computing,
        )
        with self._computing:
            state = hidden[torch.tensor([run.row for run in runs], device=hidden.device)]
        previous = [run.emitted[-1] for run in runs]
        if head.compiled is not None and made.are_likeliest:
            with self._computing:
                ids = torch.tensor(previous, dtype=torch.int64)
                drafts = head.compiled.draft(state, ids, max(run.count for run in runs)).tolist()
            made.take(drafts)
        while made.going:
            with self._computing:
                ids = torch.tensor(previous, dtype=torch.int64, device=state.device)
                if head.compiled is not None:
                    state, logits = head.compiled.advance(state, ids)
                else:
                    state = head.advance(state, self._model.embed(ids))
                    logits = head.logits(state)  # [S, D]
            stay = made.add(logits)
            if len(stay) < len(state):
                state = state[torch.tensor(stay, dtype=torch.int64, device=state.device)]
            previous = made.last
        return made.drafts
