"""Random traffic on random workers: whatever comes, every request ends once, with the text of its solo run."""

from __future__ import annotations

from collections import Counter

import pytest
from doubles.router.scenario import RuleBroken, scripted_performance
from space_router.engine.pages import PagePool
from space_router.engine.queueing.admission import QueueAdmission
from space_router.engine.request.request_state import RequestState, WorkerSequence
from space_router.engine.scheduler import Scheduler
from space_router.metrics import Metrics

METRICS = Metrics()


def perform(first: int, count: int) -> Counter[str]:
    """Run scenarios of these seeds; what happened in them. A rule that is broken names its seed."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + count):
        performance = scripted_performance(seed, METRICS).run()
        happened += performance.outcomes
        happened["preempted"] += performance.num_preemptions
        happened["cached"] += performance.num_cached
        happened["restored"] += performance.num_restored
        happened["deaths"] += len(performance.scenario.deaths)
    return happened


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_every_request_ends_once_with_the_text_of_its_solo_run_within_every_budget(first: int) -> None:
    happened = perform(first, 25)
    assert happened["finished"] > 50
    assert happened["cached"] > 100
    assert happened["restored"] > 0
    assert happened["preempted"] > 0
    assert happened["deaths"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 2000, 100))
def test_the_same_over_two_thousand_scenarios(first: int) -> None:
    happened = perform(first, 100)
    assert all(happened[one] for one in ("finished", "left", "cancelled", "deadline", "refused", "preempted", "deaths"))


def test_an_engine_that_shares_what_is_not_computed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Scheduler._publish

    def too_early(self: Scheduler, sequence: WorkerSequence) -> None:
        computed, sequence.computed = sequence.computed, sequence.num_slots
        sequence.computed = min(sequence.num_slots, len(sequence.live.ids) - 1)
        publish(self, sequence)
        sequence.computed = computed

    monkeypatch.setattr(Scheduler, "_publish", too_early)
    with pytest.raises(RuleBroken, match="scenario"):
        perform(0, 40)


def test_an_engine_that_preempts_the_oldest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(self: Scheduler) -> WorkerSequence | None:
        return min(self.running, key=lambda sequence: sequence.live.age, default=None)

    monkeypatch.setattr(Scheduler, "_victim", oldest)
    with pytest.raises(RuleBroken, match="is the oldest"):
        perform(0, 40)


def test_an_engine_that_loses_a_page_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = PagePool.give_back

    def all_but_one(self: PagePool, blocks: list[int]) -> None:
        give_back(self, blocks[:-1] if len(blocks) > 8 else blocks)

    monkeypatch.setattr(PagePool, "give_back", all_but_one)
    with pytest.raises(RuleBroken, match="blocks are held"):
        perform(0, 40)


def test_an_engine_that_forgets_those_who_wait_for_a_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from space_router.engine.engine import Engine

    def never(self: Engine, live: RequestState, num_computed: int | None = None) -> None:
        live.followers = []

    monkeypatch.setattr(Engine, "_release_followers", never)
    monkeypatch.setattr("doubles.router.scenario.MAX_TICKS", 500)
    with pytest.raises(RuleBroken, match="not over"):
        perform(0, 40)


def test_waits_for_prefixes_happen_in_these_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    follows, waited = QueueAdmission._follows, []

    def watched(self: QueueAdmission, live: RequestState, schedulers: list[Scheduler]) -> bool:
        result = follows(self, live, schedulers)
        waited.append(result)
        return result

    monkeypatch.setattr(QueueAdmission, "_follows", watched)
    perform(0, 10)
    assert 5 < sum(waited) < len(waited)
