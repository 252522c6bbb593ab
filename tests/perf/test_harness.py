"""The harness: alternating turns, medians with their spread, and a report with machine and commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from space_eval.bench.command import MOVED
from space_eval.bench.command import main as bench
from space_eval.report import Spread

from perf.harness import MEASUREMENTS, TAILS, Report, parser, table, take_turns


def test_every_other_round_is_in_reverse_order() -> None:
    turns: list[tuple[str, int]] = []
    take_turns(["a", "b", "c"], 3, lambda arm, number: turns.append((arm, number)))
    assert turns == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_no_round_begins_after_the_time_is_over_but_the_first() -> None:
    now = iter([0.0, 4.0, 11.0])
    turns: list[int] = []
    take_turns(["a"], 9, lambda arm, number: turns.append(number), seconds=10.0, clock=lambda: next(now))
    assert turns == [0, 1]


def test_a_spread_is_the_median_and_the_range_of_80_percent() -> None:
    spread = Spread.without_tails([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0], TAILS)
    assert (spread.median, spread.low, spread.high) == (5.5, 1.0, 9.0)
    assert spread.shown(1) == "5.5 (1.0–9.0)"


def test_a_table_shows_a_missing_number_as_a_dash() -> None:
    assert table(("a", "b"), [(1, f"{float('nan'):.2f}"), ("x|y", 2)]).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| 1 | – |",
        "| x/y | 2 |",
    ]


def test_a_report_has_machine_and_commit_in_both_files_and_names_what_is_wrong(tmp_path: Path) -> None:
    made = Report("Title", "How to read it.", ["| a |\n|---|\n"], {"rows": [1]}, {"load": "x"}, ["A text differs."])
    made.write(tmp_path, "name")
    lines = (tmp_path / "name.md").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[2:5]] == ["machine", "commit", "load"]
    assert lines[-1] == "WRONG: A text differs."
    record = json.loads((tmp_path / "name.json").read_text())
    assert record["facts"].keys() == {"machine", "commit", "load"}
    assert (record["rows"], record["failures"]) == ([1], ["A text differs."])


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_flags_and_runs(name: str) -> None:
    options = parser([name]).parse_args([name])
    assert callable(options.run)
    assert options.out is None


def test_removed_benchmarks_name_their_measurement_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    named = [found[1] for line in MOVED.values() if (found := re.search(r"tests/perf ([a-z-]+)`", line))]
    assert set(named) == set(MEASUREMENTS)
    assert bench(["product", "--rows", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spaceserve bench product was removed; in a checkout, `.venv/bin/python tests/perf matmul`")


def test_the_folder_is_a_program_from_any_working_folder(tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).parent), "memory", "--models", "1b", "--out", str(tmp_path)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "| 1B | SPACE | 2.3 GiB |" in ran.stdout
    assert (tmp_path / "memory.md").read_text(encoding="utf-8") == ran.stdout
