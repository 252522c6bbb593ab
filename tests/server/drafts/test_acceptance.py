"""Acceptance is learnt from verdicts: the shape by all sequences, the level by each."""

import math
import random

import pytest
from space_server.drafts.acceptance import Acceptance, AcceptanceShape


def chance(shape: AcceptanceShape, depth: int, shift: float = 0.0) -> float:
    """Of a draft of this depth, in a sequence whose log-odds are shifted so far."""
    return 1.0 / (1.0 + math.exp(-shape.log_odds(depth) - shift))


def run(acceptance: Acceptance, chances: list[float], steps: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        accepted = 0
        while accepted < len(chances) and rng.random() < chances[accepted]:
            accepted += 1
        acceptance.step(1, len(chances), accepted)


def test_at_first_all_is_as_the_prior_says() -> None:
    shape = AcceptanceShape((0.8, 0.6), 3)
    acceptance = Acceptance(shape)
    assert [chance(shape, depth, acceptance.shift) for depth in (1, 2, 3, 9)] == pytest.approx([0.8, 0.6, 0.6, 0.6])
    assert acceptance.level == 0


def test_the_shape_follows_what_is_verified_by_depth() -> None:
    shape = AcceptanceShape((0.5, 0.5), 2)
    for seed in range(20):
        run(Acceptance(shape), [0.8, 0.3], 100, seed)
    assert [shape.mean(1), shape.mean(2)] == pytest.approx([0.8, 0.3], abs=0.06)


def test_sequences_come_apart() -> None:
    shape = AcceptanceShape((0.6, 0.6, 0.6), 3)
    good, bad = Acceptance(shape), Acceptance(shape)
    for seed in range(40):
        run(good, [0.95] * 3, 4, seed)
        run(bad, [0.1] * 3, 4, seed)
    assert good.level > bad.level + 2
    assert chance(shape, 1, good.shift) > 0.8
    assert chance(shape, 1, bad.shift) < 0.35


def test_drafts_from_deeper_masks_count_where_they_come_from() -> None:
    shape = AcceptanceShape((0.5, 0.5, 0.5), 3)
    acceptance = Acceptance(shape)
    for _ in range(50):
        acceptance.step(3, 1, 0)
    assert chance(shape, 1) == pytest.approx(0.5)
    assert chance(shape, 3) < 0.35


def test_a_draft_behind_a_rejected_one_says_nothing() -> None:
    shape = AcceptanceShape((0.5, 0.5), 2)
    for _ in range(50):
        Acceptance(shape).step(1, 2, 0)
    assert chance(shape, 2) == pytest.approx(0.5)


def test_who_is_not_drafted_for_becomes_average_again() -> None:
    acceptance = Acceptance(AcceptanceShape())
    run(acceptance, [0.0] * 5, 120)
    low = acceptance.shift
    for _ in range(500):
        acceptance.step(1, 0, 0)
    assert low < -1
    assert abs(acceptance.shift) < 0.3 * abs(low)
