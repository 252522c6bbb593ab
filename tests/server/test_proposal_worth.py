"""Drafts that no mask made are taken where all of a step are worth their time, and texts are read where that pays."""

import pytest
from space_model.draft_layout import DraftLayout
from space_model.space_model import SpaceModel
from space_server.controller import FixedLayout, Load, Room
from space_server.drafts import DraftSources
from space_server.measured_controller import MeasuredController
from space_server.proposal_worth import LONGEST_NAP, NAP, READING, RETRY, WINDOW, ProposalWorth
from space_server.step_cost import StepCost, StepShape
from space_server.testing import SmallRouter
from space_server.worker import Worker

RATE = 1000.0


class Tiled(StepCost):
    """Rows are cheap, but for the first beyond one of each sequence: a product's next tile, say."""

    def __init__(self, tile: float) -> None:
        super().__init__([])
        self.tile = tile

    def seconds(self, shape: StepShape) -> float:
        more = shape.num_rows - shape.num_sequences
        return 1e-3 * (1.0 + self.tile * (more > 0) + 0.005 * more)


def rooms(num_proposing: int, chances: tuple[float, ...] = (0.8, 0.8)) -> list[Room]:
    proposing = [Room(n, len(chances), 0, 100, chances=chances) for n in range(num_proposing)]
    return proposing + [Room(n, 0, 0, 100) for n in range(num_proposing, 8)]


@pytest.mark.parametrize(("num_proposing", "taken"), [(1, False), (8, True)])
def test_one_sequences_drafts_are_not_taken_where_all_pay_for_them(num_proposing: int, taken: bool) -> None:
    controller = MeasuredController(Tiled(0.3))
    layouts = [controller.layouts(rooms(num_proposing), Load()) for _ in range(RETRY - 1)][-1]
    assert [layout.num_drafts for layout in layouts] == ([2] * num_proposing if taken else [0] * 8)


def test_where_the_first_row_more_is_cheap_one_sequences_drafts_are_taken() -> None:
    controller = MeasuredController(Tiled(0.0))
    assert controller.layouts(rooms(1), Load())[0] == DraftLayout.of(2, (0, 0, 0))


def test_the_price_of_what_does_not_pay_is_looked_at_again() -> None:
    worth = ProposalWorth()
    assert [worth.pays(0.1, 1.0, RATE) for _ in range(2 * RETRY)].count(True) == 2


def test_texts_are_not_read_where_that_has_not_paid_for_itself() -> None:
    worth = ProposalWorth()
    for _ in range(WINDOW):
        assert not worth.naps
        worth.stepped(8)
    assert worth.naps


def test_texts_are_read_as_long_as_drafts_save_more_than_reading_takes() -> None:
    worth = ProposalWorth()
    for _ in range(3 * WINDOW):
        assert worth.pays(16 * READING * RATE, 0.0, RATE)
        worth.stepped(8)
        assert not worth.naps


def naps_of(worth: ProposalWorth, num_steps: int) -> list[int]:
    """The steps of each nap that ended."""
    lengths, slept = [], 0
    for _ in range(num_steps):
        worth.stepped(8)
        if worth.naps:
            slept += 1
        elif slept:
            lengths.append(slept)
            slept = 0
    return lengths


def test_each_nap_in_a_row_is_twice_as_long_up_to_a_bound() -> None:
    assert naps_of(ProposalWorth(), 3 * LONGEST_NAP) == [NAP, 2 * NAP, LONGEST_NAP, LONGEST_NAP]


def test_a_crowd_of_half_the_size_is_read_and_the_whole_one_naps_on() -> None:
    worth = ProposalWorth()
    for _ in range(WINDOW):
        worth.stepped(8)
    naps = []
    for size in (5, 4, 3, 8):
        worth.stepped(size)
        naps.append(worth.naps)
    assert naps == [True, False, False, True]


def test_nobody_naps_while_masks_draft() -> None:
    worth = ProposalWorth()
    for _ in range(WINDOW):
        worth.stepped(8)
    worth.wake()
    assert not worth.naps


class Napping(FixedLayout):
    naps = True


@pytest.mark.parametrize("controller", [FixedLayout.full(3), Napping.full(3)])
def test_a_worker_whose_controller_naps_looks_nothing_up(controller: FixedLayout, tiny: SpaceModel) -> None:
    router = SmallRouter(
        Worker(tiny, num_blocks=32, controller=controller, sources=DraftSources(lookup=True, masks=False))
    )
    seq_id = router.admit([70, 71, 72, 70, 71, 72, 70, 71], max_tokens=40)
    router.run()
    assert (sum(router.ran[seq_id].accepted) > 0) is not isinstance(controller, Napping)
