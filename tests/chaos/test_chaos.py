"""Every experiment is a Make target, and fails where something was lost or a bound is broken."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from processes import ProcessFigures
from space_common.http_client import Endpoint

from chaos import faults, hosts, soak
from chaos.__main__ import EXPERIMENTS, main, parser
from chaos.crowd import Figure, TimedAnswer, overload_figures, slow_reader_figures
from chaos.faults import LOSSES, Fault, Recovered, planned
from chaos.harness import StreamAnswer, StreamCounts, bodies
from chaos.hosts import Host, HostError
from chaos.soak import SERIES, Observation, Visits, slope, slopes

ROOT = Path(__file__).parents[2]


TARGETS = {"day": "chaos"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_make_runs_the_experiment_with_its_flags(name: str) -> None:
    own = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    printed = subprocess.run(
        ["make", "-n", TARGETS.get(name, name), "FLAGS=--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env=own,
    )
    *_, command = printed.stdout.splitlines()
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.startswith(f"usage: chaos {name} ")


def test_flags_behind_two_dashes_are_those_of_the_server() -> None:
    words = ["faults", "--faults", "3", "--pause", "0.5", "--", "--num-threads", "1"]
    options = parser(words).parse_args(words)
    assert (options.faults, options.pause, options.streams) == (3, 0.5, 32)
    assert options.serve_flags == ["--num-threads", "1"]
    for more in ([], ["--loopback"]):
        assert parser(["hosts"]).parse_args(["hosts", *more]).loopback is bool(more)


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


FACTS = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}


def test_a_plan_has_as_many_kills_and_hangs_as_were_asked_for_and_others_besides() -> None:
    plan = planned(200, random.Random(1))
    counts = Counter(plan)
    assert sum(counts[fault] for fault in LOSSES) == 200
    assert counts[Fault.HANG] == 60
    assert counts[Fault.LOADING] == counts[Fault.CRASH] == 20
    assert counts[Fault.GARBAGE] == counts[Fault.INTRUDER] == 13


def test_requests_are_unlike_each_other() -> None:
    made = bodies(32, 384)
    assert len({str(body) for body in made}) == 32
    assert {body["temperature"] for body in made} == {0.0, 0.8, 1.0}
    assert sum("prediction" in body for body in made) == sum("structured_outputs" in body for body in made) == 4


@pytest.mark.parametrize(
    ("ids", "text", "number"), [((1, 2, 3), "abc", 0), ((1, 9, 3), "axc", 1), ((1, 2), "ab", 1), ((1, 2, 3), "ab", 1)]
)
def test_tokens_that_differ_or_lack_are_counted(ids: tuple[int, ...], text: str, number: int) -> None:
    assert StreamAnswer(ids, text, "length").num_different(StreamAnswer((1, 2, 3), "abc", "length")) == number


@pytest.mark.parametrize("field", ["lost", "num_different", "leaked", ""])
def test_a_run_passes_only_where_nothing_was_lost(field: str) -> None:
    counts = StreamCounts(num_streams=3, pauses=[0.5])
    if field == "lost":
        counts.lost.append("broken")
    if field == "num_different":
        counts.num_different = 1
    recovered = [Recovered(Fault.KILL, 2.0), Recovered(Fault.HANG, 4.0), Recovered(Fault.GARBAGE, 0.1)]
    made = faults.report(FACTS, counts, recovered, int(field == "leaked"), (ProcessFigures(), ProcessFigures()))
    assert (not made.failures) is (field == "")
    assert (made.record["num_kills_and_hangs"], made.record["num_faults"]) == (2, 3)
    assert made.record["recovery_seconds"]["all kills and hangs"]["median"] == 3.0
    assert "| killed | 1 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in made.markdown()
    assert ("WRONG: broken" in made.markdown()) is (field == "lost")


def test_a_process_has_memory_files_and_threads_and_one_that_is_gone_has_none(tmp_path: Path) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "0").touch()
    (tmp_path / "7" / "status").write_text("Name:\ta: b\nVmHWM:\t  21 kB\nVmRSS:\t  20 kB\nThreads:\t3\n")
    assert ProcessFigures.of(7, tmp_path) == ProcessFigures(20 * 1024, 1, 3, 21 * 1024)
    assert ProcessFigures.of(8, tmp_path) == ProcessFigures()


def test_a_run_passes_only_where_nothing_was_lost_and_nothing_differs() -> None:
    counts = StreamCounts(num_streams=2, num_tokens=100, seconds=4.0)
    assert counts.tokens_per_second == 25.0
    made = hosts.report(FACTS, {"one worker": counts}, [1, 2, 1], namespaces=False, workers="demo")
    assert not made.failures
    assert "| one worker | 2 | 0 | 0 | 100 | 25 | 0.0 s |" in made.markdown()
    assert "loopback addresses" in made.markdown()
    counts.lost.append("the server said no")
    made = hosts.report(FACTS, {"one worker": counts}, [1, 2, 1], namespaces=False, workers="demo")
    assert made.failures
    assert made.markdown().endswith("WRONG: one worker: the server said no\n")
    differs = StreamCounts(num_different=1)
    assert hosts.report(FACTS, {"one worker": differs}, [1], namespaces=False, workers="demo").failures


def test_a_worker_that_does_not_start_is_named_with_its_words() -> None:
    host = Host(0, lambda address: ["sh", "-c", f"echo no room at {address}; exit 1"], namespaces=False)
    with pytest.raises(HostError, match=f"no room at {host.address}"), host:
        pass


def test_a_loopback_address_cannot_be_cut_off() -> None:
    with pytest.raises(HostError, match="cannot be cut off"):
        Host(0, lambda address: [], namespaces=False).cut()


@pytest.mark.slow
@pytest.mark.parametrize("loopback", [False, True], ids=["namespaces", "loopback"])
def test_three_machines_lose_no_stream_and_no_token(tmp_path: Path, loopback: bool) -> None:
    flags = ["--scripted", "--streams", "12", "--tokens", "64", "--faults", "2", "--restarts", "1"]
    assert main(["hosts", *flags, "--out", str(tmp_path), *(["--loopback"] if loopback else [])]) == 0
    made = json.loads((tmp_path / "hosts.json").read_text())
    assert made["passed"]
    names = [phase["name"] for phase in made["phases"]]
    assert names[:3] == ["one worker", "3 workers", "workers killed"]
    assert ("machines cut off" in names) == made["namespaces"]
    assert min(made["num_starts"]) >= 2  # every worker was restarted


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
    made = soak.report(FACTS, seen, visits, {"pages leaked": int(broken == "pages leaked")})
    assert (not made.failures) is (broken == "")
    assert all(f"| {name} | " in made.markdown() for name in SERIES)
    assert "5 visits done (5 stream)" in made.markdown()
    assert ("WRONG: stream: no" in made.markdown()) is (broken == "wrong")


def test_a_soak_too_short_for_a_slope_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "0.1"]) == 2
    assert "fewer than 8 observations" in capsys.readouterr().err
