"""The one layout that all lines of a step on the device have. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Run
from statistics import median_high

from space_model.geometry.draft_layout import DraftLayout

from space_server.batch.sequence import RunningSequence
from space_server.drafts.acceptance import Acceptance
from space_server.scheduling.scheduled_batch import room_of
from space_server.speculation.controller import Controller, DraftLimits, StepLoad

_PLENTY = 1 << 30


def layout_ahead(sequences: Run[RunningSequence], controller: Controller) -> DraftLayout:
    """Where steps before it are not read: what the controller wants for the average sequence, as though each had all
    the drafts it could have.
    """
    bound = median_high(min(sequence.max_drafts, sequence.num_masks) for sequence in sequences)
    room = DraftLimits(
        seq_id=sequences[0].seq_id,
        num_drafts=bound,
        max_masks=bound,
        num_left=_PLENTY,
        acceptance=_average(sequences),
    )
    rooms = [room] * len(sequences)
    if any(not sequence.sampling_params.greedy for sequence in sequences):
        noisy = DraftLimits(room.seq_id, bound, bound, _PLENTY, is_noisy=True, acceptance=room.acceptance)
        rooms = [room if sequence.sampling_params.greedy else noisy for sequence in sequences]
    return room.fit(controller.layouts(rooms, _load(sequences))[0])


def layout_of_drafts(sequences: Run[RunningSequence], controller: Controller, block_size: int) -> DraftLayout:
    """Where everybody's drafts are known: groups as wide as somebody wants them, and as many drafts as masks made.

    Drafts that no mask made follow as far as they bring more than rows for them on all lines cost.
    """
    average, rooms = _average(sequences), []
    for sequence in sequences:
        room = room_of(sequence, block_size)
        if room.acceptance is not None:
            room.acceptance = average  # alike, so that all want the same masks
        rooms.append(room)
    wanted = controller.layouts(rooms, _load(sequences))
    layouts = [room.fit(layout) for room, layout in zip(rooms, wanted, strict=True)]
    num_drafts = max((one.num_drafts for room, one in zip(rooms, layouts, strict=True) if not room.chances), default=0)
    most = max(layout.num_drafts for layout in layouts)
    reached = {number: _reach(room, num_drafts) for number, room in enumerate(rooms) if room.chances}
    gain = best = 0.0
    for depth in range(num_drafts + 1, most + 1):
        gain -= controller.row_price * len(rooms)
        for number in reached:
            if depth <= layouts[number].num_drafts:
                reached[number] *= rooms[number].chances[depth - 1]
                gain += reached[number]
        if gain > best:
            num_drafts, best = depth, gain
    masks = tuple(max(_mask(layout, group) for layout in layouts) for group in range(num_drafts + 1))
    return DraftLayout.of(num_drafts, masks)


def _reach(room: DraftLimits, depth: int) -> float:
    """The chance that the first so many drafts are all accepted."""
    reach = 1.0
    for chance in room.chances[:depth]:
        reach *= chance
    return reach


def _mask(layout: DraftLayout, group: int) -> int:
    return layout.masks[group] if group <= layout.num_drafts else 0


def _load(sequences: Run[RunningSequence]) -> StepLoad:
    return StepLoad(num_context=sum(sequence.num_computed for sequence in sequences))


def _average(sequences: Run[RunningSequence]) -> Acceptance | None:
    """The acceptance of all together who draft, and that by the same masks."""
    drafting = [sequence for sequence in sequences if sequence.most_masks]
    known = [sequence.acceptance for sequence in drafting if sequence.acceptance is not None]
    if not known:
        return None
    average = Acceptance(known[0].shape)
    average.shift = sum(acceptance.shift for acceptance in known) / len(known)
    return average
