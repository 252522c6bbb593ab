from fractions import Fraction
from itertools import combinations

import pytest
from space_eval.quality.humaneval import pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_it_is_the_share_of_draws_with_a_right_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        right = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            draws = list(combinations(right, k))
            share = Fraction(sum(any(draw) for draw in draws), len(draws))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(float(share), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(200, 13, 10), (200, 1, 100), (1000, 999, 2)])
def test_many_samples_equal_the_closed_product(n: int, c: int, k: int) -> None:
    misses = Fraction(1)
    for i in range(n - c + 1, n + 1):
        misses *= 1 - Fraction(k, i)
    assert pass_at_k(n, c, k) == pytest.approx(float(1 - misses), rel=1e-12)


def test_one_sample_of_n_is_the_share_of_right_ones() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)


def test_it_is_not_the_biased_estimate() -> None:
    assert pass_at_k(10, 1, 5) == 0.5
    assert 1 - (1 - 1 / 10) ** 5 < 0.41


@pytest.mark.parametrize(
    ("n", "c", "k", "words"), [(5, 6, 1, "num_correct"), (5, -1, 1, "num_correct"), (5, 1, 6, "k"), (5, 1, 0, "k")]
)
def test_impossible_numbers_are_refused(n: int, c: int, k: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words} must lie in"):
        pass_at_k(n, c, k)
