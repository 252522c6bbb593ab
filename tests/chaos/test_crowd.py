"""What the crowd experiment requires, and that it fails where a bound is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.crowd import Figure, TimedAnswer, overload_figures, slow_reader_figures

SERVED = TimedAnswer(200, False, 2.0)
REFUSED = TimedAnswer(429, True, 0.002)


def broken(figures: list[Figure]) -> list[str]:
    return [one.what for one in figures if not one.holds]


def test_slow_readers_may_cost_fast_ones_a_tenth_and_no_more() -> None:
    assert broken(slow_reader_figures([0.1] * 120, [0.105] * 120)) == []
    felt = slow_reader_figures([0.1] * 120, [0.111] * 120)
    assert broken(felt) == ["fast request beside slow readers, s (median)"]
    assert felt[1].row() == ("fast request beside slow readers, s (median)", "0.111", "≤ 0.11", "NO")


def test_overload_holds_where_as_many_are_served_as_fast_and_the_others_refused_at_once() -> None:
    figures = overload_figures(2.0, [SERVED] * 16, [SERVED] * 16 + [REFUSED] * 2000)
    assert broken(figures) == []
    assert {one.what: one.value for one in figures}["offered, requests/s"] == 1008


@pytest.mark.parametrize(
    ("over", "what"),
    [
        ([SERVED] * 16, "refused"),
        ([SERVED] * 16 + [REFUSED, TimedAnswer(503, True, 0.002)], "refused otherwise"),
        ([SERVED] * 16 + [TimedAnswer(429, False, 0.002)], "refused otherwise"),
        ([TimedAnswer(200, False, 2.3)] * 16 + [REFUSED], "request that is served"),
        ([SERVED] * 14 + [REFUSED], "served, requests/s"),
        ([SERVED] * 16 + [TimedAnswer(429, True, 0.06)] * 2, "refusal, s (99 of 100)"),
    ],
    ids=["num_refused", "num_wrong", "no_retry_after", "seconds_over", "served_over", "refused_99"],
)
def test_overload_holds_only_where_nothing_of_it_is_broken(over: list[TimedAnswer], what: str) -> None:
    (found,) = broken(overload_figures(2.0, [SERVED] * 16, over))
    assert found.startswith(what)


@pytest.mark.slow
def test_the_embedded_model_keeps_both_promises(tmp_path: Path) -> None:
    """On a machine that does nothing else."""
    assert main(["crowd", "--turns", "2", "--seconds", "15", "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "crowd.json").read_text())["figures"]
    assert figures["offered, requests/s"] == pytest.approx(10 * figures["capacity, requests/s"], rel=0.05)
