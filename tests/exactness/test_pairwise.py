"""The cover shows every pair, the same one each time, in far fewer cases than the product."""

from itertools import combinations, product
from math import prod

import pytest
from pairwise import covering_cases

AXES = {"k": (0, 1, 2, 3, 4, 5), "law": tuple("abcdefgh"), "life": ("whole", "preempted", "restarted"), "hit": (0, 1)}


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_of_values_stands_together_in_some_case(strength: int) -> None:
    cases = covering_cases(AXES, strength=strength)
    for names in combinations(AXES, strength):
        wanted = set(product(*(AXES[name] for name in names)))
        assert {tuple(case[name] for name in names) for case in cases} == wanted


def test_the_cover_is_small_and_the_same_each_time() -> None:
    cases = covering_cases(AXES)
    assert cases == covering_cases(AXES)
    assert len(cases) <= 60 < prod(map(len, AXES.values()))  # 48 pairs of k and law, each in a case of its own


def test_impossible_cases_are_left_out_and_nothing_else() -> None:
    cases = covering_cases(AXES, possible=lambda case: case["k"] > 0 or case["hit"] == 0)
    assert all(case["k"] > 0 or case["hit"] == 0 for case in cases)
    pairs = {(case["k"], case["hit"]) for case in cases}
    assert pairs == set(product(AXES["k"], AXES["hit"])) - {(0, 1)}
