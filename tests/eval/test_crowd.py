"""What `spaceserve eval crowd` promises, and that it says so where a promise is not kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from space_eval.__main__ import main
from space_eval.crowd import Overload, SlowReaders

QUIET = SlowReaders(num_slow=64, num_each=120, alone=0.1, alone_95=0.2, beside=0.105, beside_95=0.2)
KEPT = Overload(
    capacity=8,
    offered=80,
    served=8,
    served_over=8,
    seconds=2,
    seconds_over=2.1,
    num_refused=2000,
    num_wrong=0,
    refused=0.002,
    refused_99=0.02,
    refused_last=0.2,
    seconds_after=0.2,
    seconds_before=0.2,
)


def test_slow_readers_may_cost_fast_ones_a_tenth_and_no_more() -> None:
    assert QUIET.holds
    assert "+5.0 %" in QUIET.sentence()
    felt = replace(QUIET, beside=0.111)
    assert not felt.holds
    assert "DOES NOT HOLD" in felt.sentence()


@pytest.mark.parametrize(
    "broken",
    [
        {"num_refused": 0},
        {"num_wrong": 1},
        {"seconds_over": 2.3},
        {"served_over": 7},
        {"refused_99": 0.06},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_overload_holds_only_where_nothing_of_it_is_broken(broken: dict[str, float]) -> None:
    assert KEPT.holds
    assert not replace(KEPT, **broken).holds  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_embedded_model_keeps_both_promises(tmp_path: Path) -> None:
    """On a machine that does nothing else."""
    assert main(["crowd", "--turns", "2", "--seconds", "15", "--out", str(tmp_path / "crowd.json")]) == 0
    made = json.loads((tmp_path / "crowd.json").read_text())
    assert made["slow_readers"]["num_slow"] == 64
    assert made["overload"]["offered"] == pytest.approx(10 * made["overload"]["capacity"])
