"""How many held-out rows a run looks at: enough for a figure, and few beside those that it learns from."""

import pytest
from doubles.training import random_examples, tiny_plan
from space_train.session import held_out_rows, rows_of_a_look
from space_train.train_plan import Budget


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        (Budget(steps=0), 4),
        (Budget(steps=50), 10),  # 200 rows are trained on, half as many read in ten looks
        (Budget(epochs=2), 30),
        (Budget(tokens=320 * 32), 16),
        (Budget(epochs=2, steps=50), 10),
        (Budget(epochs=2000), 64),
        (Budget(minutes=1), 64),
    ],
)
def test_looks_read_at_most_half_as_many_rows_as_are_trained_on_but_a_few(budget: Budget, rows: int) -> None:
    plan = tiny_plan(budget=budget, rows_per_step=4, length=32, evaluations=9)
    assert rows_of_a_look(plan, epoch=300) == rows


def test_the_first_rows_are_looked_at() -> None:
    plan, examples = tiny_plan(), random_examples(12, 20, 30)
    whole, part = held_out_rows(examples, plan, 0), held_out_rows(examples, plan, 0, 5)
    assert len(whole.ids) == 12
    assert part.ids.tolist() == whole.ids[:5].tolist()
