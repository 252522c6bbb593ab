"""Drafts that no mask made are taken where all of a step are worth their time, and texts are read where that pays."""

import pytest
from space_common.worker_client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.space_model import SpaceModel
from space_server.drafts.acceptance import Acceptance, AcceptanceShape
from space_server.drafts.drafts import DraftSources
from space_server.speculation.controller import (
    GAIN_RATE,
    LONGEST_PAUSE_STEPS,
    LOOK_SELDOM,
    LOOKUP_RETRY_EVERY,
    PATIENCE,
    PAUSE_STEPS,
    READING_SECONDS,
    READING_WINDOW,
    DraftLimits,
    FixedLayout,
    LookupPolicy,
    Offer,
    SpeculationController,
    StepLoad,
)
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker

BAD = Offer(tokens=0.1, seconds=1e-3, plain_tokens=8, plain_seconds=8e-3)


def good(seconds: float) -> Offer:
    """It saves so many."""
    return Offer(tokens=1000.0 * seconds, seconds=0.0, plain_tokens=8, plain_seconds=8e-3)


def stepped(
    worth: LookupPolicy, num_sequences: int = 8, *, num_read: int | None = None, by_masks: bool = False
) -> None:
    worth.stepped(num_sequences, num_sequences if num_read is None else num_read, by_masks=by_masks)


def napping(num_sequences: int = 8) -> LookupPolicy:
    """Who has read that many for nothing."""
    worth = LookupPolicy()
    for _ in range(READING_WINDOW):
        stepped(worth, num_sequences)
    assert worth.is_paused
    return worth


class Tiled(StepCost):
    """Rows are cheap, but for the first beyond one of each sequence: a product's next tile, say."""

    def __init__(self, tile: float) -> None:
        super().__init__([])
        self.tile = tile

    def seconds(self, shape: StepShape) -> float:
        more = shape.num_rows - shape.num_sequences
        return 1e-3 * (1.0 + self.tile * (more > 0) + 0.005 * more)


def rooms(num_proposing: int, chances: tuple[float, ...] = (0.8, 0.8)) -> list[DraftLimits]:
    proposing = [DraftLimits(n, len(chances), 0, 100, chances=chances) for n in range(num_proposing)]
    return proposing + [DraftLimits(n, 0, 0, 100) for n in range(num_proposing, 8)]


@pytest.mark.parametrize(("num_proposing", "taken"), [(1, False), (8, True)])
def test_one_sequences_drafts_are_not_taken_where_all_pay_for_them(num_proposing: int, taken: bool) -> None:
    controller = SpeculationController(Tiled(0.3))
    layouts = [controller.layouts(rooms(num_proposing), StepLoad()) for _ in range(LOOKUP_RETRY_EVERY - 1)][-1]
    assert [layout.num_drafts for layout in layouts] == ([2] * num_proposing if taken else [0] * 8)


def test_where_the_first_row_more_is_cheap_one_sequences_drafts_are_taken() -> None:
    controller = SpeculationController(Tiled(0.0))
    assert controller.layouts(rooms(1), StepLoad())[0] == DraftLayout.of(2, (0, 0, 0))


def test_the_price_of_what_does_not_pay_is_looked_at_again() -> None:
    worth = LookupPolicy()
    assert [worth.pays(BAD) for _ in range(2 * LOOKUP_RETRY_EVERY)].count(True) == 2


@pytest.mark.parametrize(("num_sequences", "num_steps"), [(1, 64), (2, 32), (8, 8), (64, 8)])
def test_texts_are_not_read_where_that_has_not_paid_for_itself(num_sequences: int, num_steps: int) -> None:
    worth = LookupPolicy()
    for _ in range(num_steps):
        assert not worth.is_paused
        stepped(worth, num_sequences)
    assert worth.is_paused


def test_steps_of_those_whose_texts_nobody_reads_say_nothing() -> None:
    worth = LookupPolicy()
    for _ in range(5 * READING_WINDOW):
        stepped(worth, num_read=0)
        assert not worth.is_paused


def test_texts_are_read_as_long_as_drafts_save_more_than_reading_takes() -> None:
    worth = LookupPolicy()
    for _ in range(3 * READING_WINDOW):
        assert worth.pays(good(16 * READING_SECONDS))
        stepped(worth)
        assert not worth.is_paused


def naps_of(worth: LookupPolicy, num_steps: int) -> list[int]:
    """The steps of each nap that ended."""
    lengths, slept = [], 0
    for _ in range(num_steps):
        stepped(worth)
        if worth.is_paused:
            slept += 1
        elif slept:
            lengths.append(slept)
            slept = 0
    return lengths


def test_each_nap_in_a_row_is_twice_as_long_up_to_a_bound() -> None:
    assert naps_of(LookupPolicy(), 3 * LONGEST_PAUSE_STEPS) == [
        PAUSE_STEPS,
        2 * PAUSE_STEPS,
        LONGEST_PAUSE_STEPS,
        LONGEST_PAUSE_STEPS,
    ]


def test_a_crowd_of_half_the_size_is_read_and_the_whole_one_naps_on() -> None:
    worth, is_paused = napping(8), []
    for size in (5, 4, 3, 8):
        stepped(worth, size)
        is_paused.append(worth.is_paused)
    assert is_paused == [True, False, False, True]


def test_nobody_naps_while_masks_draft() -> None:
    worth = napping()
    stepped(worth, by_masks=True)
    assert not worth.is_paused
    stepped(worth)
    assert worth.is_paused


@pytest.mark.parametrize("by_masks", [False, True])
def test_the_gain_follows_what_drafts_save_or_would(by_masks: bool) -> None:
    worth = LookupPolicy()
    for _ in range(round(5 / GAIN_RATE)):
        stepped(worth, by_masks=by_masks)
        if by_masks and worth.asks:
            worth.would_pay(good(2e-3))
        elif not by_masks:
            assert worth.pays(good(2e-3))
    assert worth.gain == pytest.approx(0.25, rel=0.02)
    assert napping().gain == 0.0


def test_masks_must_beat_plain_decoding_with_its_proposals() -> None:
    """Ten rows of masks bring each sequence 1.5 tokens more; where texts repeat themselves proposals bring as much."""
    rate = {}
    for proposing in (0, 2):
        controller = SpeculationController(Ridge())
        drawn = [
            DraftLimits(
                n, 5, 5, 100, acceptance=Acceptance(AcceptanceShape((0.7,) * 5, 5)), is_read=True, chances=chances
            )
            for n, chances in enumerate([(0.95,) * 5] * proposing + [()] * (2 - proposing))
        ]
        for _ in range(PATIENCE + 8 * LOOK_SELDOM):
            layouts = controller.layouts(drawn, StepLoad())
        rate[proposing] = controller.rule is not None
        assert (layouts[0].num_masks > 0) is rate[proposing]
    assert rate == {0: True, 2: False}


class Ridge(StepCost):
    """Rows are cheap up to 14, and dear beyond: room for the drafts of two, or for some masks."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * (1.0 + 0.01 * shape.num_rows + 0.2 * max(0, shape.num_rows - 14))


class Napping(FixedLayout):
    is_paused = True


@pytest.mark.parametrize("controller", [FixedLayout.full(3), Napping.full(3)])
def test_a_worker_whose_controller_naps_looks_nothing_up(controller: FixedLayout, tiny: SpaceModel) -> None:
    router = WorkerClient(
        Worker(tiny, num_blocks=32, controller=controller, sources=DraftSources(lookup=True, masks=False))
    )
    sequence = router.generate([70, 71, 72, 70, 71, 72, 70, 71], max_tokens=40)
    assert (sum(sequence.accepted) > 0) is not isinstance(controller, Napping)
