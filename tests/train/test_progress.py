"""What a run says of its time: how much is left, where it ends, and how it is written where no terminal is."""

import io
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles.training import held_out, read_model, rows_for, tiny_plan
from space_train.progress import END_SECONDS, Counters, ProgressLines, RunClock, duration
from space_train.train_plan import Budget
from space_train.training.trainer import TrainingRun, train
from tiny_checkpoints import tiny_checkpoint

EPOCH_UPDATES = 20.0


@dataclass
class Simulated:
    """A run whose updates, evaluations and saves take seconds of their own, after `spent` on own texts."""

    budget: Budget
    spent: dict[str, float] = field(default_factory=dict)
    first: float = 25.0
    update: float = 10.0
    evaluation: float = 4.0
    save: float = 1.0
    evaluations: int = 5
    slower: dict[int, float] = field(default_factory=dict)  # from that update on, by this factor
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)  # what the run said behind each update, and when
    said_at: dict[int, float] = field(default_factory=dict)
    totals: dict[int, int] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)

    def go(self, counters: Counters | None = None, stop: int | None = None) -> Counters:
        if counters is None:
            counters = Counters(seconds=self.spent.get("seconds", 0.0), flops=self.spent.get("flops", 0.0))
        clock, num_evaluations, here, saved = RunClock(self.budget, counters, EPOCH_UPDATES, self.spent), 0, 0, 0.0
        evaluated = -1
        while (done := clock.progress(is_evaluated=evaluated == counters.step)) < 1 and counters.step != stop:
            if done >= num_evaluations / self.evaluations:
                num_evaluations += 1
                if clock.may_evaluate():
                    evaluated = counters.step
                    counters.curve.append({})
                    self.now += self.evaluation
                    clock.count_evaluation(self.evaluation)
            took = self.update if here else self.first
            took *= max((factor for step, factor in self.slower.items() if step <= counters.step), default=1.0)
            self.now += took
            here += 1
            counters.step += 1
            counters.num_tokens += 1000
            counters.flops += 1e6
            clock.count_update(took)
            self.said_at[counters.step] = self.now
            self.shares.append(clock.progress(is_evaluated=True))
            num_left = max(1, self.evaluations + 1 - num_evaluations)
            self.left[counters.step] = clock.seconds_left(num_left, 1) or 0.0
            self.totals[counters.step] = clock.total_updates(num_left) or 0
            if counters.seconds - saved > 60:
                self.now += self.save
                clock.count_save(self.save)
                saved = counters.seconds
        if counters.step != stop:
            self.now += self.evaluation
            clock.count_evaluation(self.evaluation)
        return counters


SPENT = {"seconds": 300.0, "flops": 4e7}


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (Budget(steps=30), {}),
        (Budget(epochs=2), {}),
        (Budget(tokens=30_000), {}),
        (Budget(flops=3e7), {}),
        (Budget(minutes=5), {}),
        (Budget(steps=30, minutes=60), {}),
        (Budget(steps=30), SPENT),
        (Budget(flops=7e7), SPENT),
        (Budget(minutes=10), SPENT),
        (Budget(minutes=10, epochs=2), SPENT),
    ],
    ids=lambda value: "own texts" if value == SPENT else ", ".join(getattr(value, "as_json", dict)()) or "none",
)
def test_the_time_left_is_true_within_a_fifth_from_the_second_update_on(
    budget: Budget, spent: dict[str, float]
) -> None:
    run = Simulated(budget, spent)
    counters = run.go()
    assert counters.step > 12
    for step in range(2, counters.step - 1):
        truth = run.now - run.said_at[step]
        assert run.left[step] == pytest.approx(truth, rel=0.2, abs=run.update), step
        assert run.totals[step] == pytest.approx(counters.step, rel=0.2, abs=1)


@pytest.mark.parametrize("minutes", [1.0, 3.3, 7.77])
@pytest.mark.parametrize("update", [10.0, 23.0])
def test_a_budget_in_minutes_ends_with_the_last_update_that_fits(minutes: float, update: float) -> None:
    """Start-up, own texts, evaluations, saves and the checkpoint are part of it."""
    run = Simulated(Budget(minutes=minutes), update=update)
    run.go()
    longest = max(run.first, update) + run.evaluation + run.save + END_SECONDS
    assert 60 * minutes - longest < run.now <= 60 * minutes


@pytest.mark.parametrize("first", [25.0, 60.0])
def test_a_slow_first_update_neither_ends_a_run_nor_turns_it_back(first: float) -> None:
    run = Simulated(Budget(minutes=2), first=first)
    assert run.go().step >= 4
    assert run.now > 120 - run.update - run.evaluation - run.save - END_SECONDS
    assert run.shares == sorted(run.shares)


def test_the_time_left_follows_a_machine_that_becomes_slower() -> None:
    """Another program takes half of it from the third update on: the end comes no later, after fewer updates."""
    alone, shared = Simulated(Budget(minutes=5)), Simulated(Budget(minutes=5), slower={3: 2.0})
    for run in (alone, shared):
        run.go()
        for step in range(2, len(run.left)):
            assert run.left[step] == pytest.approx(run.now - run.said_at[step], rel=0.2, abs=2 * run.update), step
        assert run.now <= 300
    assert len(shared.left) < 0.7 * len(alone.left)


def test_the_time_left_of_minutes_counts_the_evaluations_between_updates() -> None:
    """One after each update; the run ends an update earlier than updates alone would."""
    run = Simulated(Budget(minutes=4), first=20.0, update=15.0, evaluation=5.0, evaluations=10)
    run.go()
    for step in range(2, len(run.left)):
        assert run.left[step] == pytest.approx(run.now - run.said_at[step], rel=0.2, abs=4), step


def test_evaluations_leave_minutes_enough_for_updates() -> None:
    counters = Counters(seconds=60.0, evaluation_seconds=10.0)
    clock = RunClock(Budget(minutes=3), counters, EPOCH_UPDATES, {})
    assert clock.may_evaluate(), "the first one, with which the last is compared"
    counters.curve += [{}, {}]
    assert clock.may_evaluate(), "30 of 180 s"
    counters.curve += [{}]
    assert not clock.may_evaluate()
    assert RunClock(Budget(steps=9), counters, EPOCH_UPDATES, {}).may_evaluate()


def test_a_run_that_used_its_minutes_up_is_not_begun_again() -> None:
    run = Simulated(Budget(minutes=3))
    counters = run.go()
    again = RunClock(run.budget, Counters(**counters.__dict__), EPOCH_UPDATES, {})
    assert again.progress(is_evaluated=True) == 1.0


def test_a_run_that_ended_is_not_continued_because_its_end_took_less_time_than_foreseen() -> None:
    budget = Budget(minutes=1)
    counters = Counters(step=3, seconds=55.0, update_seconds=3.0, evaluation_seconds=1.0)
    assert RunClock(budget, counters, EPOCH_UPDATES, {}).progress(is_evaluated=True) < 1.0
    counters.ended = budget.as_json()
    assert RunClock(budget, counters, EPOCH_UPDATES, {}).progress(is_evaluated=True) == 1.0
    assert RunClock(Budget(minutes=2), counters, EPOCH_UPDATES, {}).progress(is_evaluated=True) < 1.0, "a longer run"


def test_a_resumed_run_knows_how_many_updates_it_has() -> None:
    for budget in (Budget(steps=30), Budget(epochs=1.5), Budget(tokens=30_000), Budget(flops=3e7), Budget(minutes=6)):
        counters = Simulated(budget).go(stop=6)
        total = RunClock(budget, counters, EPOCH_UPDATES, {}).total_updates()
        assert total == pytest.approx(30, abs=3), budget


def test_progress_in_a_file_has_no_carriage_returns_and_is_not_written_at_each_update() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = ProgressLines(stream=stream, every=15.0, clock=lambda: now[0])
    for step in range(100):
        now[0] = float(step)
        lines.show(f"update {step} of 100", step / 100, is_due=step == 1)
    lines.close()
    text = stream.getvalue()
    assert "\r" not in text
    steps = [int(step) for step in re.findall(r"update (\d+) of 100 \(\d+ %\)\n", text)]
    assert steps == [0, 1, 16, 31, 46, 61, 76, 91]


def test_a_run_says_where_it_goes_on_and_what_it_expects_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_checkpoint(tmp_path / "base", num_masks=0)
    capsys.readouterr()

    def run(stop: int | None) -> str:
        plan = tiny_plan(budget=Budget(steps=5))
        given = {"tokenizer_size": 100, "held_out": held_out(plan), "stop_after_steps": stop}
        train(read_model(base), base, rows_for(plan), plan, tmp_path / "out", **given)  # type: ignore[arg-type]
        return capsys.readouterr().err

    first = run(2)
    assert re.search(r"^gated-lora: update 2 of 5, 1\.\d\d tokens per step on held-out text, .* \(40 %\)$", first, re.M)
    assert "goes on" not in first
    again = run(None)
    assert "gated-lora: goes on from update 2 of 5 (40 %)." in again
    finished = run(None)
    assert "goes on" not in finished
    assert "gated-lora: nothing is left to train: the run ended with update 5." in finished


def test_a_first_signal_says_what_a_second_one_loses(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", num_masks=0)
    plan = tiny_plan()
    run = TrainingRun(
        read_model(base),
        base,
        rows_for(plan),
        plan,
        tmp_path / "out",
        tokenizer_size=100,
        given_mask_ids=None,
        inputs={},
    )
    assert run.unsaved() == ", which loses this update"
    run.counters.step, run.counters.seconds = 3, 200.0
    assert run.unsaved() == ", which loses 3 updates (3 min 20 s) and this one"


def test_durations_are_in_units_that_are_read_at_a_glance() -> None:
    said = [duration(seconds) for seconds in (0.2, 59.4, 60, 200, 599, 600, 3599, 4000, 90000)]
    assert said == [
        "0 s",
        "59 s",
        "1 min",
        "3 min 20 s",
        "9 min 59 s",
        "10 min",
        "1 h 0 min",
        "1 h 7 min",
        "25 h 0 min",
    ]
