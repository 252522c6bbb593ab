"""Selects the rows that each sequence gets in the next step. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import Segment

from space_server.batch import RunningSequence
from space_server.speculation.controller import Controller, DraftLimits, StepLoad, choose_layouts
from space_server.step_cost import StepCost, StepShape

LEAST_ROWS = 8  # every step with pending prompt tokens computes at least so many: prefill progresses under any budget
ROW_STEP = 4  # granularity of the search: steps are padded to a multiple of this


@dataclass(frozen=True)
class PrefillBudget:
    """At most `max_rows` prompt tokens; beside decoding sequences, few enough to stay within `seconds`."""

    max_rows: int
    seconds: float | None = None  # None: no limit
    cost: StepCost | None = None  # estimates the duration; needed with `seconds`

    def rows(self, decoding: Sequence[RunningSequence], able: Sequence[RunningSequence]) -> int:
        """Return the number of prompt tokens for the next step. `able`: all sequences that can run; `decoding`: those
        with one pending id. Every prompt row is costed at the longest computed prefix among the prompts."""
        if self.seconds is None or self.cost is None or not decoding:
            return self.max_rows
        computed = max(sequence.num_computed for sequence in able if sequence.num_pending > 1)
        context = sum(sequence.num_computed for sequence in decoding)
        least, most = min(LEAST_ROWS, self.max_rows), self.max_rows
        while most - least >= ROW_STEP:
            rows = (least + most + 1) // 2
            shape = StepShape(len(decoding), len(decoding), 0, 0, rows, rows * computed, context)
            if self.cost.feared(shape) <= self.seconds:
                least = rows
            else:
                most = rows - 1
        return least

    def allows(self, shape: StepShape) -> bool:
        """Whether a step of prompt rows beside decoding sequences with drafts stays within `seconds`."""
        if self.seconds is None or self.cost is None or not shape.num_prefill_rows:
            return True
        has_drafts = shape.num_chain_rows > shape.num_sequences or shape.num_mask_rows > 0
        return not has_drafts or self.cost.feared(shape) <= self.seconds


@dataclass(slots=True)  # not frozen: see DraftLimits
class ScheduledSequence:
    """One sequence's part of a step: pending ids, and the draft layout behind the root if they reach it."""

    sequence: RunningSequence
    num_pending: int  # pending ids computed in this step
    layout: DraftLayout
    closes: bool  # the root (last pending id) is included, so a token is sampled

    @property
    def drafts(self) -> list[int]:
        """The drafts verified in this step."""
        return self.sequence.drafts[: self.layout.num_drafts]

    @property
    def segment(self) -> Segment:
        """The sequence's rows for the forward pass."""
        sequence, start = self.sequence, self.sequence.num_computed
        ids = sequence.ids[start : start + self.num_pending]
        if num_drafts := self.layout.num_drafts:
            ids += sequence.drafts[:num_drafts]
        own = sequence.adapter, sequence.seq_id, sequence.lora, sequence.state, sequence.is_long
        return Segment(ids, start, sequence.page_numbers, self.layout, *own)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: the sequences that run, and those without a free slot."""

    plans: list[ScheduledSequence]
    out_of_slots: list[RunningSequence]
    shape: StepShape


def plan_step(
    sequences: Iterable[RunningSequence],
    controller: Controller,
    *,
    block_size: int,
    budget: PrefillBudget,
    beside: Iterable[RunningSequence] = (),
) -> ScheduledBatch:
    """Schedule every sequence, oldest first, within its slots and the prefill budget.

    A sequence with a single pending id always runs if it has a slot; the others share the budget. `beside`: sequences
    that decode in device steps and wait for this one.
    """
    able: list[RunningSequence] = []
    reading: list[RunningSequence] = []  # of these, those with prompt tokens to compute
    out_of_slots: list[RunningSequence] = []
    for sequence in sequences:
        if sequence.num_free_slots(block_size) < 1:
            out_of_slots.append(sequence)
            continue
        able.append(sequence)
        if sequence.num_pending > 1:
            reading.append(sequence)
    rows_of: dict[int, int] = {}
    if reading:
        # A decoding sequence that waits for a page is delayed by a long step, too.
        decoding = [one for one in able + out_of_slots if one.num_pending == 1] + [*beside]
        rows_of = _prompt_rows(reading, budget.rows(decoding, able), block_size)
    chunks = [(one, rows, rows == one.num_pending) for one in able if (rows := rows_of.get(one.seq_id, 1))]
    limits = [draft_limits_of(sequence, block_size) for sequence, _, closes in chunks if closes]
    wanted = choose_layouts(controller, limits, _load(chunks))
    layouts = [limit.fit(layout) for limit, layout in zip(limits, wanted, strict=True)]
    plans = _plans(chunks, layouts)
    shape = shape_of(plans)
    if not budget.allows(shape):  # prompt rows are at their minimum already: leave out drafts that are not forced
        plain = DraftLayout.plain()
        kept = [layout if limit.num_forced else plain for limit, layout in zip(limits, layouts, strict=True)]
        plans = _plans(chunks, kept)
        shape = shape_of(plans)
    return ScheduledBatch(plans, out_of_slots, shape)


Chunk = tuple[RunningSequence, int, bool]
"""A sequence, its pending ids in this step, and whether they reach the root."""


def _plans(chunks: Iterable[Chunk], layouts: Iterable[DraftLayout]) -> list[ScheduledSequence]:
    """Return one for each chunk; chunks that reach the root take the next of `layouts`."""
    plain, layout = DraftLayout.plain(), iter(layouts)
    return [
        ScheduledSequence(sequence, rows, next(layout) if closes else plain, closes)
        for sequence, rows, closes in chunks
    ]


def _prompt_rows(reading: list[RunningSequence], budget: int, block_size: int) -> dict[int, int]:
    """Split the budget: half for prompts that it completes, the shortest first; the rest for the oldest. Returns rows
    by seq_id. A short prompt does not wait for a long one, and a long one makes progress."""
    wanted = {s.seq_id: min(s.num_until_kept, s.num_free_slots(block_size)) for s in reading}
    rows = dict.fromkeys(wanted, 0)
    half = budget // 2
    for seq_id in sorted(wanted, key=wanted.__getitem__):
        if wanted[seq_id] > half:
            break
        rows[seq_id] = wanted[seq_id]
        half -= wanted[seq_id]
        budget -= wanted[seq_id]
    for seq_id, most in wanted.items():
        if not rows[seq_id]:
            rows[seq_id] = min(most, budget)
            budget -= rows[seq_id]
    return rows


def shape_of(plans: Iterable[ScheduledSequence]) -> StepShape:
    """Return the sizes of the step."""
    sequences = chain = masks = drafting = prefill = pairs = context = noisy = head_steps = 0
    for plan in plans:
        sequence, layout, closes = plan.sequence, plan.layout, plan.closes
        computed = sequence.num_computed
        if plan.num_pending > closes:
            rows = plan.num_pending - closes
            prefill += rows
            pairs += rows * computed
        if closes:
            rows = 1 + layout.num_drafts
            sequences += 1
            context += computed
            chain += rows
            if not sequence.sampling_params.greedy:
                noisy += rows
            if num_masks := layout.num_masks:
                masks += num_masks
                drafting += 1
            head_steps = max(head_steps, layout.head_drafts)
    return StepShape(sequences, chain, masks, drafting, prefill, pairs, context, noisy, head_steps)


def _load(chunks: Iterable[Chunk]) -> StepLoad:
    prefill = pairs = context = 0
    for sequence, rows, closes in chunks:
        if rows > closes:
            prefill += rows - closes
            pairs += (rows - closes) * sequence.num_computed
        if closes:
            context += sequence.num_computed
    return StepLoad(prefill, pairs, context)


def draft_limits_of(sequence: RunningSequence, block_size: int) -> DraftLimits:
    """Return what the sequence can lay out: with s slots from the root on, s-1 drafts; with l tokens left, l-1."""
    num_left, num_drafts = sequence.num_left, len(sequence.drafts)
    if num_drafts:
        slots = sequence.num_free_slots(block_size) - sequence.num_pending
        num_drafts = max(0, min(num_drafts, sequence.max_drafts, slots, num_left - 1))
    return DraftLimits(
        sequence.seq_id,
        num_drafts,
        sequence.most_masks,
        num_left,
        not sequence.sampling_params.greedy,
        sequence.acceptance,
        sequence.draft_chances,
        sequence.offered_chances,
        sequence.drafter is not None and not sequence.num_forced_drafts,
        sequence.num_forced_drafts,
        sequence.most_head_drafts,
        sequence.head_acceptance,
    )
