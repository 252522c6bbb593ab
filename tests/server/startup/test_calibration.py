"""What steps cost is measured on whole steps, in passes that show whether anything else was going on."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from space_common.worker.settings import StepsHere
from space_kernels.build import cpu_library
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.model_facts import HeadFacts
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_server.device_runner.device_forward import DeviceForward, StepKind
from space_server.device_runner.device_runner import DeviceRunner
from space_server.machine.sensors import LoadWatch, MachineLoad
from space_server.speculation.controller import few_layouts
from space_server.startup import calibration
from space_server.startup.calibration import (
    AGREE,
    FEWEST,
    NUM_PASSES,
    PLAIN_STEP,
    BadCostFile,
    Calibration,
    CalibrationCase,
    CostFile,
    StartingCosts,
    Timing,
    calibrate,
    starting_costs,
    time_plain_step,
    time_steps,
    tolerance,
)
from space_server.step_cost import CostOrigin, Point, StepCost, StepShape
from tiny_checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    return load_model(str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_masks=3)), dtype="float32", device="cpu")


@pytest.fixture
def quick(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes nothing, for tests in which the clock is not that of its computation."""
    states = torch.randn(4096, model.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(type(model), "forward", lambda _, batch, kv: states[: len(batch.ids)])


def test_shapes_are_measured_from_one_sequence_to_the_most(model: SpaceModel) -> None:
    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, seconds=200.0).points
    assert {shape.num_sequences for shape, _ in points} >= {1, 2, 4, 8}
    assert max(shape.num_sequences for shape, _ in points) == 8
    assert any(shape.num_mask_rows for shape, _ in points)
    assert any(shape.num_noisy_rows for shape, _ in points)
    assert any(shape.num_prefill_rows and not shape.num_prefill_pairs for shape, _ in points)
    assert all(0 < seconds < 20 for _, seconds in points)
    assert StepCost.from_points(points).seconds(StepShape.plain(8)) > 0


def test_a_plain_checkpoint_is_measured_without_masks(tmp_path: Path) -> None:
    plain = load_model(str(tiny_checkpoint(tmp_path, num_masks=0)), dtype="float32", device="cpu")
    points = calibrate(plain, plain.allocate_kv(64, 16), max_sequences=2, seconds=5.0).points
    assert points
    assert not any(shape.num_mask_rows for shape, _ in points)


def test_few_pages_are_shared_and_too_few_give_no_points(model: SpaceModel) -> None:
    assert calibrate(model, model.allocate_kv(20, 16), max_sequences=4, seconds=5.0).points
    assert calibrate(model, model.allocate_kv(1, 16), max_sequences=4, seconds=5.0).points == []


def test_measuring_ends_when_its_seconds_are_used(model: SpaceModel) -> None:
    ticks = iter(range(10**6))
    points = calibrate(
        model, model.allocate_kv(256, 16), max_sequences=64, seconds=60.0, clock=lambda: float(next(ticks))
    ).points
    assert 1 <= len(points) <= 3


def test_a_slow_model_has_prompts_and_several_sequences_measured_all_the_same(model: SpaceModel) -> None:
    now = 0.0

    def clock() -> float:  # asked some times in a step: 60 ms
        nonlocal now
        now += 0.005
        return now

    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=64, seconds=3.0, clock=clock).points
    assert {shape.num_sequences for shape, _ in points} >= {1, 8}
    assert any(shape.num_mask_rows for shape, _ in points)
    assert any(shape.num_prefill_rows for shape, _ in points)


def test_steps_of_the_device_are_measured_where_they_are_served(
    model: SpaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[StepKind] = []
    take = DeviceForward.take

    def noted(step: DeviceForward, kind: StepKind) -> torch.Tensor:
        launched.append(kind)
        return take(step, kind)

    monkeypatch.setattr(DeviceForward, "take", noted)
    kv = model.allocate_kv(256, 16)
    assert calibrate(model, kv, max_sequences=4, seconds=0.5)
    assert not launched
    points = calibrate(model, kv, max_sequences=4, seconds=200.0, steps="eager").points
    assert {kind.batch_size for kind in launched} == {1, 2, 4}
    assert {kind.layout.num_masks for kind in launched} >= {0, 4}
    shapes = [shape for shape, _ in points]
    assert {shape.num_sequences for shape in shapes} == {1, 2, 4}
    assert any(shape.num_mask_rows for shape in shapes)
    assert any(shape.num_noisy_rows for shape in shapes)
    assert any(shape.num_prefill_rows for shape in shapes)  # read by the host


@pytest.mark.usefixtures("quick")
def test_what_a_kind_of_step_takes_at_first_is_not_measured(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    now, take = 0.0, DeviceForward.take
    taken: dict[int, Counter[StepKind]] = {}

    def slow_at_first(step: DeviceForward, kind: StepKind) -> torch.Tensor:
        nonlocal now
        seen = taken.setdefault(id(step), Counter())
        seen[kind] += 1
        now += 9.0 if seen[kind] <= 2 else 0.002  # compiled, then captured; then replayed
        return take(step, kind)

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr(DeviceForward, "take", slow_at_first)
    kv = model.allocate_kv(256, 16)
    points = calibrate(model, kv, max_sequences=2, seconds=500.0, steps="eager", clock=clock).points
    decoding = [seconds for shape, seconds in points if not shape.num_prefill_rows]
    assert len(decoding) > 5
    assert all(0.002 <= seconds < 0.003 for seconds in decoding)
    assert min(sum(seen.values()) for seen in taken.values()) >= 2 + calibration.NUM_STEPS


@pytest.mark.usefixtures("quick")
def test_what_captured_steps_take_at_first_leaves_the_time_for_measuring(
    model: SpaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, take, kinds = 0.0, DeviceForward.take, dict[int, Counter[StepKind]]()

    def slow_at_first(step: DeviceForward, kind: StepKind) -> torch.Tensor:
        nonlocal now
        seen = kinds.setdefault(id(step), Counter())
        seen[kind] += 1
        now += 0.1 if seen[kind] <= 2 else 0.002
        return take(step, kind)

    monkeypatch.setattr(DeviceForward, "take", slow_at_first)
    kv = model.allocate_kv(256, 16)

    def measured(steps: StepsHere) -> set[tuple[int, int]]:
        nonlocal now
        now = 0.0
        found = calibrate(model, kv, max_sequences=64, seconds=3.0, steps=steps, clock=lambda: now)
        assert found.seconds < (1 + calibration.MOST_ONE_TIME + 1) * 3.0
        return {(shape.num_sequences, shape.num_mask_rows) for shape, _ in found.points}

    in_time, beyond = measured("eager"), measured("device")
    assert len(beyond) > 2 * len(in_time)
    assert {size for size, _ in beyond} >= {1, 8, 32, 64}


def test_what_a_small_prompt_takes_to_be_captured_is_not_measured(
    model: SpaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, num_run, kv = 0.0, 0, model.allocate_kv(8, 16)

    def forward(runner: DeviceRunner, batch: ForwardBatch) -> tuple[torch.Tensor, bool]:
        nonlocal now, num_run
        num_run += 1
        now += 9.0 if num_run <= calibration.NUM_ONE_TIME else 0.002
        return model.forward(batch, kv), num_run > calibration.NUM_ONE_TIME

    monkeypatch.setattr(DeviceRunner, "forward_prompts", forward)
    case = CalibrationCase(1, DraftLayout.plain(), 0, prompt_rows=8)
    timing = time_steps(model, kv, case, "device", clock=lambda: now)
    assert timing is not None
    assert timing.times == pytest.approx([0.002] * calibration.NUM_STEPS)
    assert timing.one_time == 27.0
    assert time_steps(model, kv, case, "eager", clock=lambda: now) is not None
    assert num_run == calibration.NUM_ONE_TIME + 1 + calibration.NUM_STEPS  # not where nothing is captured


def test_captured_steps_are_measured_in_every_batch_by_the_head_too(model: SpaceModel) -> None:
    facts = dataclasses.replace(model.facts, mask_ids=(1, 2, 3, 4, 5), num_masks=5, head=HeadFacts(5))
    cases = list(calibration._captured_cases(facts, 256))
    for size in (1, 8, 32, 64, 128, 256):
        first = [case.layout for case in cases[:60] if case.num_sequences == size and not case.prompt_rows]
        assert DraftLayout.plain() in first
        assert {layout.head_drafts for layout in first} >= {2, 3, 5}
    masks = {case.layout for case in cases if case.layout.num_masks}
    assert masks == set(few_layouts(5))
    assert max(case.num_rows for case in cases if case.layout.num_masks) <= calibration.MOST_MASK_ROWS
    assert {case.num_sequences for case in calibration._captured_cases(facts, 8)} == {1, 2, 4, 8}


class FirstPromptIsSlow:
    """A clock that goes on by 2 ms a forward pass, and by 9 s in the first one of each number of prompt rows."""

    def __init__(self, model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._seen, forward = 0.0, set[int](), model.forward

        def compiled_at_first(batch: ForwardBatch, kv: PagedKV) -> torch.Tensor:
            rows = len(batch.ids)
            self.now += 0.002 if rows in self._seen else 9.0
            self._seen.add(rows)
            return forward(batch, kv)

        monkeypatch.setattr(type(model), "forward", lambda _, batch, kv: compiled_at_first(batch, kv))

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.usefixtures("quick")
def test_what_a_prompt_takes_at_first_is_not_measured(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FirstPromptIsSlow(model, monkeypatch)
    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=2, seconds=500.0, clock=clock).points
    prompts = [seconds for shape, seconds in points if shape.num_prefill_rows]
    assert prompts
    assert all(0.002 <= seconds < 0.003 for seconds in prompts)


def test_a_prompt_is_measured_by_steps_of_one_shape(model: SpaceModel) -> None:
    timing = time_steps(model, model.allocate_kv(256, 16), dataclasses.replace(PLAIN_STEP, prompt_rows=32))
    assert timing is not None
    assert timing.shape.num_rows == 32
    assert timing.shape.num_prefill_rows == 31
    assert 1 <= len(timing.times) <= calibration.NUM_STEPS


class Machine:
    """A clock by which every forward pass takes as long as `speed` says it does at that moment."""

    def __init__(self, model: SpaceModel, monkeypatch: pytest.MonkeyPatch, speed: Callable[[float], float]) -> None:
        self.now, forward = 0.0, type(model).forward

        def timed(one: SpaceModel, batch: ForwardBatch, kv: PagedKV) -> torch.Tensor:
            self.now += speed(self.now)
            return forward(one, batch, kv)

        monkeypatch.setattr(type(model), "forward", timed)

    def __call__(self) -> float:
        return self.now


@pytest.mark.usefixtures("quick")
def test_the_passes_of_a_steady_machine_agree(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Machine(model, monkeypatch, lambda now: 0.004)
    found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, clock=clock)
    assert {len(times) for times in found.passes.values()} == {NUM_PASSES}
    assert set(found.passes) == {"1 sequence, plain", "1 sequence, 2 drafts, 6 masks", "8 sequences, plain"}
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    assert found.why_unsure is None


@pytest.mark.usefixtures("quick")
def test_the_passes_are_as_far_apart_as_the_seconds_allow(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work that ends, or begins, half-way is seen."""
    for slow in ((0.0, 1.4), (1.6, 9.0)):
        with monkeypatch.context() as patch:
            clock = Machine(model, patch, lambda now, slow=slow: 0.02 if slow[0] <= now < slow[1] else 0.004)  # type: ignore[misc]
            found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, clock=clock)
        assert found.spread is not None
        assert found.spread > AGREE
        assert "3 passes differ by 400 %" in str(found.why_unsure)


@pytest.mark.usefixtures("quick")
def test_three_passes_take_no_longer_than_the_seconds_there_are(
    model: SpaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0.004, 0.05):
        with monkeypatch.context() as patch:
            clock = Machine(model, patch, lambda now, step=step: step)  # type: ignore[misc]
            found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, seconds=3.0, clock=clock)
        assert found.spread is not None
        assert found.why_unsure is None
        assert clock.now <= 3.0 + 0.2


def test_steps_too_slow_for_three_passes_are_measured_once(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Machine(model, monkeypatch, lambda now: 0.4)
    found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, seconds=3.0, clock=clock)
    assert len(found.points) >= 2
    assert clock.now <= 4.0
    assert str(found.why_unsure).startswith("steps are too slow to be measured 3 times")


def test_few_steps_are_not_relied_on() -> None:
    points = [(StepShape.plain(n), 0.1) for n in range(1, FEWEST)]
    passes = {str(PLAIN_STEP): [0.1, 0.1, 0.1]}
    assert f"{FEWEST - 1} different steps" in str(Calibration(points * 2, passes, 3.0).why_unsure)
    points += [(StepShape.plain(1, context), 0.1) for context in (76, 78)]
    assert f"{FEWEST - 1} different steps" in str(Calibration(points, passes, 3.0).why_unsure)
    assert Calibration([*points, (StepShape.plain(9), 0.1)], passes, 3.0).why_unsure is None


@pytest.mark.usefixtures("quick")
def test_a_hiccup_of_all_steps_of_one_case_parts_no_passes(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Machine(model, monkeypatch, lambda now: 0.02 if 0.2 <= now < 0.3 else 0.004)
    found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, clock=clock)
    assert found.why_unsure is None


def test_a_plain_step_alone_is_what_the_passes_have_first(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Machine(model, monkeypatch, lambda now: 0.004)
    timing = time_plain_step(model, model.allocate_kv(256, 16), clock=clock)
    assert timing is not None
    assert timing.seconds == pytest.approx(0.004)
    assert clock.now < 0.2
    assert time_plain_step(model, model.allocate_kv(1, 16), clock=clock) is None


def test_the_noise_of_a_middle_time_is_that_of_a_normal_distribution() -> None:
    draws = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)).mul(0.05).add(1.0)
    timings = [Timing(StepShape.plain(1), tuple(times)) for times in draws.tolist()]
    spread = torch.tensor([timing.seconds for timing in timings]).std().item()
    reported = sum(timing.noise for timing in timings) / len(timings)
    assert reported == pytest.approx(spread, rel=0.15)
    assert Timing(StepShape.plain(1), (1.0, 1.0)).noise == AGREE / 3


SHAPES = [StepShape(n, n * (1 + drafts), n * drafts, n * (drafts > 0)) for n in (1, 2, 4, 8) for drafts in (0, 1, 2, 3)]
NOON = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)


def true_seconds(shape: StepShape) -> float:
    return 1e-3 + 1e-5 * shape.num_rows


class FakeMachine:
    """Steps take `slow` times as long as on a quiet machine, which has two processors; `others` want them as well.
    No step takes exactly as long as the last one, by up to half a hundredth."""

    def __init__(self, folder: Path) -> None:
        self.slow, self.others, self.num_timed, self.num_measured = 1.0, 0, 0, 0
        self.pass_factors = (1.0, 1.0, 1.0)
        self._stat = folder / "stat"

    def time_plain_step(self) -> Timing:
        self.num_timed += 1
        shape = StepShape.plain(1)
        return Timing(shape, tuple(self.slow * true_seconds(shape) * (1.0 + 0.001 * (n % 10 - 5)) for n in range(20)))

    def measure(self, look: Callable[[], None]) -> Calibration:
        self.num_measured += 1
        look()
        points = [(shape, self.slow * true_seconds(shape)) for shape in SHAPES]
        passes = [self.slow * factor * true_seconds(StepShape.plain(1)) for factor in self.pass_factors]
        return Calibration(points, {str(PLAIN_STEP): passes}, 3.0)

    def watch(self) -> LoadWatch:
        self._stat.write_text(f"cpu 1 2 3\nprocs_running {1 + self.others}\nprocs_blocked 0\n")
        return LoadWatch(processors=2, stat=self._stat, tasks=self._stat.parent / "none")

    def start(self, file: CostFile) -> StartingCosts:
        found = starting_costs(
            file, measure=self.measure, time_plain_step=self.time_plain_step, watch=self.watch(), now=lambda: NOON
        )
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> CostFile:
    return CostFile(
        tmp_path / "cache" / "step-cost-tiny.json", {"model": "tiny", "threads": 2}, {"format": 4, "torch": "2.13"}
    )


def off(found: StartingCosts, true: Callable[[StepShape], float]) -> float:
    """The largest share by which a cost differs from the true one."""
    cost = found.cost()
    return max(abs(cost.seconds(shape) / true(shape) - 1.0) for shape in SHAPES)


@pytest.mark.parametrize("slow", [1.2, 3.5, 3000.0])
def test_a_start_under_load_leaves_the_next_one_as_if_there_had_been_none(
    machine: FakeMachine, file: CostFile, slow: float, caplog: pytest.LogCaptureFixture
) -> None:
    machine.slow, machine.others = slow, 4
    with caplog.at_level(logging.INFO):
        found = machine.start(file)
    why = "5 tasks could run at once on 2 processors"
    assert found.origin == found.cost().origin == CostOrigin("learned", why)
    assert "not kept, but learned while serving: " + why in caplog.text
    assert not file.path.exists()
    machine.slow, machine.others = 1.0, 0
    found = machine.start(file)
    assert found.origin.source == "measured"
    assert off(found, true_seconds) < 0.03


@pytest.mark.parametrize("slow", [0.5, 1.1, 3.5])
def test_a_file_from_a_machine_of_another_speed_is_measured_anew(
    machine: FakeMachine, file: CostFile, slow: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever went on then that nothing showed."""
    machine.slow = slow
    assert machine.start(file).origin.source == "measured"
    machine.slow = 1.0
    with caplog.at_level(logging.INFO):
        found = machine.start(file)
    assert (found.origin.source, machine.num_measured) == ("measured", 2)
    assert "do not hold: a plain step takes 1.01 ms now" in caplog.text
    assert off(found, true_seconds) < 0.03
    assert machine.start(file).origin.source == "file"


def test_costs_kept_under_load_and_confirmed_by_a_loaded_start_are_not_believed_while_serving(
    machine: FakeMachine, file: CostFile
) -> None:
    """A plain step of 1.01 ms was kept as 3.5 ms, and takes that at the next start too, as nothing showed."""
    machine.slow = 3.5
    machine.start(file)
    found = machine.start(file)
    assert (found.origin.source, machine.num_measured) == ("file", 1)
    cost, plain = found.cost(), StepShape.plain(1)
    assert cost.seconds(plain) > 3.4 * true_seconds(plain)
    for _ in range(60):  # a server that decodes one request without drafts
        cost.learn(plain, true_seconds(plain))
    assert cost.num_turns == 1
    assert max(abs(cost.seconds(shape) / true_seconds(shape) - 1.0) for shape in SHAPES) < 0.05
    machine.slow = 1.0
    assert machine.start(file).origin.source == "measured"  # the next start does not believe the file either


def test_a_quiet_file_is_not_replaced_by_a_busy_start(machine: FakeMachine, file: CostFile) -> None:
    machine.start(file)
    kept = file.path.read_text()
    machine.slow, machine.others = 4.0, 3
    assert machine.start(file).origin.source == "learned"
    assert file.path.read_text() == kept
    machine.slow, machine.others = 1.0, 0
    assert machine.start(file).origin.source == "file"


def test_kept_costs_are_used_at_once_and_with_the_level_of_today(machine: FakeMachine, file: CostFile) -> None:
    first = machine.start(file)
    machine.slow = 1.02
    found = machine.start(file)
    assert (found.origin.source, machine.num_measured, machine.num_timed) == ("file", 1, 1)
    assert len(found.points) == len(first.points)
    assert off(found, lambda shape: 1.02 * true_seconds(shape)) < 0.01


def test_one_hiccup_is_no_reason_to_measure_anew(machine: FakeMachine, file: CostFile) -> None:
    machine.start(file)
    steady = machine.time_plain_step

    def hiccup() -> Timing:
        machine.slow = 2.0 if machine.num_timed == 0 else 1.0
        return steady()

    found = starting_costs(file, measure=machine.measure, time_plain_step=hiccup, watch=machine.watch())
    assert found is not None
    assert (found.origin.source, machine.num_timed) == ("file", 2)


@pytest.mark.parametrize(
    ("factors", "origin"),
    [((1.0, 1.0, 1.11), "learned"), ((1.0, 0.8, 1.0), "learned"), ((1.0, 1.09, 1.0), "measured"), ((1.0,), "learned")],
)
def test_costs_are_kept_if_three_passes_agree(
    machine: FakeMachine, file: CostFile, factors: tuple[float, ...], origin: str
) -> None:
    machine.pass_factors = factors  # type: ignore[assignment]
    assert machine.start(file).origin.source == origin
    assert file.path.exists() == (origin == "measured")


def test_a_single_point_is_not_kept(machine: FakeMachine, file: CostFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", SHAPES[:1])
    assert machine.start(file).origin.source == "learned"
    assert not file.path.exists()


def test_what_may_be_off_follows_from_the_passes_and_from_the_noise(machine: FakeMachine, file: CostFile) -> None:
    machine.pass_factors = (1.0, 1.08, 1.02)
    machine.start(file)
    kept = file.read()
    assert kept is not None
    steady = Timing(StepShape.plain(1), (1.0,) * 20)
    restless = Timing(StepShape.plain(1), (0.9, 1.1) * 10)
    assert tolerance(kept, steady) == pytest.approx(0.08, abs=1e-4)
    assert tolerance(kept, restless) > 0.15


def test_a_file_says_what_a_person_wants_to_know(machine: FakeMachine, file: CostFile) -> None:
    machine.pass_factors = (1.0, 1.04, 1.0)
    machine.others = 1
    machine.start(file)
    said = json.loads(file.path.read_text())
    assert said["written"] == "2026-11-26T12:00:00+00:00"
    assert (said["model"], said["threads"], said["torch"], said["format"]) == ("tiny", 2, "2.13", 4)
    assert said["spread"] == pytest.approx(0.04)
    assert said["load"]["runnable_tasks"] == 2
    assert said["load"]["processors"] == 2
    assert said["passes"] == {"1 sequence, plain": pytest.approx([1.01e-3, 1.0504e-3, 1.01e-3])}
    lines = file.path.read_text().splitlines()
    assert sum(line.startswith("    [") for line in lines) == len(SHAPES)  # a point, a line
    assert max(map(len, lines)) < 140


def test_a_real_file_names_versions_threads_instructions_and_processor(model: SpaceModel, tmp_path: Path) -> None:
    made = CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8)
    assert made.versions.keys() >= {"format", "spaceserve", "torch", "cases", "kernels"}
    assert made.setup.keys() >= {"model", "model_hash", "threads", "instruction_set", "cpu", "gpu", "processors"}
    assert made.path.name.startswith("step-cost-tiny")


def broken(file: CostFile, change: Callable[[dict[str, Any]], Any]) -> None:
    said = json.loads(file.path.read_text())
    changed = change(said)
    file.path.write_text(json.dumps(said if changed is None else changed))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said: [[*SHAPES[0], 0.001]], "older format"),
        (lambda said: said.update(format=3), "format is 3 there and 4 here"),
        (lambda said: said.__delitem__("format"), "format is None there"),
        (lambda said: said.update(torch="2.9"), "torch is '2.9' there and '2.13' here"),
        (lambda said: said.update(threads=1), "threads is 1 there and 2 here"),
        (lambda said: said.__delitem__("points"), "its points are no numbers"),
        (lambda said: said.update(points=[["a"] * 9]), "its points are no numbers"),
        (lambda said: said.update(points=7), "its points are no numbers"),
        (lambda said: said["points"][3].__setitem__(-1, float("nan")), "no times of steps"),
        (lambda said: said["points"][3].__setitem__(-1, float("inf")), "no times of steps"),
        (lambda said: said["points"][3].__setitem__(-1, -1.0), "no times of steps"),
        (lambda said: said["points"][3].__setitem__(-1, 0.0), "no times of steps"),
        (lambda said: said["points"][3].__setitem__(0, -1), "no times of steps"),
        (lambda said: said["points"][3].__setitem__(0, float("inf")), "its points are no numbers"),
        (lambda said: said.update(points=said["points"][:1]), f"1 different steps; it takes {FEWEST}"),
        (lambda said: said["columns"].__delitem__(0), "older format"),
        (lambda said: said.__delitem__("passes"), "passes are missing"),
        (lambda said: said.update(passes={str(PLAIN_STEP): [0.001]}), "does not have 3 passes"),
        (lambda said: said.update(passes={str(PLAIN_STEP): [0.001, 0.001, float("nan")]}), "does not have 3 passes"),
        (lambda said: said.update(passes={str(PLAIN_STEP): [0.001, 0.001, 0.002]}), "differ by more than 10 %"),
        (lambda said: said.update(format=5), "format is 5 there and 4 here"),
    ],
)
def test_a_file_that_says_something_else_or_nothing_is_not_used_and_replaced(
    machine: FakeMachine, file: CostFile, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], Any],
    why: str,
) -> None:  # fmt: skip
    machine.start(file)
    broken(file, change)
    with pytest.raises(BadCostFile, match=why.replace("[", r"\[")):
        file.read()
    with caplog.at_level(logging.INFO):
        assert machine.start(file).origin.source == "measured"
    assert f"step costs kept in {file.path.name} are not used: " in caplog.text
    assert machine.start(file).origin.source == "file"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"null", b"[" * 100_000])
def test_a_file_that_is_damaged_is_not_used_and_replaced(machine: FakeMachine, file: CostFile, content: bytes) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert machine.start(file).origin.source == "measured"
    assert machine.start(file).origin.source == "file"


def test_files_of_earlier_versions_are_named_and_left(
    machine: FakeMachine, file: CostFile, caplog: pytest.LogCaptureFixture
) -> None:
    old = file.path.parent / "step-cost-70f4c04f9ff3f440a7d6c936.json"
    old.parent.mkdir()
    old.write_text("[[1, 1, 0, 0, 0, 0, 64, 0, 3.4]]")
    with caplog.at_level(logging.INFO):
        assert machine.start(file).origin.source == "measured"
    assert "1 files of step costs" in caplog.text
    assert old.exists()


def test_a_folder_that_cannot_be_written_costs_a_measurement_a_start(machine: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = CostFile(tmp_path / "file" / "cost.json", {}, {})
    assert machine.start(nowhere).origin.source == "measured"
    assert machine.start(nowhere).origin.source == "measured"


def test_a_full_disk_leaves_no_half_a_file(
    machine: FakeMachine, file: CostFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write(path: Path, text: str, **options: Any) -> int:
        if path.parent != file.path.parent:
            return write_text(path, text, **options)
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    assert machine.start(file).origin.source == "measured"
    assert not list(file.path.parent.iterdir())


def test_where_nothing_can_be_measured_there_are_no_costs(machine: FakeMachine, file: CostFile) -> None:
    nothing: list[Point] = []
    found = starting_costs(
        file, measure=lambda look: Calibration(nothing, {}, 0.0), time_plain_step=lambda: None, watch=machine.watch()
    )
    assert found is None


def test_learned_costs_follow_the_first_steps_everywhere(machine: FakeMachine, file: CostFile) -> None:
    """A worker that started beside other work is right soon after that has ended, of steps it has not taken as well."""
    machine.slow, machine.others = 5.0, 4
    cost = machine.start(file).cost()
    plain = StepShape.plain(1)
    for _ in range(40):
        cost.learn(plain, true_seconds(plain))
    for shape in SHAPES:
        assert cost.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.05)


def test_another_batch_or_exactness_or_way_to_step_has_a_file_of_its_own(model: SpaceModel, tmp_path: Path) -> None:
    files = [CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=most) for most in (8, 64)]
    files.append(CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8, exact=True))
    files.append(CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8, steps="device"))
    assert len({one.path for one in files}) == 4


def test_other_cases_replace_the_file(model: SpaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8)
    monkeypatch.setattr(calibration, "PROMPTS", ((64, 0), *calibration.PROMPTS[1:]))
    after = CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8)
    assert before.path == after.path
    assert before.versions != after.versions


def test_other_compiled_operations_replace_the_file(
    model: SpaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8)
    monkeypatch.setattr(calibration, "cpu_library", lambda: SimpleNamespace(path=Path("cpu-kernels-later.so")))
    after = CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8)
    assert before.path == after.path
    assert after.versions == {**before.versions, "kernels": "cpu-kernels-later"}


def test_every_kind_of_compiled_operations_is_measured_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(tiny_checkpoint(tmp_path / "tiny", num_masks=3)), dtype="bfloat16", device="cpu")
    kinds, files = (*cpu_library.own_kinds(), "torch"), set()
    try:
        for kind in kinds:
            monkeypatch.setenv(cpu_library.SWITCH, kind)
            cpu_library.cpu_library.cache_clear()
            files.add(CostFile.of(tmp_path, model.facts, block_size=16, max_sequences=8).path)
    finally:
        cpu_library.cpu_library.cache_clear()
    assert len(files) == len(kinds)


def test_a_load_without_figures_is_no_load() -> None:
    assert MachineLoad(2).why_busy is None
    assert set(MachineLoad(2).as_json().values()) == {2, None}
