"""The cost of a step is what was measured, in between and while the machine changes."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_server.step_cost import BENDS, CROWDS, DEPTHS, StepCost, StepShape, read_points


def true_seconds(shape: StepShape) -> float:
    """A machine with a ridge at 32 rows."""
    rows = shape.num_rows
    return (
        1e-3
        + 2e-5 * shape.num_sequences
        + 1e-5 * rows
        + 9e-5 * max(0, rows - 32)
        + 3e-5 * (shape.num_chain_rows - shape.num_sequences)
        + 1e-5 * shape.num_drafting
        + 1e-7 * shape.num_pairs
    )


def shapes() -> list[StepShape]:
    found = []
    for sequences in (1, 2, 4, 8, 16, 32, 64):
        for drafts, masks in ((0, 0), (1, 2), (2, 6), (3, 12), (5, 30)):
            for context in (64, 1024):
                drafting = sequences if masks else 0
                found.append(
                    StepShape(
                        sequences, sequences * (1 + drafts), sequences * masks, drafting, 0, 0, sequences * context
                    )
                )
    return found


def measured() -> StepCost:
    return StepCost.from_points([(shape, true_seconds(shape)) for shape in shapes()])


def test_what_was_measured_is_expected_again() -> None:
    cost = measured()
    for shape in shapes():
        assert cost.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.03)


@given(st.integers(1, 64), st.integers(0, 5), st.integers(0, 30))
def test_what_lies_between_is_near(sequences: int, drafts: int, masks: int) -> None:
    shape = StepShape(
        sequences, sequences * (1 + drafts), sequences * masks, sequences if masks else 0, 0, 0, 200 * sequences
    )
    assert measured_once.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.1)


measured_once = measured()


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 30), st.integers(0, 2000), st.integers(0, 9999))
def test_seconds_are_the_weights_times_what_is_laid_out(
    sequences: int, drafts: int, masks: int, prefill: int, context: int
) -> None:
    chain, rows = sequences * (1 + drafts), sequences * (1 + drafts + masks) + prefill
    shape = StepShape(sequences, chain, sequences * masks, sequences, prefill, 7 * context * prefill, context, 3, 5)
    pairs = 7 * context * prefill + (rows - prefill) * context // sequences
    deep = [prefill * max(0, 7 * context - depth) / 1024 for depth in DEPTHS]
    laid_out = [1, *between(sequences, CROWDS), chain - sequences, sequences, context / 1024, pairs / 1024, 3]
    laid_out += [5, 5 * sequences, *deep]
    weights = [1e-3 * (n + 1) for n in range(len(laid_out) + len(BENDS))]
    expected = sum(w * n for w, n in zip(weights, [*laid_out, *between(rows, BENDS)], strict=True))
    assert StepCost(weights).seconds(shape) == pytest.approx(expected)


def between(number: int, bends: tuple[int, ...]) -> list[int]:
    """How many of 0 .. number lie in each piece between bends."""
    return [len(range(begin, min(number, end))) for begin, end in zip(bends, (*bends[1:], 1 << 30), strict=True)]


@given(st.integers(1, 64), st.integers(0, 5), st.integers(0, 20))
def test_more_rows_never_cost_less(sequences: int, drafts: int, masks: int) -> None:
    some = StepShape(sequences, sequences * (1 + drafts), sequences * masks, sequences if masks else 0)
    more = StepShape(sequences, sequences * (2 + drafts), sequences * masks, sequences if masks else 0)
    assert measured_once.seconds(more) >= measured_once.seconds(some)


def test_a_machine_that_slows_down_is_followed_everywhere_and_a_cheap_place_there_alone() -> None:
    cost, plain, full = measured(), StepShape.plain(8), StepShape(8, 48, 240, 8)
    for _ in range(2000):
        cost.learn(plain, 2 * true_seconds(plain))
        cost.learn(full, 2 * true_seconds(full))
    elsewhere = StepShape(2, 4, 4, 2)
    assert cost.seconds(elsewhere) == pytest.approx(2 * true_seconds(elsewhere), rel=0.1)
    for _ in range(100):
        cost.learn(plain, true_seconds(plain))
        cost.learn(full, 2 * true_seconds(full))
    assert cost.seconds(plain) == pytest.approx(true_seconds(plain), rel=0.06)
    assert cost.seconds(full) == pytest.approx(2 * true_seconds(full), rel=0.06)


def test_a_step_in_which_the_machine_was_away_teaches_little() -> None:
    cost, plain = measured(), StepShape.plain(4)
    before = cost.seconds(plain)
    cost.learn(plain, 1000 * before)
    assert cost.seconds(plain) < 1.1 * before


def test_nor_does_the_first_step_of_a_place_if_the_machine_was_away() -> None:
    """Nobody may go there again, and learn better."""
    cost, shape = measured(), StepShape(6, 15, 20, 6)
    before = cost.seconds(shape)
    cost.learn(shape, 50 * before)
    assert cost.seconds(shape) < 4 * before
    cost.learn(shape, before)
    assert cost.seconds(shape) == pytest.approx(before, rel=0.2)


def test_noise_averages_out() -> None:
    cost, plain, rng = measured(), StepShape.plain(4), random.Random(0)
    for _ in range(500):
        cost.learn(plain, true_seconds(plain) * rng.uniform(0.8, 1.2))
    assert cost.seconds(plain) == pytest.approx(true_seconds(plain), rel=0.06)


def test_points_survive_a_file() -> None:
    points = [(StepShape(2, 4, 6, 2, 8, 16, 32), 0.25)]
    assert read_points(json.loads(json.dumps([[*shape, seconds] for shape, seconds in points]))) == points


def test_rows_that_were_never_measured_are_not_free() -> None:
    """Four sequences were not measured, nor more rows than 36: they cost what rows cost before."""
    few = [point for point in ((shape, true_seconds(shape)) for shape in shapes()) if point[0].num_sequences == 1]
    cost = StepCost.from_points(few)
    full = StepShape(4, 24, 120, 4, num_context=256)
    assert 0.4 * true_seconds(full) < cost.seconds(full) < 2 * true_seconds(full)


def test_a_place_nobody_has_been_to_is_learnt_in_a_few_steps() -> None:
    cost, shape = StepCost.from_points([(StepShape.plain(1), 0.01)]), StepShape(16, 96, 480, 16)
    for _ in range(6):
        cost.learn(shape, 7.0)
    assert cost.seconds(shape) == pytest.approx(7.0, rel=0.2)
    assert cost.seconds(StepShape.plain(1)) == pytest.approx(0.01)


def test_single_steps_of_a_place_that_is_well_known_surprise_nobody() -> None:
    """On a restless machine many are off by a quarter, and some by far more."""
    cost, shape = measured(), StepShape.plain(4)
    expected = cost.seconds(shape)
    for times in (*[1.0] * 16, 1.3, 0.7, 1.5, 0.5, 10.0, 0.8):
        cost.learn(shape, times * expected)
    assert cost.num_surprises == 0


def test_what_a_new_place_costs_is_news_until_it_is_known() -> None:
    cost, shape = measured(), StepShape(6, 15, 20, 6)
    took = 2.0 * cost.seconds(shape)
    cost.learn(shape, took)
    assert cost.num_surprises == 1
    for _ in range(100):
        cost.learn(shape, took)
    known = cost.num_surprises
    assert known < 8
    for _ in range(100):
        cost.learn(shape, took)
    assert cost.num_surprises == known


def test_a_known_place_that_grows_dearer_little_by_little_is_news() -> None:
    cost, shape = measured(), StepShape.plain(4)
    expected = cost.seconds(shape)
    for _ in range(12):
        cost.learn(shape, 1.3 * expected)
    assert cost.num_surprises == 1


def test_what_nobody_has_seen_is_feared_until_somebody_has() -> None:
    near = [(shape, true_seconds(shape)) for shape in shapes() if shape.num_sequences <= 8]
    cost = StepCost.from_points(near)
    far, known = StepShape(64, 384, 1920, 64, num_context=4096), StepShape(8, 16, 16, 8, num_context=512)
    before = cost.seconds(far)
    assert cost.seconds(known) == pytest.approx(true_seconds(known), rel=0.05)
    assert before > 1.3 * cost._base(far)
    cost.learn(far, cost._base(far))
    assert cost.seconds(far) == pytest.approx(cost._base(far))


def test_other_work_that_ends_is_forgotten_of_steps_that_were_not_taken_meanwhile_too() -> None:
    """Speed drops to a fifth for 2,000 steps and returns; drafts, not tried meanwhile, look as good as before."""
    cost, plain, rng = measured(), StepShape.plain(8, 512), random.Random(0)
    drafting = [shape for shape in shapes() if shape.num_mask_rows and shape.num_sequences in (4, 8)]

    def take(num_steps: int, slow: float, unrest: float) -> None:
        for _ in range(num_steps):
            cost.learn(plain, slow * true_seconds(plain) * rng.lognormvariate(0.0, unrest))

    def ratio(shape: StepShape) -> float:
        return cost.seconds(shape) / cost.seconds(plain) / (true_seconds(shape) / true_seconds(plain))

    take(200, 1.0, 0.03)
    take(2000, 5.0, 0.2)
    assert cost.seconds(plain) == pytest.approx(5 * true_seconds(plain), rel=0.2)
    take(64, 1.0, 0.03)
    assert cost.num_turns == 2
    for shape in drafting:
        assert ratio(shape) == pytest.approx(1.0, rel=0.1)
        assert cost.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.15)


def test_one_place_that_becomes_dearer_by_a_quarter_is_no_turn_of_the_machine() -> None:
    cost, plain, full = measured(), StepShape.plain(8), StepShape(8, 48, 240, 8)
    before = cost.seconds(full)
    for _ in range(300):
        cost.learn(plain, 1.25 * true_seconds(plain))
    assert cost.num_turns == 0
    assert cost.seconds(full) < 1.1 * before


def test_a_few_steps_in_which_the_machine_was_away_are_no_turn() -> None:
    cost, plain = measured(), StepShape.plain(4)
    for number in range(400):
        cost.learn(plain, true_seconds(plain) * (20.0 if number % 8 == 0 else 1.0))
    assert cost.num_turns == 0


def test_points_that_are_not_sure_give_way_to_the_first_steps() -> None:
    """Measured beside other work that cost steps with many rows more than others."""
    points = [(shape, true_seconds(shape) * (5.0 if shape.num_mask_rows else 2.0)) for shape in shapes()]
    cost, plain, drafting = (
        StepCost.from_points(points, are_sure=False),
        StepShape.plain(8, 512),
        StepShape(8, 24, 48, 8),
    )
    assert cost.num_turns == 1
    for _ in range(40):
        cost.learn(plain, true_seconds(plain))
    assert cost.seconds(plain) == pytest.approx(true_seconds(plain), rel=0.03)
    for _ in range(3):
        cost.learn(drafting, true_seconds(drafting))
    assert cost.seconds(drafting) == pytest.approx(true_seconds(drafting), rel=0.05)


PLAIN_MS = {1: 4.72, 2: 4.78, 4: 4.85, 8: 4.95, 16: 5.2, 32: 5.59, 64: 6.43, 128: 8.48, 256: 13.48}
HEAD_MS = {1: 5.48, 8: 5.95, 32: 7.98, 64: 12.64, 128: 23.5, 256: 45.75}
"""An 8B Llama's steps on an H200 by batch: plain, and of six rows a sequence with five drafts of a recurrent head."""


def test_longer_contexts_than_were_measured_do_not_cost_what_rows_cost() -> None:
    """In steps of one context rows and keys grow together, and the row at the roofline's ridge is not linear."""
    points = [(StepShape(size, size, num_context=64 * size), ms / 1e3) for size, ms in PLAIN_MS.items()]
    points += [
        (StepShape(size, 6 * size, num_context=64 * size, num_head_steps=5), ms / 1e3) for size, ms in HEAD_MS.items()
    ]
    cost = StepCost.from_points(points)
    for shape, seconds in points:
        later = shape._replace(num_context=11 * shape.num_context)
        assert seconds < 1.01 * cost.seconds(later) < 1.25 * seconds


def test_few_points_do_not_make_drafts_dear_that_no_mask_made() -> None:
    """Of a plain step, one with 3 chain rows and 6 masks, and a prompt: rows were long taken for cheap, and the time of
    the second for that of its chain rows, so that a draft seemed to cost more than a plain step."""
    points = [
        (StepShape(1, 1, 0, 0, 0, 0, context), seconds)
        for context, seconds in ((76, 0.000605), (80, 0.000594), (78, 0.000569))
    ]
    points += [(StepShape(1, 3, 6, 1, 0, 0, 66), 0.00256), (StepShape(1, 1, 0, 0, 127), 0.0173)]
    cost = StepCost.from_points(points)
    for shape, seconds in points:
        assert cost.seconds(shape) == pytest.approx(seconds, rel=0.05)
    assert cost.seconds(StepShape(1, 9, num_context=66)) < 1.1 * cost.seconds(points[3][0])
