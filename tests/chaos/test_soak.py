"""What grows is told from what only swings."""

import math

import pytest
from space_eval.bench.client import Endpoint

from chaos.__main__ import main
from chaos.soak import SERIES, Observation, report, slope, slopes
from chaos.visits import Visits

FACTS = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}


def observed(seconds: float, **series: float) -> Observation:
    return dict.fromkeys(SERIES, 0.0) | {"seconds": seconds} | series


def test_the_slope_of_a_line_is_found_without_error() -> None:
    found = slope([(minute * 60.0, 100 + 2 * minute / 60) for minute in range(60)])
    assert found.per_hour == pytest.approx(2.0)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.end - found.begin == pytest.approx(1.8)


def test_a_swing_around_a_level_has_no_slope_beyond_its_error() -> None:
    found = slope([(10.0 * step, 50 + math.sin(step)) for step in range(360)])
    assert abs(found.per_hour) < 3 * found.error < 1.0


def test_the_beginning_is_no_growth() -> None:
    seen = [observed(step, **{"router, MiB": 90.0 if step < 20 else 120.0}) for step in range(100)]
    assert slopes(seen)["router, MiB"].per_hour == pytest.approx(0.0)


@pytest.mark.parametrize("broken", ["", "wrong", "pages leaked"])
def test_a_report_has_a_row_for_everything_watched_and_fails_where_something_went_wrong(broken: str) -> None:
    seen = [observed(5.0 * step, **{"pages held": 10.0 + step}) for step in range(20)]
    visits = Visits(Endpoint("127.0.0.1", 1), window=64, text="", seed=1)
    visits.num_done["stream"] = 5
    if broken == "wrong":
        visits.wrong.append("stream: no")
    made = report(FACTS, seen, visits, {"pages leaked": int(broken == "pages leaked")})
    assert (not made.failures) is (broken == "")
    assert all(f"| {name} | " in made.markdown() for name in SERIES)
    assert "5 visits done (5 stream)" in made.markdown()
    assert ("WRONG: stream: no" in made.markdown()) is (broken == "wrong")


def test_a_soak_too_short_for_a_slope_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "0.1"]) == 2
    assert "fewer than 8 observations" in capsys.readouterr().err
