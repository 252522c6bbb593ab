"""Host time is measured on the real worker: every part is there, and nothing of it is model computation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel

from perf.harness import PerfError, main
from perf.host_time import PARTS, Cell, run_cell


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", num_threads=1)


def test_every_decode_step_has_its_parts_and_its_computation(demo: SpaceModel) -> None:
    steps = run_cell(demo, Cell(2, 2), num_steps=3, seed=1)
    assert len(steps) >= 3
    for step in steps:
        assert step.computed > 0
        assert all(getattr(step, part) > 0 for part in PARTS)
        assert step.host == pytest.approx(sum(getattr(step, part) for part in PARTS))
    assert median(step.computed for step in steps) > median(step.host for step in steps)  # one may be disturbed


def test_more_steps_than_the_window_holds_are_refused(demo: SpaceModel) -> None:
    with pytest.raises(PerfError, match="500 steps of plain may need 703 positions; the window of demo has 600"):
        run_cell(load_model("demo", num_threads=1, max_model_len=600), Cell(1, 0), num_steps=500, seed=0)


def test_the_command_writes_figures_and_checks_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["host-time", "--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1", "--check"]
    status = main([*words, "--out", str(tmp_path)])
    record = json.loads((tmp_path / "host-time.json").read_text())
    (row,) = record["rows"]
    assert (row["batch"], row["layout"], row["bound_ms"]) == (1, "plain", 0.3)
    assert status == (row["median"] >= 0.3) == len(record["failures"])
    assert set(row["parts_ms"]) == {*PARTS, "computed"}
    assert "| 1 | plain |" in capsys.readouterr().out


def test_masks_that_a_model_lacks_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host-time", "--batches", "1", "--drafts", "9", "--steps", "1", "--rounds", "1"]) == 2
    assert "demo has 5 masks; full(9,9) needs more" in capsys.readouterr().err


def test_the_command_ends_without_lists_of_what_is_left() -> None:
    words = ["host-time", "--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent), *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "leaked" not in ran.stderr
