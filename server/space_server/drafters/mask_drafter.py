"""Drafts from a step's mask rows, on the host: the head over them, their best ids, the draft head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import numpy as np
import torch
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.sampler import best_of, edit, library_for_logits, sample_rows
from space_kernels.sampling.sampling_params import (
    BatchSamplingParams,
    IdBits,
    SamplingParams,
    SamplingRow,
    SamplingRows,
)
from space_kernels.step.draft_head import NUM_CANDIDATES, NUM_GREEDY_CANDIDATES, SamplingColumns, propose
from space_model.heads import DraftHeadWeights
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.model_runner import StepModel


class Stopwatch:
    """Adds up the seconds of its `with` blocks, which do not nest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += self._clock() - self._started


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

    @cached_property
    def fits_one_call(self) -> bool:
        """Whether nothing but an id of each row is wanted, sampled from its logits as they are: no penalties, lists,
        typical-p, log-probabilities, pooling, LoRA or grammar."""
        return not (self.batch_params.edits or self.batch_params.is_typical) and not any(
            one.num_logprobs is not None
            or one.num_prompt_logprobs is not None
            or one.pooling is not None
            or one.lora is not None
            or one.grammar is not None
            for one in self.sequences
        )

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

    def of(self, sequences: Sequence[RunningSequence]) -> SamplingGroup:
        """Return the group of these sequences, compared by identity."""
        if sequences != self._last.sequences:
            self._last = SamplingGroup([*sequences])
        return self._last


@dataclass(slots=True)
class MaskRun:
    """The masks that one sequence drafts from: consecutive rows of one group, which predict what follows the bonus."""

    sequence: RunningSequence
    emitted: Sequence[int]  # tokens of this step, the bonus last; not yet in sequence.ids
    first: int  # flat row number of the first draft's mask
    count: int  # masks, one per draft; at least one

    def row(self, number: int) -> SamplingRow:
        """Return the sampling row of draft `number` (from 0); the drafts before it are still unknown."""
        sequence = self.sequence
        sampling_params, possible = (sequence.sampling_params, None) if number else bounded(sequence, self.emitted)
        return SamplingRow(
            sampling_params,
            sequence.ids,
            sequence.num_prompt,
            tail=self.emitted,
            counts=sequence.counts,
            num_unknown=number,
            possible=possible,
        )


@dataclass(slots=True)
class MaskRows:
    """The mask rows of a step."""

    hidden: Tensor  # [M, hidden]
    logits: Tensor | None  # [M, V] if computed together with the chain rows; else None
    first: int  # flat row number of the first of them

    def of(self, runs: Sequence[MaskRun], model: StepModel) -> tuple[Tensor, Tensor]:
        """Return hidden and logits of the runs' rows, concatenated. The logits may be overwritten."""
        if len(runs) == 1:  # without a copy
            begin = runs[0].first - self.first
            at: slice | Tensor = slice(begin, begin + runs[0].count)
        else:
            numbers = _consecutive([run.first - self.first for run in runs], [run.count for run in runs])
            at = torch.from_numpy(numbers).to(self.hidden.device)
        hidden = self.hidden[at]
        return hidden, model.logits(hidden) if self.logits is None else self.logits[at]


def draft_rows(runs: Sequence[MaskRun], sampling_group: SamplingGroup) -> SamplingRows:
    """Return the sampling rows of all runs' drafts."""
    return SamplingRows(
        sampling_group.batch_params,
        [len(run.sequence.ids) + len(run.emitted) for run in runs],
        [run.count for run in runs],
        lambda run, number: runs[run].row(number),
    )


def bounded(sequence: RunningSequence, tail: Sequence[int]) -> tuple[SamplingParams, IdBits | None]:
    """Return the sampling parameters after the sequence's ids and `tail`, and the ids its grammar allows there."""
    if sequence.grammar is None:
        return sequence.sampling_params, None
    possible = sequence.grammar.possible(tail)
    return sequence.sampling_params.ending if possible.only_end else sequence.sampling_params, possible.ids


def _consecutive(firsts: Sequence[int], counts: Sequence[int]) -> Ints:
    """Return counts[0] integers from firsts[0], then counts[1] from firsts[1], and so on."""
    starts, lengths = np.array(firsts, dtype=np.int64), np.array(counts, dtype=np.int64)
    behind = lengths.cumsum()
    found: Ints = np.arange(behind[-1], dtype=np.int64) + (starts - behind + lengths).repeat(lengths)
    return found


def candidates(logits: Tensor, rows: SamplingRows, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each mask's best ids, ascending, and what the sampling parameters add to their logits.

    logits [M, V] (overwritten) -> [M, C] int64, [M, C] float32

    Penalties count as a shift of the mask's own logit, which is close enough for a draft.
    """
    count = min(NUM_CANDIDATES if rows.run_params.samples else NUM_GREEDY_CANDIDATES, logits.shape[1])
    if not rows.run_params.edits and (library := library_for_logits(logits)) is not None:
        return best_of(library, logits, banned_ids, count)
    raw = logits.clone() if rows.run_params.edits else logits
    edit(logits, rows, banned_ids)
    best = torch.topk(logits, count, dim=1, sorted=False)
    ids, order = best.indices.sort(dim=1)
    allowed = best.values.gather(1, order)
    if raw is logits:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(1, ids)


class MaskDrafter:
    """Drafts with the sampling parameters and the noise that verification uses at the same positions.

    Without a draft head a mask's draft is the token sampled from its logits; with one, its best ids are rescored given
    the token before. Each run uses the head of its adapter.
    """

    def __init__(self, model: StepModel, banned_ids: Tensor, clock: Callable[[], float]) -> None:
        self._model, self._banned = model, banned_ids
        self._computing = Stopwatch(clock)
        self._sampling_groups = SamplingGroups()

    @property
    def seconds(self) -> float:
        """Seconds of tensor work so far."""
        return self._computing.seconds

    def draft(self, rows: MaskRows, runs: Sequence[MaskRun]) -> list[list[int]]:
        """Return the drafts of each run."""
        if not runs:
            return []
        with self._computing:
            masks, logits = rows.of(runs, self._model)  # [M, hidden], [M, V]
        sampling_group = self._sampling_groups.of([run.sequence for run in runs])
        if sampling_group.is_alike:
            return self._drafts(masks, logits, runs, sampling_group)
        kinds: dict[tuple[int | None, bool], list[int]] = {}
        for number, run in enumerate(runs):
            kinds.setdefault((run.sequence.adapter, run.sequence.grammar is not None), []).append(number)
        bounds = [0, *itertools.accumulate(run.count for run in runs)]
        drafts: list[list[int]] = [[] for _ in runs]
        for (_, in_grammar), numbers in kinds.items():
            at = torch.tensor([row for n in numbers for row in range(bounds[n], bounds[n + 1])], device=masks.device)
            some = [runs[n] for n in numbers]
            if in_grammar:
                of_kind = self._drafts_in_grammars(masks[at], logits[at], some)
            else:
                of_kind = self._drafts(masks[at], logits[at], some, SamplingGroup([run.sequence for run in some]))
            for n, chosen in zip(numbers, of_kind, strict=True):
                drafts[n] = chosen
        return drafts

    def _drafts_in_grammars(self, masks: Tensor, logits: Tensor, runs: Sequence[MaskRun]) -> list[list[int]]:
        """Like `_drafts`, one depth at a time: what the grammar allows after a draft depends on that draft."""
        starts = list(itertools.accumulate((run.count for run in runs), initial=0))
        drafts: list[list[int]] = [[] for _ in runs]
        going = list(range(len(runs)))
        for depth in range(max(run.count for run in runs)):
            going = [n for n in going if depth < runs[n].count]
            if not going:
                break
            ones = [MaskRun(runs[n].sequence, [*runs[n].emitted, *drafts[n]], runs[n].first + depth, 1) for n in going]
            at = torch.tensor([starts[n] + depth for n in going], device=masks.device)
            chosen = self._drafts(masks[at], logits[at], ones, SamplingGroup([one.sequence for one in ones]))
            for n, one, (id_,) in zip(list(going), ones, chosen, strict=True):
                if one.sequence.grammar is not None and one.sequence.grammar.num_possible(one.emitted, [id_]):
                    drafts[n].append(id_)
                else:
                    going.remove(n)
        return drafts

    def _drafts(
        self, masks: Tensor, logits: Tensor, runs: Sequence[MaskRun], sampling_group: SamplingGroup
    ) -> list[list[int]]:
        """Return drafts of runs with the same adapter. masks [M, hidden], logits [M, V] (overwritten), M rows."""
        head = self._model.draft_head_of(runs[0].sequence.adapter)
        rows = draft_rows(runs, sampling_group)
        if head is None:
            with self._computing:
                chosen = sample_rows(logits, rows, self._banned).ids.tolist()
            ends = list(itertools.accumulate((run.count for run in runs), initial=0))
            return [chosen[begin:end] for begin, end in itertools.pairwise(ends)]
        with self._computing:
            ids, offsets = candidates(logits, rows, self._banned)
        return self._rescored(head, masks, ids, offsets, rows, runs, sampling_group)

    def _rescored(
        self,
        head: DraftHeadWeights,
        masks: Tensor,
        ids: Tensor,
        offsets: Tensor,
        rows: SamplingRows,
        runs: Sequence[MaskRun],
        sampling_group: SamplingGroup,
    ) -> list[list[int]]:
        """Run the draft head over all runs at once; a run shorter than the longest repeats its last mask, unread."""
        counts = rows.run_counts
        longest = max(counts)
        at: Tensor | None = None
        if min(counts) < longest:
            lengths = np.array(counts, dtype=np.int64)[:, None]
            starts = lengths.cumsum(axis=0) - lengths
            index = starts + np.minimum(np.arange(longest, dtype=np.int64), lengths - 1)
            at = torch.from_numpy(index).to(masks.device)  # [S, K]
        facts = np.empty((3, len(runs)), dtype=np.int64)
        facts[0] = [run.emitted[-1] for run in runs]
        facts[1], facts[2] = rows.run_positions, sampling_group.batch_params.keys
        bonus, positions, keys = torch.from_numpy(facts).to(masks.device)

        def by_run(of_rows: Tensor) -> Tensor:
            """[M, …] -> [S, K, …]"""
            return of_rows.view(len(runs), longest, -1) if at is None else of_rows[at]

        batch_params = sampling_group.columns(masks.device)
        with self._computing:
            given = by_run(masks), by_run(ids), by_run(offsets), bonus, positions, keys, batch_params
            if head.compiled is not None:
                found = head.compiled.propose(*given)
            else:
                found = propose(
                    *given,
                    w1=head.w1,
                    w2=head.w2,
                    embedding_scale=head.embedding_scale,
                    form=head.form,
                    embed=self._model.embed,
                    logits_of=self._model.logits_of,
                )
            chosen = found.tolist()  # [S, K]
        return [drafts[:count] for drafts, count in zip(chosen, counts, strict=True)]
