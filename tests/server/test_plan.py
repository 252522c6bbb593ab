"""Prompt rows are shared so that short prompts do not wait for long ones, and long ones get on."""

from hypothesis import given
from hypothesis import strategies as st
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.geometry.draft_layout import DraftLayout
from space_server.batch.sequence import RunningSequence, SequenceLimits
from space_server.scheduled_batch import LEAST_ROWS, PrefillBudget, plan_step
from space_server.speculation.controller import FixedLayout
from space_server.step_cost import StepCost, StepShape

BLOCK = 16
PLAIN = FixedLayout(lambda room: DraftLayout.plain())


def sequence(seq_id: int, num_ids: int, num_computed: int = 0, num_pages: int | None = None) -> RunningSequence:
    pages = list(range(num_ids // BLOCK + 1 if num_pages is None else num_pages))
    return RunningSequence(
        seq_id=seq_id,
        ids=[9] * num_ids,
        num_prompt=num_ids,
        num_computed=num_computed,
        pages=pages,
        sampling_params=SamplingParams(key=0),
        limits=SequenceLimits(100, 10_000, frozenset(), frozenset()),
        max_drafts=0,
    )


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
