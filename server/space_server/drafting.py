"""The next step's drafts, from the masks of the group that the verdict selected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Run
from dataclasses import dataclass

import torch
from space_kernels.draft_head import NUM_CANDIDATES, LawColumns, propose
from space_kernels.processors import edit
from space_kernels.row import Row, RowRun, RowRuns
from space_kernels.sampling import choose_rows
from space_model.draft_head_weights import DraftHeadWeights
from torch import Tensor

from space_server.sequence import Sequence
from space_server.step_model import StepModel
from space_server.stopwatch import Stopwatch


@dataclass(slots=True)
class MaskRun:
    """The masks one sequence drafts from: consecutive rows of one group, that predict what follows the bonus."""

    sequence: Sequence
    emitted: Run[int]  # what this step emitted, the bonus last; not yet among the sequence's ids
    rows: range  # flat row numbers, in the order of the drafts; at least one

    @property
    def choices(self) -> RowRun:
        """The choices that the drafts make."""
        sequence = self.sequence
        return RowRun(sequence.law, len(sequence.ids) + len(self.emitted), len(self.rows), self.row)

    def row(self, number: int) -> Row:
        """The choice that draft `number` (from 0) makes: between it and the bonus stand the drafts before it."""
        sequence = self.sequence
        return Row(
            sequence.law,
            sequence.ids,
            sequence.num_prompt,
            tail=self.emitted,
            counts=sequence.counts,
            num_unknown=number,
        )


def draft(
    model: StepModel, hidden: Tensor, runs: Run[MaskRun], banned_ids: Tensor, computing: Stopwatch
) -> list[list[int]]:
    """The drafts of each run, by the same law and the same noise as the verdict's at their positions.

    hidden [R, hidden]: all rows of the step. Without a draft head a mask's draft is its own choice; with one, its best
    ids are rescored with the token before. Each run has the head of its adapter. `computing` runs during tensor work.
    """
    if not runs:
        return []
    flat = torch.tensor(list(itertools.chain.from_iterable(run.rows for run in runs)), device=hidden.device)
    by_adapter: dict[int | None, list[int]] = {}
    for number, run in enumerate(runs):
        by_adapter.setdefault(run.sequence.adapter, []).append(number)
    with computing:
        masks = hidden[flat]  # [M, hidden]
        logits = model.logits(masks)  # [M, V]
    if len(by_adapter) == 1:
        return _drafts(model, masks, logits, runs, banned_ids, computing)
    bounds = [0, *itertools.accumulate(len(run.rows) for run in runs)]
    drafts: list[list[int]] = [[] for _ in runs]
    for numbers in by_adapter.values():
        at = torch.tensor([row for n in numbers for row in range(bounds[n], bounds[n + 1])], device=hidden.device)
        some = _drafts(model, masks[at], logits[at], [runs[n] for n in numbers], banned_ids, computing)
        for n, chosen in zip(numbers, some, strict=True):
            drafts[n] = chosen
    return drafts


def _drafts(
    model: StepModel, masks: Tensor, logits: Tensor, runs: Run[MaskRun], banned_ids: Tensor, computing: Stopwatch
) -> list[list[int]]:
    """Drafts of runs that have the same adapter. masks [M, hidden], logits [M, V] (overwritten), M rows."""
    head = model.draft_head_of(runs[0].sequence.adapter)
    rows = RowRuns([run.choices for run in runs])
    if head is None:
        with computing:
            chosen = choose_rows(logits, rows, banned_ids).ids.tolist()
        drafts, start = [], 0
        for run in runs:
            drafts.append(chosen[start : start + len(run.rows)])
            start += len(run.rows)
        return drafts
    with computing:
        ids, offsets = candidates(logits, rows, banned_ids)
    return _rescored(model, head, masks, ids, offsets, runs, computing)


def candidates(logits: Tensor, rows: RowRuns, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each mask's best ids, ascending, and what the law adds to their logits.

    logits [M, V] (overwritten) -> [M, C] int64, [M, C] float32

    Penalties are taken as a shift of the mask's own logit: close enough for a draft.
    """
    raw = logits.clone() if any(run.law.edits for run in rows.runs) else logits
    edit(logits, rows, banned_ids)
    best = torch.topk(logits, min(NUM_CANDIDATES, logits.shape[1]), dim=1, sorted=False)
    ids, order = best.indices.sort(dim=1)
    allowed = best.values.gather(1, order)
    if raw is logits:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(1, ids)


def _rescored(
    model: StepModel,
    head: DraftHeadWeights,
    masks: Tensor,
    ids: Tensor,
    offsets: Tensor,
    runs: Run[MaskRun],
    computing: Stopwatch,
) -> list[list[int]]:
    """The draft head over all runs at once; a run shorter than the longest repeats its last mask, unread."""
    counts = [len(run.rows) for run in runs]
    longest = max(counts)
    at: Tensor | None = None
    if min(counts) < longest:
        starts = itertools.accumulate(counts, initial=0)
        index = [
            [start + min(j, count - 1) for j in range(longest)] for start, count in zip(starts, counts, strict=False)
        ]
        at = torch.tensor(index, device=masks.device)  # [S, K]
    laws = [run.sequence.law for run in runs]
    facts = [
        [run.emitted[-1] for run in runs],
        [len(run.sequence.ids) + len(run.emitted) for run in runs],
        [law.key for law in laws],
    ]
    bonus, positions, keys = torch.tensor(facts, device=masks.device)
    columns = LawColumns.of(laws, masks.device)

    def by_run(of_rows: Tensor) -> Tensor:
        """[M, …] -> [S, K, …]"""
        return of_rows.view(len(runs), longest, -1) if at is None else of_rows[at]

    with computing:
        chosen = propose(
            by_run(masks),
            by_run(ids),
            by_run(offsets),
            bonus,
            positions,
            keys,
            columns,
            w1=head.w1,
            w2=head.w2,
            embedding_scale=head.embedding_scale,
            form=head.form,
            embed=model.embed,
            logits_of=model.logits_of,
        ).tolist()  # [S, K]
    return [drafts[:count] for drafts, count in zip(chosen, counts, strict=True)]
