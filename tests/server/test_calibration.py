"""What steps cost is measured on whole steps, kept between starts, and never stands in the way of serving."""

import errno
from collections import Counter
from pathlib import Path

import pytest
import torch
from space_kernels import cpu_library
from space_model.load import load_model
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_server import calibration
from space_server.calibration import cache_file, calibrate, load_or_measure
from space_server.device_step import DeviceStep, StepKind
from space_server.step_cost import StepCost, StepShape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    return load_model(str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_masks=3)), dtype="float32", device="cpu")


def test_shapes_are_measured_from_one_sequence_to_the_most(model: SpaceModel) -> None:
    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=8, seconds=200.0)
    assert {shape.num_sequences for shape, _ in points} >= {1, 2, 4, 8}
    assert max(shape.num_sequences for shape, _ in points) == 8
    assert any(shape.num_mask_rows for shape, _ in points)
    assert any(shape.num_noisy_rows for shape, _ in points)
    assert any(shape.num_prefill_rows and not shape.num_prefill_pairs for shape, _ in points)
    assert all(0 < seconds < 20 for _, seconds in points)
    assert StepCost.from_points(points).seconds(StepShape.plain(8)) > 0


def test_a_plain_checkpoint_is_measured_without_masks(tmp_path: Path) -> None:
    plain = load_model(str(tiny_checkpoint(tmp_path, num_masks=0)), dtype="float32", device="cpu")
    points = calibrate(plain, plain.allocate_kv(64, 16), max_sequences=2, seconds=5.0)
    assert points
    assert not any(shape.num_mask_rows for shape, _ in points)


def test_few_pages_are_shared_and_too_few_give_no_points(model: SpaceModel) -> None:
    assert calibrate(model, model.allocate_kv(20, 16), max_sequences=4, seconds=5.0)
    assert calibrate(model, model.allocate_kv(1, 16), max_sequences=4, seconds=5.0) == []


def test_measuring_ends_when_its_seconds_are_used(model: SpaceModel) -> None:
    ticks = iter(range(10**6))
    points = calibrate(
        model, model.allocate_kv(256, 16), max_sequences=64, seconds=60.0, clock=lambda: float(next(ticks))
    )
    assert 1 <= len(points) <= 3


def test_a_slow_model_has_prompts_and_several_sequences_measured_all_the_same(model: SpaceModel) -> None:
    now = 0.0

    def clock() -> float:  # asked some times in a step: 60 ms
        nonlocal now
        now += 0.005
        return now

    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=64, seconds=3.0, clock=clock)
    assert {shape.num_sequences for shape, _ in points} >= {1, 8}
    assert any(shape.num_mask_rows for shape, _ in points)
    assert any(shape.num_prefill_rows for shape, _ in points)


def test_points_are_kept_for_the_next_start(model: SpaceModel, tmp_path: Path) -> None:
    file = cache_file(tmp_path / "cache", model.facts, block_size=16, max_sequences=8)
    points = [(StepShape.plain(1), 0.5)]
    assert load_or_measure(file, lambda: points) == points
    assert load_or_measure(file, lambda: pytest.fail("measured again")) == points
    file.write_text("{")
    assert load_or_measure(file, lambda: points) == points


def test_a_folder_that_cannot_be_written_costs_a_measurement_a_start(model: SpaceModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    points = [(StepShape.plain(1), 0.5)]
    assert load_or_measure(tmp_path / "file" / "cost.json", lambda: points) == points


def test_a_full_disk_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    points = [(StepShape.plain(1), 0.5)]
    assert load_or_measure(tmp_path / "costs.json", lambda: points) == points
    assert not list(tmp_path.iterdir())


def test_another_dtype_or_batch_or_other_cases_are_measured_anew(
    model: SpaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {cache_file(tmp_path, model.facts, block_size=16, max_sequences=most) for most in (8, 64)}
    files.add(cache_file(tmp_path, model.facts, block_size=16, max_sequences=8, exact=True))
    files.add(cache_file(tmp_path, model.facts, block_size=16, max_sequences=8, steps="device"))
    assert len(files) == 4
    monkeypatch.setattr(calibration, "PROMPTS", ((64, 0), *calibration.PROMPTS[1:]))
    files.add(cache_file(tmp_path, model.facts, block_size=16, max_sequences=8))
    assert len(files) == 5
    assert torch.float32 == model.facts.dtype


def test_every_kind_of_compiled_operations_is_measured_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(tiny_checkpoint(tmp_path / "tiny", num_masks=3)), dtype="bfloat16", device="cpu")
    kinds, files = (*cpu_library.own_kinds(), "torch"), set()
    try:
        for kind in kinds:
            monkeypatch.setenv(cpu_library.SWITCH, kind)
            cpu_library.cpu_library.cache_clear()
            files.add(cache_file(tmp_path, model.facts, block_size=16, max_sequences=8))
    finally:
        cpu_library.cpu_library.cache_clear()
    assert len(files) == len(kinds)


def test_steps_of_the_device_are_measured_where_they_are_served(
    model: SpaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[StepKind] = []
    take = DeviceStep.take

    def noted(step: DeviceStep, kind: StepKind) -> torch.Tensor:
        launched.append(kind)
        return take(step, kind)

    monkeypatch.setattr(DeviceStep, "take", noted)
    kv = model.allocate_kv(256, 16)
    assert calibrate(model, kv, max_sequences=4, seconds=0.5)
    assert not launched
    points = calibrate(model, kv, max_sequences=4, seconds=200.0, steps="eager")
    assert {kind.num_lines for kind in launched} == {1, 2, 4}
    assert {kind.layout.num_masks for kind in launched} >= {0, 4}
    shapes = [shape for shape, _ in points]
    assert {shape.num_sequences for shape in shapes} == {1, 2, 4}
    assert any(shape.num_mask_rows for shape in shapes)
    assert any(shape.num_noisy_rows for shape in shapes)
    assert any(shape.num_prefill_rows for shape in shapes)  # read by the host


def test_what_a_kind_of_step_takes_at_first_is_not_measured(model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    now, take = 0.0, DeviceStep.take
    taken: dict[int, Counter[StepKind]] = {}

    def slow_at_first(step: DeviceStep, kind: StepKind) -> torch.Tensor:
        nonlocal now
        seen = taken.setdefault(id(step), Counter())
        seen[kind] += 1
        now += 9.0 if seen[kind] <= 2 else 0.002  # compiled, then captured; then replayed
        return take(step, kind)

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr(DeviceStep, "take", slow_at_first)
    points = calibrate(model, model.allocate_kv(256, 16), max_sequences=2, seconds=500.0, steps="eager", clock=clock)
    decoding = [seconds for shape, seconds in points if not shape.num_prefill_rows]
    assert len(decoding) > 5
    assert all(0.002 <= seconds < 0.003 for seconds in decoding)
    assert min(sum(seen.values()) for seen in taken.values()) >= 2 + calibration.NUM_STEPS
