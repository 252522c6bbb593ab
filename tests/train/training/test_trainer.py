"""A run goes the same way however it is cut, ends where its budget does, and loses nothing."""

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.training import random_examples, random_ids, rows_for, run, tiny_plan
from space_model.loading.load import load_model
from space_train.data.train_batch import Texts, TrainBatch
from space_train.networks.losses import Losses
from space_train.networks.trainee import Trainee
from space_train.run_folder import STATE_FILE, Measures, load_checkpoint
from space_train.train_plan import Budget, HeadForm, InvalidPlan, Method, TrainPlan
from space_train.training.optimiser import Diverged
from space_train.training.trainer import Interrupted, TrainingRun, interruptions, stopped_at_once
from tiny_checkpoints import tiny_checkpoint


def trained(out: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(out / STATE_FILE)["trained"]
    return weights


def assert_same_run(one: Path, other: Path, *, exact: bool = True) -> None:
    """The same weights, optimiser and figures."""
    states = [load_checkpoint(out / STATE_FILE) for out in (one, other)]
    for name, tensor in states[0]["trained"].items():
        if exact:
            assert torch.equal(tensor, states[1]["trained"][name]), name
        else:
            torch.testing.assert_close(tensor, states[1]["trained"][name], rtol=1e-3, atol=1e-5)
    counters = [state["counters"] for state in states]
    assert counters[0]["losses"] == (counters[1]["losses"] if exact else pytest.approx(counters[1]["losses"], rel=1e-5))
    for figure in ("step", "num_tokens", "num_masks", "flops"):
        assert counters[0][figure] == counters[1][figure]
    if exact:
        assert str(states[0]["optimiser"]) == str(states[1]["optimiser"])
        curves = [[{k: v for k, v in look.items() if k != "seconds"} for look in c["curve"]] for c in counters]
        assert curves[0] == curves[1]


def die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of an update."""
    update = TrainingRun.update

    def dying(self: TrainingRun, multiplier: float) -> Measures:
        if self.counters.step == step:
            raise MemoryError("killed")
        return update(self, multiplier)

    monkeypatch.setattr(TrainingRun, "update", dying)


@pytest.mark.parametrize(
    ("method", "changes", "killed_at"),
    [
        (Method.FULL, {"optimiser": "adamw", "accumulate": 2}, 3),
        (Method.FULL, {"optimiser": "muon", "ar_share": 0.25}, 5),
        (Method.GATED_LORA, {"focal": True}, 1),
        (Method.GATED_LORA, {"optimiser": "muon", "accumulate": 2}, 4),
        (Method.HEAD, {"optimiser": "muon"}, 2),
        (Method.HEAD, {"head": HeadForm.LOW_RANK}, 5),
        (Method.SFT, {"accumulate": 4}, 3),
        (Method.GATED_LORA, {"recurrent_head": 8, "draft_vocab": 40, "accumulate": 2}, 2),
        (Method.HEAD, {"head": HeadForm.NONE, "recurrent_head": 8, "recurrent_drafts": 4}, 2),
    ],
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_by_bit(
    method: Method,
    changes: dict[str, Any],
    killed_at: int,
    base: Path,
    space: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = tiny_plan(method, budget=Budget(steps=6), checkpoint_steps=2, evaluations=3, **changes)
    source = space if method is Method.HEAD else base
    run(source, plan, tmp_path / "whole")
    with monkeypatch.context() as patch:
        die_at(killed_at, patch)
        with pytest.raises(MemoryError, match="killed"):
            run(source, plan, tmp_path / "killed")
    # Half a state, as a kill in the middle of writing it leaves.
    (tmp_path / "killed").mkdir(exist_ok=True)
    (tmp_path / "killed" / "state.partial").write_bytes(b"half")
    result = run(source, plan, tmp_path / "killed")
    assert result.counters.step == 6
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_dropout_is_that_of_the_update_also_behind_a_resume(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "base", num_masks=0, attention_dropout=0.3)
    plan = tiny_plan(Method.FULL, budget=Budget(steps=4))
    run(source, plan, tmp_path / "whole")
    torch.manual_seed(77)
    run(source, plan, tmp_path / "cut", stop_after_steps=2)
    torch.manual_seed(78)
    run(source, plan, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("method", [Method.FULL, Method.GATED_LORA])
def test_an_update_in_parts_is_the_update(method: Method, base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(method, ar_share=0.25)
    run(base, plan, tmp_path / "one")
    run(base, replace(plan, accumulate=2), tmp_path / "two")
    run(base, replace(plan, accumulate=4), tmp_path / "four")  # one row each: some parts have no masks
    assert_same_run(tmp_path / "one", tmp_path / "two", exact=False)
    assert_same_run(tmp_path / "one", tmp_path / "four", exact=False)


def test_a_finished_run_is_not_trained_again(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan()
    first = run(base, plan, tmp_path, held_out=None)
    written = (tmp_path / STATE_FILE).stat().st_mtime_ns
    again = run(base, plan, tmp_path, held_out=None)
    assert again.counters == first.counters
    assert (tmp_path / STATE_FILE).stat().st_mtime_ns == written


@pytest.mark.parametrize(("evaluations", "steps"), [(0, [3, 5]), (1, [0, 3, 5]), (2, [0, 2, 3, 5]), (10, range(6))])
def test_a_longer_budget_extends_the_run(evaluations: int, steps: Sequence[int], base: Path, tmp_path: Path) -> None:
    """And looks on at the held-out records, up to the end: once at the weights of each update."""
    run(base, tiny_plan(evaluations=evaluations), tmp_path)
    result = run(base, tiny_plan(evaluations=evaluations, budget=Budget(steps=5)), tmp_path)
    assert result.counters.step == 5
    assert len(result.counters.losses) == 5
    assert [look["step"] for look in result.counters.curve] == list(steps)
    assert result.counters.curve[-1]["progress"] == 1.0


def test_another_plan_model_or_text_in_the_same_folder_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    plan, out = tiny_plan(), tmp_path / "out"
    run(base, plan, out)
    other = tiny_checkpoint(tmp_path / "other", num_masks=0, rms_norm_eps=1e-3)
    cases: list[tuple[str, Path, TrainPlan, dict[str, Any]]] = [
        ("lora_rank = 4; this one has 8", base, replace(plan, lora_rank=8), {}),
        ("seed = 0; this one has 1", base, replace(plan, seed=1), {}),
        ("holds a run with model = ", other, plan, {}),
        ("holds a run with data = ", base, plan, {"data": rows_for(plan, random_examples(9, 16, 32))}),
        ("learning_rate = 0.01; this one has the default", base, replace(plan, learning_rate=None), {}),
        # what the user changed comes before what follows from it
        (
            "holds a run with data = ",
            base,
            replace(plan, anchors_per_token=0.1),
            {"data": rows_for(plan, random_examples(9, 16, 32))},
        ),
        (
            "holds a run with seed = 0",
            base,
            replace(plan, seed=1),
            {"data": rows_for(plan, random_examples(9, 16, 32))},
        ),
    ]
    for message, source, changed, keywords in cases:
        with pytest.raises(InvalidPlan, match=message):
            run(source, changed, out, **keywords)


def test_the_result_never_overwrites_the_model_it_is_trained_from(base: Path, tmp_path: Path) -> None:
    folder = run(base, tiny_plan(), tmp_path).folder
    assert folder == tmp_path / "model"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InvalidPlan, match="would overwrite the model"):
        run(folder, tiny_plan(Method.HEAD), tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def seconds_per_call() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at."""
    ticks = iter(range(10**9))
    return lambda: float(next(ticks))


@pytest.mark.parametrize(
    ("budget", "is_used"),
    [
        (Budget(steps=3), lambda c: c.step == 3),
        (Budget(tokens=300), lambda c: 300 <= c.num_tokens < 300 + 128),
        (Budget(flops=3e8), lambda c: 3e8 <= c.flops < 3e8 + 1.1 * c.flops / c.step),
        (Budget(minutes=0.1), lambda c: 5 <= c.seconds <= 6),
        (Budget(epochs=1.5, steps=1000), lambda c: c.step == -(-1.5 * 12 // 4)),
        (Budget(steps=0), lambda c: c.step == 0),
    ],
    ids=["steps", "tokens", "flops", "minutes", "epochs", "none"],
)
def test_a_run_ends_with_the_update_that_uses_its_budget_up(
    budget: Budget, is_used: Callable[[Any], bool], base: Path, tmp_path: Path
) -> None:
    plan = tiny_plan(budget=budget, pack=False)
    assert len(rows_for(plan)) == 12
    result = run(base, plan, tmp_path, clock=seconds_per_call())
    assert is_used(result.counters), result.counters
    assert result.folder is not None
    assert result.counters.curve[-1]["progress"] == 1.0


def test_compute_spent_before_counts(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(budget=Budget(flops=3e8))
    whole = run(base, plan, tmp_path / "whole").counters
    less = run(base, plan, tmp_path / "less", before={"flops": 2e8, "seconds": 5.0}).counters
    assert less.step < whole.step
    assert less.seconds > 5.0


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(minutes=2), "took 2.5 of the 2 minutes, so nothing would be learnt.* with more --minutes."),
        (Budget(flops=1e8), r"took 2e\+08 of the 1e\+08 flops, .* with more --flops"),
    ],
)
def test_own_texts_that_use_up_the_budget_are_refused(budget: Budget, words: str, base: Path, tmp_path: Path) -> None:
    spent = {"flops": 2e8, "seconds": 150.0}
    with pytest.raises(InvalidPlan, match=words):
        run(base, tiny_plan(budget=budget), tmp_path, before=spent)
    assert not (tmp_path / "model").exists()
    trained = run(base, tiny_plan(), tmp_path, before=spent)  # a budget that they do not count in
    assert trained.counters.step == 3
    assert run(base, tiny_plan(budget=budget), tmp_path, before=spent).folder == tmp_path / "model"


def test_a_start_that_uses_the_minutes_up_is_refused(base: Path, tmp_path: Path) -> None:
    """Else a folder of untrained masks would be written."""
    plan = tiny_plan(budget=Budget(minutes=1))
    with pytest.raises(InvalidPlan, match=r"^Reading model and data took 1\.5 .* Give more --minutes"):
        run(base, plan, tmp_path, startup_seconds=90.0)
    with pytest.raises(InvalidPlan, match=r"^Writing texts of its own and reading model and data took"):
        run(base, plan, tmp_path, startup_seconds=40.0, before={"flops": 1.0, "seconds": 40.0})
    assert not (tmp_path / "model").exists()


def test_training_teaches_masks_and_head_what_comes(base: Path, tmp_path: Path) -> None:
    """A text that repeats itself: masks can know what is behind the bonus."""
    plan = tiny_plan(budget=Budget(steps=60), rows_per_step=8, evaluations=1, distill=False, anchors_per_token=0.5)
    pattern = random_ids(7, 3)
    from space_train.data.examples import Example

    texts = [Example((pattern * 8)[start : start + 32], [True] * 32) for start in range(7)]
    data = rows_for(plan, texts)
    rows = data.rows(0, 4)
    seen = Texts(rows.ids, rows.learned, rows.document, torch.ones(4, dtype=torch.bool))
    counters = run(base, plan, tmp_path, data=data, held_out=seen).counters
    first, last = sum(counters.losses[:5]), sum(counters.losses[-5:])
    assert last < 0.3 * first


def test_a_stopped_run_saves_and_goes_on_later(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    plan = tiny_plan(budget=Budget(steps=5))
    run(base, plan, tmp_path / "whole")
    with monkeypatch.context() as patch:
        update = TrainingRun.update

        def signals(self: TrainingRun, multiplier: float) -> Measures:
            if self.counters.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self, multiplier)

        patch.setattr(TrainingRun, "update", signals)
        with pytest.raises(Interrupted, match=r"Stopped after update 3 \(60 %\)"):
            run(base, plan, tmp_path / "cut", progress=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run(base, plan, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_not_saved(
    value: float, optimiser: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(optimiser=optimiser, checkpoint_steps=1)
    run(base, plan, tmp_path / "whole")
    learn = Trainee.forward

    def diverging(self: Trainee, batch: TrainBatch) -> Losses:
        losses = learn(self, batch)
        return Losses(losses.next_token, losses.masks * value, losses.head, losses.recurrent)

    run(base, plan, tmp_path / "cut", stop_after_steps=1)
    saved = (tmp_path / "cut" / STATE_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Trainee, "forward", diverging)
        with pytest.raises(Diverged, match=r"has the norm (nan|inf), .* with a lower --learning-rate than 0\.01"):
            run(base, plan, tmp_path / "cut")
    assert (tmp_path / "cut" / STATE_FILE).read_bytes() == saved
    run(base, plan, tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Files of at most so many bytes: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_the_last_state_stays(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(Method.FULL, budget=Budget(steps=4), checkpoint_steps=1)
    run(base, plan, tmp_path / "whole")
    run(base, plan, tmp_path / "full", stop_after_steps=2)
    with room_for(100_000), pytest.raises(OSError, match=r"state\.pt cannot be written: .*File too large"):
        run(base, plan, tmp_path / "full")
    assert load_checkpoint(tmp_path / "full" / STATE_FILE)["counters"]["step"] == 2
    assert not list((tmp_path / "full").glob("*.partial")), "half a state would keep the disk full"
    run(base, plan, tmp_path / "full")
    assert_same_run(tmp_path / "whole", tmp_path / "full")


def test_a_disk_full_at_the_end_is_named_and_the_checkpoint_is_written_later(base: Path, tmp_path: Path) -> None:
    plan = tiny_plan(Method.FULL)
    run(base, plan, tmp_path, export=False)
    with room_for(100_000), pytest.raises(OSError, match=r"model cannot be written: .*File too large"):
        run(base, plan, tmp_path)
    folder = run(base, plan, tmp_path).folder
    assert load_model(folder).facts.num_masks == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_noted_a_second_raises(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before, seconds = signal.getsignal(signal.SIGINT), [10.0, 10.5, 12.0]
    losing = ", which loses 3 updates".__str__
    with interruptions(says=True, losing=losing, clock=lambda: seconds.pop(0)) as signals:
        assert signals == []
        signal.raise_signal(number)
        assert signals == [number]
        assert "ends after this update; once more to stop at once, which loses 3 updates" in capfd.readouterr().err
        signal.raise_signal(number)  # the same one, which a launcher passed on
        assert signals == [number]
        assert capfd.readouterr().err == ""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGINT) is before


def test_of_several_processes_one_acknowledges(capfd: pytest.CaptureFixture[str]) -> None:
    with interruptions(says=False) as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT]
    assert capfd.readouterr().err == ""


def test_what_is_kept_is_what_the_state_holds(tmp_path: Path) -> None:
    assert stopped_at_once(tmp_path) == "Stopped before an update was saved."
    torch.save({"counters": {"step": 7}, "trained": {"w": torch.zeros(3)}}, tmp_path / STATE_FILE)
    assert stopped_at_once(tmp_path) == (
        f"Stopped. {tmp_path} keeps the run up to update 7: the same command, without --restart, goes on from there."
    )
