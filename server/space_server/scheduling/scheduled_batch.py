"""Which rows each sequence gets in the next step. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import Segment

from space_server.batch.sequence import RunningSequence
from space_server.scheduling.prefill_budget import PrefillBudget
from space_server.speculation.controller import Controller, DraftLimits, StepLoad
from space_server.step_costs.step_cost import StepShape


@dataclass(slots=True)  # not frozen, as Room
class ScheduledSequence:
    """One sequence's part of a step: pending ids, and the layout behind the root if they reach it."""

    sequence: RunningSequence
    num_pending: int  # how many of its pending ids are laid out
    layout: DraftLayout
    closes: bool  # the last pending id, the root, is among the rows: an id will be chosen

    @property
    def drafts(self) -> list[int]:
        """The live drafts."""
        return self.sequence.drafts[: self.layout.num_drafts]

    @property
    def segment(self) -> Segment:
        """The rows, for the forward pass."""
        sequence, start = self.sequence, self.sequence.num_computed
        ids = sequence.ids[start : start + self.num_pending]
        if num_drafts := self.layout.num_drafts:
            ids += sequence.drafts[:num_drafts]
        return Segment(ids, start, sequence.page_numbers, self.layout, sequence.adapter, sequence.seq_id)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: who runs, and who waits for pages."""

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
    """Give every sequence, oldest first, its pending ids within the slots it has and the prefill budget.

    A sequence with a single pending id always runs if it has a slot; the others share the budget. `beside`: those who
    decode in a step of their own, and wait for this one.
    """
    able: list[RunningSequence] = []
    reading: list[RunningSequence] = []  # of these, those with more than a root to compute
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
        # Who waits for a page wants the next step.
        hurried = [one for one in able + out_of_slots if one.num_pending == 1] + [*beside]
        rows_of = _prompt_rows(reading, budget.rows(hurried, able), block_size)
    chunks = [(one, rows, rows == one.num_pending) for one in able if (rows := rows_of.get(one.seq_id, 1))]
    rooms = [room_of(sequence, block_size) for sequence, _, closes in chunks if closes]
    layouts = controller.layouts(rooms, _load(chunks))
    plans = _plans(chunks, [room.fit(layout) for room, layout in zip(rooms, layouts, strict=True)])
    shape = shape_of(plans)
    if not budget.allows(shape):  # the prompt's rows are few already: drafts wait
        plans = _plans(chunks, [DraftLayout.plain()] * len(rooms))
        shape = shape_of(plans)
    return ScheduledBatch(plans, out_of_slots, shape)


Chunk = tuple[RunningSequence, int, bool]
"""A sequence, how many of its pending ids are laid out, and whether they reach the root."""


def _plans(chunks: Iterable[Chunk], layouts: Iterable[DraftLayout]) -> list[ScheduledSequence]:
    """One for each chunk; those that close lay out their `layouts`."""
    plain, layout = DraftLayout.plain(), iter(layouts)
    return [
        ScheduledSequence(sequence, rows, next(layout) if closes else plain, closes)
        for sequence, rows, closes in chunks
    ]


def _prompt_rows(reading: list[RunningSequence], room: int, block_size: int) -> dict[int, int]:
    """Prompt rows of each, by seq_id: half of the room for those that it lets finish, the shortest first; what is left
    for the oldest. So a short prompt does not wait for a long one, and a long one gets on.
    """
    wanted = {s.seq_id: min(s.num_pending, s.num_free_slots(block_size)) for s in reading}
    rows = dict.fromkeys(wanted, 0)
    half = room // 2
    for seq_id in sorted(wanted, key=wanted.__getitem__):
        if wanted[seq_id] > half:
            break
        rows[seq_id] = wanted[seq_id]
        half -= wanted[seq_id]
        room -= wanted[seq_id]
    for seq_id, most in wanted.items():
        if not rows[seq_id]:
            rows[seq_id] = min(most, room)
            room -= rows[seq_id]
    return rows


def shape_of(plans: Iterable[ScheduledSequence]) -> StepShape:
    """What the plans lay out in all."""
    sequences = chain = masks = drafting = prefill = pairs = context = noisy = 0
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
    return StepShape(sequences, chain, masks, drafting, prefill, pairs, context, noisy)


def _load(chunks: Iterable[Chunk]) -> StepLoad:
    prefill = pairs = context = 0
    for sequence, rows, closes in chunks:
        if rows > closes:
            prefill += rows - closes
            pairs += (rows - closes) * sequence.num_computed
        if closes:
            context += sequence.num_computed
    return StepLoad(prefill, pairs, context)


def room_of(sequence: RunningSequence, block_size: int) -> DraftLimits:
    """With s slots from the root on, s-1 drafts fit; with l ids left to emit, l-1 drafts can count."""
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
        sequence.drafter is not None,
    )
