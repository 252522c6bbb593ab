"""Prompt rows are shared so that short prompts do not wait for long ones, and long ones get on."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.geometry.draft_layout import DraftLayout
from space_server.batch import RunningSequence, SequenceLimits
from space_server.scheduled_batch import LEAST_ROWS, PrefillBudget, plan_step
from space_server.speculation.controller import FixedLayout
from space_server.step_cost import StepCost, StepShape

BLOCK = 16
PLAIN = FixedLayout(lambda room: DraftLayout.plain())


def sequence(seq_id: int, num_ids: int, num_computed: int = 0, num_pages: int | None = None) -> RunningSequence:
    pages = list(range(num_ids // BLOCK + 1 if num_pages is None else num_pages))
    return RunningSequence(
        seq_id=seq_id, ids=[9] * num_ids, num_prompt=num_ids, num_computed=num_computed, pages=pages,
        sampling_params=SamplingParams(key=0), limits=SequenceLimits(100, 10_000, frozenset(), frozenset()),
        max_drafts=0,
    )  # fmt: skip


def rows(sequences: list[RunningSequence], budget: int) -> dict[int, int]:
    plan = plan_step(sequences, PLAIN, block_size=BLOCK, budget=PrefillBudget(budget))
    return {one.sequence.seq_id: one.num_pending for one in plan.plans}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert rows([sequence(1, 4000), sequence(2, 20)], 100) == {1: 80, 2: 20}


def test_a_long_prompt_gets_on_beside_many_short_ones() -> None:
    assert rows([sequence(1, 4000), *(sequence(n, 20) for n in range(2, 20))], 100) == {1: 60, 2: 20, 3: 20}


def test_of_long_prompts_the_oldest_is_read_first() -> None:
    assert rows([sequence(1, 300), sequence(2, 200)], 100) == {1: 100}


def test_who_decodes_runs_beside_the_budget() -> None:
    assert rows([sequence(1, 300), sequence(2, 33, 32)], 100) == {1: 100, 2: 1}


class Slow(StepCost):
    """A millisecond a row."""

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_rows

    feared = seconds


def test_drafts_wait_where_they_would_take_a_step_with_prompt_rows_over_its_seconds() -> None:
    drafting = sequence(2, 33, 32, num_pages=8)
    drafting.drafts, drafting.max_drafts = [7, 7, 7], 3
    full = FixedLayout(lambda room: DraftLayout.full(room.num_drafts, 0))

    def chain_rows(*others: RunningSequence, seconds: float) -> int:
        budget = PrefillBudget(100, seconds, Slow([]))
        return plan_step([*others, drafting], full, block_size=BLOCK, budget=budget).shape.num_chain_rows

    assert chain_rows(sequence(1, 300), seconds=0.0095) == 1
    assert chain_rows(sequence(1, 5), seconds=0.0095) == 5  # few prompt rows: both roots and the drafts
    assert chain_rows(seconds=0.002) == 4  # nobody is kept waiting by a prompt


def test_a_prompt_does_not_take_its_time_because_others_wait_for_a_page() -> None:
    waiting = sequence(2, 33, 32, num_pages=2)
    plan = plan_step([sequence(1, 300), waiting], PLAIN, block_size=BLOCK, budget=PrefillBudget(200, 0.009, Slow([])))
    assert plan.out_of_slots == [waiting]
    assert plan.shape.num_prefill_rows == LEAST_ROWS


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 30)), min_size=1, max_size=12), st.integers(1, 300))
def test_the_budget_is_kept_and_used_and_the_oldest_gets_on(prompts: list[tuple[int, int]], budget: int) -> None:
    sequences = [sequence(n, size, num_pages=pages) for n, (size, pages) in enumerate(prompts)]
    able = [s for s in sequences if s.num_free_slots(BLOCK) > 0]
    given_rows = rows(sequences, budget)
    reading = [s for s in able if s.num_pending > 1]
    used = sum(given_rows.get(s.seq_id, 0) for s in reading)
    wanted = {s.seq_id: min(s.num_pending, s.num_free_slots(BLOCK)) for s in reading}
    assert used == min(budget, sum(wanted.values()))
    assert all(given_rows.get(seq_id, 0) <= most for seq_id, most in wanted.items())
    if reading:
        assert given_rows[reading[0].seq_id] >= min(wanted[reading[0].seq_id], (budget + 1) // 2)


class Machine(StepCost):
    """A millisecond a row, and a microsecond for each pair of a row and an id before it."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_rows + 1e-6 * shape.num_pairs

    feared = seconds


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


# What the server has measured at its start, and a machine that is something else: 0.1 s are what a step may take.

BUDGET = 0.1
KNOWN = (*(StepShape.plain(count) for count in (1, 2, 4, 8)), *(StepShape(0, 0, 0, 0, rows) for rows in (32, 128)))
KNOWN_BEHIND = (StepShape(0, 0, 0, 0, 32, 512 * 32),)

Taken = Callable[[StepShape], float]


def as_measured(shape: StepShape) -> float:
    """Seconds of a step on a machine that has no surprises."""
    return 0.02 + 2e-4 * shape.num_rows + 1e-7 * shape.num_pairs


def with_dear_keys(shape: StepShape) -> float:
    """Behind the first thousand keys, which no cache holds, each costs six times more."""
    return as_measured(shape) + 5e-7 * shape.num_prefill_rows * max(0.0, shape.num_before - 1024)


def with_dear_beginnings(shape: StepShape) -> float:
    """Memory that was never touched before."""
    return as_measured(shape) * (1.8 if shape.num_prefill_rows and shape.num_before < 200 else 1.0)


def half_as_fast(shape: StepShape) -> float:
    """Somebody else has begun to use the machine."""
    return 1.9 * as_measured(shape)


def jumpy() -> Taken:
    """Somebody else uses the machine now and then: every tenth step takes half as long again, others up to a fifth."""
    rng = random.Random(0)
    return lambda shape: as_measured(shape) * (1.5 if rng.random() < 0.1 else rng.uniform(1.0, 1.2))


def read_prompt(cost: StepCost, taken: Taken, *, begin: int = 0, length: int = 4096) -> list[float]:
    """Seconds of the steps that two others decode beside until the prompt is read; `cost` learns from them."""
    computed, steps = begin, []
    while computed < length:
        decoding, able = sequences(length + 1 - computed, computed)
        rows = min(PrefillBudget(512, BUDGET, cost).rows(decoding, able), length - computed)
        shape = StepShape(2, 2, num_prefill_rows=rows, num_prefill_pairs=rows * computed)
        steps.append(taken(shape))
        cost.learn(shape, steps[-1])
        computed += rows
    return steps


def at_start() -> StepCost:
    return StepCost.from_points([(shape, as_measured(shape)) for shape in (*KNOWN, *KNOWN_BEHIND)])


@pytest.mark.parametrize("taken", [as_measured, with_dear_keys, with_dear_beginnings, half_as_fast, jumpy()])
def test_nobody_waits_twice_the_budget_for_the_first_long_prompt_nor_for_the_next(taken: Taken) -> None:
    cost = at_start()
    for _ in range(3):
        assert max(read_prompt(cost, taken)) <= 2 * BUDGET


def test_nor_where_a_prompt_begins_behind_more_cached_keys_than_were_ever_read() -> None:
    assert max(read_prompt(at_start(), with_dear_keys, begin=8192, length=12000)) <= 2 * BUDGET


def test_the_average_alone_would_make_them_wait() -> None:
    """What the fear is for: by what is expected the same prompt makes steps of more than twice the budget."""

    class Fearless(StepCost):
        feared = StepCost.seconds

    cost = Fearless.from_points([(shape, as_measured(shape)) for shape in (*KNOWN, *KNOWN_BEHIND)])
    assert max(read_prompt(cost, with_dear_keys, begin=8192, length=12000)) > 2 * BUDGET


def test_caution_is_for_what_is_not_known_and_goes_as_it_comes_to_be() -> None:
    cost = at_start()
    first, *_, last = (read_prompt(cost, as_measured, length=2048) for _ in range(3))
    assert max(last) > 0.9 * BUDGET
    assert len(last) < len(first)
