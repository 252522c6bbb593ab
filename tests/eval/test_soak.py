"""What grows is told from what only swings."""

import math
from pathlib import Path

import pytest
from space_eval import soak
from space_eval.soak_report import UNITS, Look, draw, markdown, record, slope, slopes


def look(seconds: float, **fields: float) -> Look:
    values = dict.fromkeys(Look.__dataclass_fields__, 0) | {"seconds": seconds} | fields
    return Look(**values)  # type: ignore[arg-type]


def test_the_slope_of_a_line_is_found_without_error() -> None:
    found = slope([(minute * 60.0, 100 + 2 * minute / 60) for minute in range(60)])
    assert found.per_hour == pytest.approx(2.0)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.end - found.begin == pytest.approx(1.8)


def test_a_swing_around_a_level_has_no_slope_beyond_its_error() -> None:
    found = slope([(10.0 * step, 50 + math.sin(step)) for step in range(360)])
    assert abs(found.per_hour) < 3 * found.error < 1.0


def test_the_beginning_is_no_growth() -> None:
    looks = [look(step, router_mib=90.0 if step < 20 else 120.0) for step in range(100)]
    assert slopes(looks)["router_mib"].per_hour == pytest.approx(0.0)


def test_a_report_has_a_row_for_everything_watched_and_pictures(tmp_path: Path) -> None:
    looks = [look(5.0 * step, probe_ms=10.0 + step) for step in range(20)]
    outcome = {
        "passed": True, "minutes": 1.6, "streams": 4, "num_done": {"stream": 5}, "num_refused": {}, "wrong": [],
        "num_changed": 0, "num_pages_leaked": 0, "num_restarts": 0,
    }  # fmt: skip
    facts = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}
    made = record(facts, looks, outcome)
    pictures = draw(tmp_path, looks, "note")
    text = markdown(made, pictures)
    assert all(called in text for called, _ in UNITS.values())
    assert all((tmp_path / name).stat().st_size > 1000 and f"({name})" in text for name in pictures)


def test_a_soak_too_short_for_a_slope_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "0.1"]) == 2
    assert "fewer than 8 looks" in capsys.readouterr().err
