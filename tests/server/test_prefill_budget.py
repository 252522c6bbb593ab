"""Prompt rows keep a step within its seconds while others decode, and never fewer than get a prompt on."""

from types import SimpleNamespace
from typing import Any

import pytest
from space_server.prefill_budget import LEAST_ROWS, PrefillBudget
from space_server.step_cost import StepCost, StepShape


class Machine(StepCost):
    """A millisecond a row, and a microsecond for each pair of a row and an id before it."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_rows + 1e-6 * shape.num_pairs


def sequences(pending: int, computed: int) -> Any:
    decoding = [SimpleNamespace(num_pending=1, num_computed=0)] * 2
    return decoding, [*decoding, SimpleNamespace(num_pending=pending, num_computed=computed)]


@pytest.mark.parametrize("computed", [0, 1000, 4000])
def test_as_many_rows_as_the_seconds_allow(computed: int) -> None:
    decoding, able = sequences(5000, computed)
    rows = PrefillBudget(512, 0.1, Machine()).rows(decoding, able)
    assert 0.002 + rows * (1e-3 + 1e-6 * computed) <= 0.1
    assert 0.002 + (rows + LEAST_ROWS) * (1e-3 + 1e-6 * computed) > 0.1


def test_a_prompt_gets_on_whatever_the_budget() -> None:
    assert PrefillBudget(512, 1e-6, Machine()).rows(*sequences(5000, 0)) == LEAST_ROWS


def test_nobody_waits_where_nobody_decodes() -> None:
    assert PrefillBudget(512, 0.001, Machine()).rows([], sequences(5000, 0)[1][2:]) == 512


def test_without_seconds_rows_alone_count() -> None:
    assert PrefillBudget(300).rows(*sequences(5000, 0)) == 300
