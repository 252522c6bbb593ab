"""The arithmetic of the overload experiment: arrivals, what counts as in time, who got what, and the bounds."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.overload import (
    Arrival,
    LoadResult,
    RequestKind,
    arrivals,
    buckets,
    cpu_seconds_of,
    histogram_quantile,
    overload_figures,
)

KIND = RequestKind("a", 10, 4)


def answered(at: float, tenant: int = 0, *, first: float = 1.0, each: float = 0.1) -> Arrival:
    """Four tokens, whole."""
    tokens = [(at + first + number * each, 1) for number in range(4)]
    return Arrival(at, tenant, KIND, 200, None, tokens, tokens[-1][0])


REFUSED = Arrival(15.0, 0, KIND, 429, 3.0)


def result(load: float, *given: Arrival, shares: tuple[float, ...] = (0.25, 0.75)) -> LoadResult:
    return LoadResult(load, shares, given, begin=10.0, end=20.0, first_token=5.0, per_token=0.2, waits=(1.0, 2.0))


def even(load: float, number: int = 20) -> LoadResult:
    """Two tenants that get the same."""
    return result(load, *(answered(10.0 + 0.2 * n, n % 2) for n in range(number)), REFUSED)


def test_arrivals_come_at_each_tenants_rate_and_a_seed_is_a_load() -> None:
    made = arrivals([1.0, 3.0], 1000.0, 1, [KIND])
    counts = [sum(one.tenant == tenant for one in made) for tenant in (0, 1)]
    assert counts == [pytest.approx(1000, rel=0.1), pytest.approx(3000, rel=0.1)]
    assert [one.at for one in made] == sorted(one.at for one in made)
    assert made == arrivals([1.0, 3.0], 1000.0, 1, [KIND]) != arrivals([1.0, 3.0], 1000.0, 2, [KIND])


def test_an_answer_is_in_time_where_it_is_whole_and_neither_begins_nor_goes_on_late() -> None:
    assert answered(12.0).is_in_time(5.0, 0.2)
    assert not answered(12.0, first=5.1).is_in_time(5.0, 0.2)
    assert not answered(12.0, each=0.21).is_in_time(5.0, 0.2)
    assert not replace(answered(12.0), ended=None).is_in_time(5.0, 0.2)


def test_only_what_falls_into_the_time_counts() -> None:
    late_end = answered(18.9)  # its first token comes within the time, and its end does not
    found = result(1.0, answered(5.0), answered(12.0), late_end, answered(12.0, 1, first=6.0), REFUSED)
    assert (len(found.answered), len(found.in_time), found.goodput) == (2, 1, 0.4)
    assert found.tenant_tokens() == [14 + 11, 14]
    assert found.throughput == pytest.approx(0.9)
    assert found.first_tokens == pytest.approx([1.0, 1.0, 6.0])
    assert (len(found.refused), found.num_wrong) == (1, 0)


def test_a_tenant_is_greedy_where_it_asks_for_more_than_an_equal_share() -> None:
    assert not result(2.0).are_all_greedy
    assert result(2.5).are_all_greedy
    assert even(10.0).spread == 0.0
    assert result(10.0, answered(12.0), answered(12.0), answered(12.0, 1)).spread == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("over", "what"),
    [
        (even(10.0), None),
        (even(10.0, 18), "goodput at 10"),
        (result(10.0, *(answered(12.0, n % 2, first=4.0 if n == 9 else 1.0) for n in range(20))), "first token at 10"),
        (replace(even(10.0), waits=(1.0, 17.0)), "wait at 10"),
        (result(10.0, *(answered(12.0, int(n > 10)) for n in range(20))), "furthest key"),
        (result(10.0, *(answered(12.0, n % 2) for n in range(20)), replace(REFUSED, retry_after=None)), "refused"),
    ],
)  # fmt: skip
def test_the_bounds_hold_only_where_none_of_them_is_broken(over: LoadResult, what: str | None) -> None:
    failed = [one.what for one in overload_figures([even(1.0), over], max_queue=16) if not one.holds]
    assert [one.startswith(what or "") for one in failed] == [True] * (what is not None)


def test_processor_time_of_a_process_grows_with_its_work() -> None:
    begun = cpu_seconds_of(os.getpid())
    while time.process_time() < begun + 0.05:
        pass
    assert cpu_seconds_of(os.getpid()) > begun


def test_a_quantile_is_of_what_came_between_two_scrapes() -> None:
    text = 'x_bucket{le="1.0"} 4.0\nx_bucket{le="2.0"} 8.0\nx_bucket{le="+Inf"} 8.0\ny_bucket{le="1.0"} 9.0\n'
    after = buckets(text, "x")
    assert after == {1.0: 4.0, 2.0: 8.0, math.inf: 8.0}
    assert histogram_quantile({}, after, 0.75) == 1.5
    assert histogram_quantile({1.0: 4.0, 2.0: 4.0, math.inf: 4.0}, after, 0.5) == 1.5
    assert math.isnan(histogram_quantile(after, after, 0.5))


@pytest.mark.slow
def test_four_keys_of_unequal_greed_get_the_same_at_ten_times_the_capacity(tmp_path: Path) -> None:
    """On a machine that does nothing else."""
    flags = ["--model", "demo", "--loads", "1,10", "--seconds", "30", "--settle", "10"]
    assert main(["overload", *flags, "--out", str(tmp_path)]) == 0
    assert len(json.loads((tmp_path / "overload.json").read_text())["loads"]) == 2
