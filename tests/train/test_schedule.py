"""Progress follows the budget, and the learning rate follows progress."""

import pytest
from space_train.train_plan import Budget, LearningRate, between


def test_progress_is_the_larger_share_of_the_two_budgets_and_never_above_one() -> None:
    budget = Budget(minutes=2, tokens=1000)
    assert budget.progress(30, 100) == 0.25
    assert budget.progress(30, 900) == 0.9
    assert budget.progress(500, 0) == 1.0


def test_a_budget_of_nothing_is_used_up_at_once_and_no_budget_is_refused() -> None:
    assert Budget(minutes=0).progress(0, 0) == 1.0
    assert Budget(tokens=0).progress(0, 0) == 1.0
    with pytest.raises(ValueError, match="needs a budget"):
        Budget()


def test_the_rate_warms_up_stays_and_falls_to_its_end() -> None:
    rate = LearningRate(warmup=0.1, decay_from=0.5, final=0.2)
    assert 0 < rate.at(0.0) < rate.at(0.05) < 1.0
    assert rate.at(0.1) == rate.at(0.4) == 1.0
    assert rate.at(0.75) == pytest.approx(0.6)
    assert rate.at(1.0) == pytest.approx(0.2)


def test_between_is_linear() -> None:
    assert [between(2.0, 4.0, progress) for progress in (0.0, 0.5, 1.0)] == [2.0, 3.0, 4.0]
