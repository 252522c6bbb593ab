"""The next step's drafts, from the masks of the group that the verdict selected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Run
from dataclasses import dataclass

import torch
from space_kernels.draft_head import NUM_CANDIDATES, propose
from space_kernels.processors import Row, edit
from space_kernels.sampling import choose_rows
from space_model.draft_head_weights import DraftHeadWeights
from torch import Tensor

from space_server.sequence import Sequence
from space_server.step_model import StepModel


@dataclass(frozen=True, slots=True)
class MaskRun:
    """The masks one sequence drafts from: consecutive rows of one group, that predict what follows the bonus."""

    sequence: Sequence
    emitted: Run[int]  # what this step emitted, the bonus last; not yet among the sequence's ids
    rows: range  # flat row numbers, in the order of the drafts; at least one

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


def draft(model: StepModel, hidden: Tensor, runs: Run[MaskRun], banned_ids: Tensor) -> list[list[int]]:
    """The drafts of each run, by the same law and the same noise as the verdict's at their positions.

    hidden [R, hidden]: all rows of the step. Without a draft head a mask's draft is its own choice; with one, its best
    ids are rescored with the token before. Each run has the head of its adapter.
    """
    if not runs:
        return []
    flat = torch.tensor([row for run in runs for row in run.rows], device=hidden.device)
    rows = [run.row(number) for run in runs for number in range(len(run.rows))]
    masks = hidden[flat]  # [M, hidden]
    logits = model.logits(masks)  # [M, V]
    by_adapter: dict[int | None, list[int]] = {}
    for number, run in enumerate(runs):
        by_adapter.setdefault(run.sequence.adapter, []).append(number)
    if len(by_adapter) == 1:
        return _drafts(model, masks, logits, rows, runs, banned_ids)
    bounds = [0, *itertools.accumulate(len(run.rows) for run in runs)]
    drafts: list[list[int]] = [[] for _ in runs]
    for numbers in by_adapter.values():
        of_these = [row for n in numbers for row in range(bounds[n], bounds[n + 1])]
        at = torch.tensor(of_these, device=hidden.device)
        some = _drafts(
            model, masks[at], logits[at], [rows[row] for row in of_these], [runs[n] for n in numbers], banned_ids
        )
        for n, chosen in zip(numbers, some, strict=True):
            drafts[n] = chosen
    return drafts


def _drafts(
    model: StepModel, masks: Tensor, logits: Tensor, rows: Run[Row], runs: Run[MaskRun], banned_ids: Tensor
) -> list[list[int]]:
    """Drafts of runs that have the same adapter. masks [M, hidden], logits [M, V] (overwritten), M rows."""
    head = model.draft_head_of(runs[0].sequence.adapter)
    if head is None:
        chosen = choose_rows(logits, rows, banned_ids).ids.tolist()
        drafts, start = [], 0
        for run in runs:
            drafts.append(chosen[start : start + len(run.rows)])
            start += len(run.rows)
        return drafts
    ids, offsets = candidates(logits, rows, banned_ids)
    return _rescored(model, head, masks, ids, offsets, runs)


def candidates(logits: Tensor, rows: Run[Row], banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each mask's best ids, ascending, and what the law adds to their logits.

    logits [M, V] (overwritten) -> [M, C] int64, [M, C] float32

    Penalties are taken as a shift of the mask's own logit: close enough for a draft.
    """
    raw = logits.clone() if any(row.law.edits for row in rows) else logits
    edit(logits, rows, banned_ids)
    best = torch.topk(logits, min(NUM_CANDIDATES, logits.shape[1]), dim=1, sorted=False)
    ids, order = best.indices.sort(dim=1)
    allowed = best.values.gather(1, order)
    if raw is logits:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(1, ids)


def _rescored(
    model: StepModel, head: DraftHeadWeights, masks: Tensor, ids: Tensor, offsets: Tensor, runs: Run[MaskRun]
) -> list[list[int]]:
    """The draft head over all runs at once; a run shorter than the longest repeats its last mask, unread."""
    longest = max(len(run.rows) for run in runs)
    index, start = [], 0
    for run in runs:
        index.append([start + min(number, len(run.rows) - 1) for number in range(longest)])
        start += len(run.rows)
    at = torch.tensor(index, device=masks.device)  # [S, K]
    laws = [run.sequence.law for run in runs]
    drafts = propose(
        masks[at],  # [S, K, hidden]
        ids[at],
        offsets[at],
        torch.tensor([run.emitted[-1] for run in runs], device=masks.device),
        torch.tensor([run.row(0).position for run in runs], device=masks.device),
        torch.tensor([law.key for law in laws], device=masks.device),
        laws,
        w1=head.w1,
        w2=head.w2,
        embedding_scale=head.embedding_scale,
        form=head.form,
        embed=model.embed,
        logits_of=model.logits_of,
    ).tolist()  # [S, K]
    return [chosen[: len(run.rows)] for chosen, run in zip(drafts, runs, strict=True)]
