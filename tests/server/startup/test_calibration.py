"""What steps cost is measured on whole steps, in passes that show whether anything else was going on."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_server.device_runner.device_forward import DeviceForward, StepKind
from space_server.startup import calibration
from space_server.startup.calibration import (
    AGREE,
    FEWEST,
    NUM_PASSES,
    PLAIN_STEP,
    Calibration,
    Timing,
    calibrate,
    time_plain_step,
    time_steps,
)
from space_server.step_cost import StepCost, StepShape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    return load_model(str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_masks=3)), dtype="float32", device="cpu")


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


def test_the_passes_of_a_steady_machine_agree(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Machine(model, monkeypatch, lambda now: 0.004)
    found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, clock=clock)
    assert {len(times) for times in found.passes.values()} == {NUM_PASSES}
    assert set(found.passes) == {"1 sequence, plain", "1 sequence, 2 drafts, 6 masks", "8 sequences, plain"}
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    assert found.why_unsure is None


def test_the_passes_are_as_far_apart_as_the_seconds_allow(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work that ends, or begins, half-way is seen."""
    for slow in ((0.0, 1.4), (1.6, 9.0)):
        with monkeypatch.context() as patch:
            clock = Machine(model, patch, lambda now, slow=slow: 0.02 if slow[0] <= now < slow[1] else 0.004)  # type: ignore[misc]
            found = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, clock=clock)
        assert found.spread is not None
        assert found.spread > AGREE
        assert "3 passes differ by 400 %" in str(found.why_unsure)


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
    assert Calibration([*points, (StepShape.plain(9), 0.1)], passes, 3.0).why_unsure is None


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


def test_the_noise_of_a_middle_time_is_that_of_a_normal_law() -> None:
    draws = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)).mul(0.05).add(1.0)
    timings = [Timing(StepShape.plain(1), tuple(times)) for times in draws.tolist()]
    spread = torch.tensor([timing.seconds for timing in timings]).std().item()
    told = sum(timing.noise for timing in timings) / len(timings)
    assert told == pytest.approx(spread, rel=0.15)
    assert Timing(StepShape.plain(1), (1.0, 1.0)).noise == AGREE / 3
