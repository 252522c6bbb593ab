"""Pages are granted ahead of what a sequence drafts, not of what it might."""

from __future__ import annotations

import itertools

import pytest
from doubles.router import Script, always
from doubles.router.house import Lockstep, request_of
from space_router.engine.request.request_state import Phase, RequestState
from space_router.engine.request.sequence import MAX_BLOCKS_AHEAD, STEPS_AHEAD, WorkerSequence


def most_ahead(house: Lockstep, live: RequestState, *, from_token: int) -> int:
    """Most slots that were granted beyond the ids, once so many tokens are there."""
    most = 0
    while live.phase is not Phase.ENDED:
        house.step()
        if live.num_generated >= from_token:
            granted = [s.num_slots for s in house.scheduler.sequences.values() if s.live is live]
            most = max([most, *(slots - len(live.ids) for slots in granted)])
    return most


@pytest.mark.parametrize(("num_drafts", "bound"), [(0, STEPS_AHEAD + 3), (5, MAX_BLOCKS_AHEAD * 4 + 3)])
def test_a_sequence_holds_what_it_drafts(num_drafts: int, bound: int) -> None:
    house = Lockstep(Script(accepts=always, draft_length=5, num_blocks=200, block_size=4))
    house.script.draft_length = num_drafts  # what the controller chooses; the worker has said that five are possible
    live = house.submit(request_of(6, 150))
    ahead = most_ahead(house, live, from_token=30)
    assert bound - 4 <= ahead <= bound


def test_those_that_come_later_start_with_what_is_drafted_here() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4))
    house.script.draft_length = 0
    house.submit(request_of(6, 260))
    house.run()
    live = house.submit(request_of((99, 11, 12), 40))
    assert most_ahead(house, live, from_token=0) <= STEPS_AHEAD + 3


def test_a_sequence_that_drafted_nothing_drafts_as_soon_as_it_likes() -> None:
    house = Lockstep(Script(accepts=always, draft_length=7, num_blocks=300, block_size=4, window=600), delay=1)
    house.script.draft_length = 0
    live = house.submit(request_of(6, 300))
    while live.num_generated < 100:
        house.step()
    [sequence] = house.batch.sequences.values()
    sequence._max_draft_length = house.script.draft_length = 7
    drafted = []
    while live.phase is not Phase.ENDED:
        house.step()
        drafted.append(live.num_generated)
        assert not sequence.paused
    steps = [after - before for before, after in itertools.pairwise(drafted)]
    assert 8 in steps[:6]  # at full length after a few steps


def test_plain_sequences_never_wait_for_a_router_that_is_six_steps_late() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4), delay=6)
    house.script.draft_length = 0
    lives = [house.submit(request_of(7 + i, 60)) for i in range(3)]
    while any(live.phase is not Phase.ENDED for live in lives):
        house.step()
        assert not any(sequence.paused for sequence in house.batch.sequences.values())


def test_a_long_prompt_holds_no_pages_for_its_answer_before_its_last_step() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4), max_prefill_rows=16)
    live = house.submit(request_of(101, 20))
    house.step()
    house.step()
    [sequence] = house.scheduler.sequences.values()
    assert len(sequence.pages) == 26  # 101 ids and the first slot of the answer
    house.run()
    assert live.num_generated == 20


def test_more_are_expected_at_once_and_fewer_one_by_one() -> None:
    live = RequestState(request_of(4, 60), 60, 0, 0.0)
    sequence = WorkerSequence(1, live, [0], 0, block_size=16, num_drafted=0, most_slots=65)
    ahead = []
    for num_drafted in (0, 3, 0, 1, 0):
        sequence.drafted(num_drafted)
        ahead.append(sequence.slots_ahead // STEPS_AHEAD)
    assert ahead == [1, 4, 3, 2, 1]
