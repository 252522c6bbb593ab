"""Drafts of the recurrent head, on the host: from the hidden states of the last accepted chain rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from space_kernels.sampling.sampler import sample_rows
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.mask_drafter import MaskRun, SamplingGroups, Stopwatch, draft_rows
from space_server.model_runner import StepModel


@dataclass(frozen=True, slots=True)
class HeadRun:
    """The drafts that the recurrent head is to make for one sequence."""

    sequence: RunningSequence
    emitted: Sequence[int]  # tokens of this step, the bonus last; not yet in sequence.ids
    row: int  # flat number of the chain row that sampled the bonus
    count: int  # drafts; at least one


class RecurrentDrafter:
    """Drafts with the sampling parameters and the noise that verification uses at the same positions. Each draft is
    sampled after those before it, so penalties, bans and grammars see the text as verification will."""

    def __init__(self, model: StepModel, banned_ids: Tensor, clock: Callable[[], float]) -> None:
        self._model, self._banned = model, banned_ids
        self._computing = Stopwatch(clock)
        self._sampling_groups = SamplingGroups()

    @property
    def seconds(self) -> float:
        """Seconds of tensor work so far."""
        return self._computing.seconds

    def draft(self, hidden: Tensor, runs: Sequence[HeadRun]) -> list[list[int]]:
        """Return the drafts of each run. hidden [R, hidden]: of the step's rows."""
        drafts: list[list[int]] = [[] for _ in runs]
        for adapter in {run.sequence.adapter for run in runs}:
            numbers = [number for number, run in enumerate(runs) if run.sequence.adapter == adapter]
            self._draft(hidden, [runs[number] for number in numbers], [drafts[number] for number in numbers])
        return drafts

    def _draft(self, hidden: Tensor, runs: Sequence[HeadRun], drafts: Sequence[list[int]]) -> None:
        """Append the drafts of runs with the same adapter. A run ends early where its grammar forbids a draft."""
        head = self._model.recurrent_head_of(runs[0].sequence.adapter)
        assert head is not None
        going = list(range(len(runs)))
        with self._computing:
            state = hidden[torch.tensor([run.row for run in runs], device=hidden.device)]
        previous = [run.emitted[-1] for run in runs]
        for depth in range(max(run.count for run in runs)):
            stay = [place for place, number in enumerate(going) if depth < runs[number].count]
            if len(stay) < len(going):
                state = state[torch.tensor(stay, dtype=torch.int64, device=state.device)]
                going, previous = [going[place] for place in stay], [previous[place] for place in stay]
            if not going:
                return
            with self._computing:
                ids = torch.tensor(previous, dtype=torch.int64, device=state.device)
                state = head.advance(state, self._model.embed(ids))
                logits = head.logits(state)  # [S, D]
            ones = [MaskRun(runs[n].sequence, [*runs[n].emitted, *drafts[n]], 0, 1) for n in going]
            group = self._sampling_groups.of([one.sequence for one in ones])
            rows = draft_rows(ones, group)
            with self._computing:
                if rows.run_params.samples or rows.run_params.edits or not group.is_alike:
                    whole = head.widened(logits, self._model.facts.vocab_size)
                    previous = sample_rows(whole, rows, self._banned).ids.tolist()
                else:
                    previous = head.best(logits).tolist()
            ended = set()
            for one, number, id_ in zip(ones, going, previous, strict=True):
                if one.sequence.grammar is not None and not one.sequence.grammar.num_possible(one.emitted, [id_]):
                    ended.add(number)
                else:
                    drafts[number].append(id_)
            if ended:
                stay = [place for place, number in enumerate(going) if number not in ended]
                state = state[torch.tensor(stay, dtype=torch.int64, device=state.device)]
                going, previous = [going[place] for place in stay], [previous[place] for place in stay]
