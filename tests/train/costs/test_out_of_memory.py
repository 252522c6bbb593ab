"""What a run that does not fit is told to give instead is what the estimate says that fits."""

import re

import pytest
from space_train.estimate import GB, SHAPES, cure_of, estimate
from space_train.train_plan import Method, TrainPlan

ONE_B = SHAPES["1b"]


def test_the_fewest_parts_that_fit_by_the_estimate_are_named() -> None:
    plan = TrainPlan(rows_per_step=8)
    sizes = {parts: estimate(ONE_B, TrainPlan(rows_per_step=8, accumulate=parts)).bytes for parts in (1, 2, 4, 8)}
    memory = int(sizes[4] * 1.2)
    assert sizes[2] > memory
    assert cure_of(plan, 1, ONE_B, memory).startswith("Give --accumulate 4, the smallest that fits by our estimate")
    # What has failed is not named again, whatever the estimate says of it.
    assert "--accumulate 2, the smallest" in cure_of(plan, 1, ONE_B, int(1000 * GB))


def test_a_process_has_its_own_rows_alone_in_parts() -> None:
    assert "--accumulate 2, the smallest" in cure_of(TrainPlan(rows_per_step=8), 4, ONE_B, int(1000 * GB))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (TrainPlan(rows_per_step=8), "Give --accumulate 8, with which the run goes on; or a shorter --length"),
        (TrainPlan(method=Method.FULL, rows_per_step=2), "Give --accumulate 2, .* or --activation-checkpointing, a"),
        (TrainPlan(rows_per_step=8, accumulate=8), "one row at a time already: give a shorter --length"),
    ],
)
def test_where_nothing_is_known_to_fit_the_least_is_named(plan: TrainPlan, words: str) -> None:
    for shape, memory in ((None, None), (ONE_B, 1000)):
        assert re.search(words, cure_of(plan, 1, shape, memory))
