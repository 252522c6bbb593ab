"""Host time is measured on the real worker: every part is there, and nothing of it is model computation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from space_eval.host_time import main
from space_eval.host_time_run import PARTS, Cell, HostTimeError, run_cell
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", num_threads=1)


def test_every_decode_step_has_its_parts_and_its_computation(demo: SpaceModel) -> None:
    steps = run_cell(demo, Cell(2, 2, 0.8), num_steps=3, seed=1)
    assert len(steps) >= 3
    for step in steps:
        assert step.computed > 0
        assert all(getattr(step, part) > 0 for part in PARTS)
        assert step.host == pytest.approx(sum(getattr(step, part) for part in PARTS))
    assert median(step.computed for step in steps) > median(step.host for step in steps)  # one may be disturbed


def test_more_steps_than_the_window_holds_are_refused(demo: SpaceModel) -> None:
    with pytest.raises(HostTimeError, match="500 steps of plain may need 703 positions; the window of demo has 600"):
        run_cell(load_model("demo", num_threads=1, max_model_len=600), Cell(1, 0, 0.0), num_steps=500, seed=0)


def test_the_command_writes_figures_and_pictures_and_checks_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    record = json.loads((tmp_path / "out" / "host-time.json").read_text())
    (row,) = record["rows"]
    assert (row["batch"], row["layout"], row["bound_ms"]) == (1, "plain", 0.3)
    assert set(row["parts_ms"]) == set(PARTS)
    assert len(row["steps_ms"]) >= 2
    assert "| 1 | plain |" in capsys.readouterr().out
    assert (tmp_path / "out" / "host-time-batch-1.png").read_bytes().startswith(b"\x89PNG")
    assert "host-time-batch-1.png" in (tmp_path / "out" / "host-time.md").read_text()


def test_masks_that_a_model_lacks_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batches", "1", "--drafts", "9", "--steps", "1", "--rounds", "1"]) == 2
    assert "demo has 5 masks; full(9,9) needs more" in capsys.readouterr().err


def test_the_command_ends_without_lists_of_what_is_left() -> None:
    words = ["--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "space_eval.host_time", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "leaked" not in ran.stderr
