"""The one draft layout that all sequences of a device step share. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Run
from statistics import median_high

from space_model.geometry.draft_layout import DraftLayout

from space_server.batch.sequence import RunningSequence
from space_server.drafts.acceptance import Acceptance
from space_server.scheduling.scheduled_batch import draft_limits_of
from space_server.speculation.controller import Controller, DraftLimits, StepLoad

_PLENTY = 1 << 30


def layout_ahead(sequences: Run[RunningSequence], controller: Controller) -> DraftLayout:
    """Return the layout for a step launched before the last is read: the controller's choice for the average sequence,
    with all drafts it could have.
    """
    bound = median_high(min(sequence.max_drafts, sequence.num_masks) for sequence in sequences)
    limit = DraftLimits(
        seq_id=sequences[0].seq_id,
        num_drafts=bound,
        max_masks=bound,
        num_left=_PLENTY,
        acceptance=_average(sequences),
    )
    limits = [limit] * len(sequences)
    if any(not sequence.sampling_params.greedy for sequence in sequences):
        noisy = DraftLimits(limit.seq_id, bound, bound, _PLENTY, is_noisy=True, acceptance=limit.acceptance)
        limits = [limit if sequence.sampling_params.greedy else noisy for sequence in sequences]
    return limit.fit(controller.layouts(limits, _load(sequences))[0])


def layout_of_drafts(sequences: Run[RunningSequence], controller: Controller, block_size: int) -> DraftLayout:
    """Return the layout where every sequence's drafts are known: the widest groups wanted, and as many drafts as masks
    made.

    Drafts from other sources are added as long as their expected gain exceeds the cost of their rows in the whole
    batch.
    """
    average, limits = _average(sequences), []
    for sequence in sequences:
        limit = draft_limits_of(sequence, block_size)
        if limit.acceptance is not None:
            limit.acceptance = average  # the same for all, so that all want the same masks
        limits.append(limit)
    wanted = controller.layouts(limits, _load(sequences))
    layouts = [limit.fit(layout) for limit, layout in zip(limits, wanted, strict=True)]
    num_drafts = max(
        (one.num_drafts for limit, one in zip(limits, layouts, strict=True) if not limit.chances), default=0
    )
    most = max(layout.num_drafts for layout in layouts)
    reached = {number: _reach(limit, num_drafts) for number, limit in enumerate(limits) if limit.chances}
    gain = best = 0.0
    for depth in range(num_drafts + 1, most + 1):
        gain -= controller.row_price * len(limits)
        for number in reached:
            if depth <= layouts[number].num_drafts:
                reached[number] *= limits[number].chances[depth - 1]
                gain += reached[number]
        if gain > best:
            num_drafts, best = depth, gain
    masks = tuple(max(_mask(layout, group) for layout in layouts) for group in range(num_drafts + 1))
    return DraftLayout.of(num_drafts, masks)


def _reach(limit: DraftLimits, depth: int) -> float:
    """Return the probability that the first `depth` drafts are all accepted."""
    reach = 1.0
    for chance in limit.chances[:depth]:
        reach *= chance
    return reach


def _mask(layout: DraftLayout, group: int) -> int:
    return layout.masks[group] if group <= layout.num_drafts else 0


def _load(sequences: Run[RunningSequence]) -> StepLoad:
    return StepLoad(num_context=sum(sequence.num_computed for sequence in sequences))


def _average(sequences: Run[RunningSequence]) -> Acceptance | None:
    """Return the mean acceptance of the sequences that draft; they draft with the same masks."""
    drafting = [sequence for sequence in sequences if sequence.most_masks]
    known = [sequence.acceptance for sequence in drafting if sequence.acceptance is not None]
    if not known:
        return None
    average = Acceptance(known[0].shape)
    average.shift = sum(acceptance.shift for acceptance in known) / len(known)
    return average
