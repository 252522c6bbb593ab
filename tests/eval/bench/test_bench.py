"""The arithmetic of the load benchmark, and its flags."""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from doubles.scripted_http import Reply, ScriptedServer, jumping, openai_answer, tgi_answer
from space_common.http_client import Endpoint
from space_common.process import ServerProcess
from space_common.worker.settings import NAMED_CHANCES
from space_eval.bench import command as bench
from space_eval.bench.arms import APIS, Arm, Exchange, TokenEvent
from space_eval.bench.command import Target, find_arms
from space_eval.bench.meters import PowerMeter, energy_figure
from space_eval.bench.options import Limits, parse, seconds_of
from space_eval.bench.report import (
    ArmSummary,
    BenchResult,
    markdown,
    record,
    summaries,
    synthetic_acceptance_label,
    table,
)
from space_eval.bench.rounds import Round
from space_eval.bench.workload import Closed, Lengths, Open, Swing
from space_eval.report import Ratio, Spread, bootstrap, percentile
from space_server.speculation.synthetic_acceptance import label


def arm(name: str, speculation: str | None = None, *, is_baseline: bool = False) -> Arm:
    return Arm(name, Endpoint("h", 1), APIS["openai"], speculation=speculation, is_baseline=is_baseline)


ARMS = [arm("off", "off", is_baseline=True), arm("auto", "auto")]
PAIR = [arm("a", is_baseline=True), arm("b")]


def exchange(*pieces: tuple[float, tuple[int, ...]], steps: int = 1, rate: float | None = 1.0) -> Exchange:
    statistics = {"steps": steps, "tokens_per_step": rate, "drafted": 2 * steps}
    made = [TokenEvent(seconds, len(ids), ids) for seconds, ids in pieces]
    return Exchange(events=made, statistics=statistics, seconds=pieces[-1][0], finished=True)


def a_round(name: str, seconds: float, *exchanges: Exchange) -> Round:
    return Round(name, seconds, exchanges, {"router": 0.5})


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0


def test_bootstrap_bounds_are_quantiles_of_the_medians_of_resamples() -> None:
    values = [0.9, 1.1, 1.0, 1.4, 1.3, 0.8]
    source = random.Random(5)
    medians = sorted(statistics.median(source.choices(values, k=6)) for _ in range(200))
    assert bootstrap(values, num_resamples=200, seed=5) == (medians[4], medians[194])  # the 5th and the 195th of 200


def test_the_bootstrap_agrees_with_the_exact_distribution_of_the_median_of_three() -> None:
    # Of 27 resamples of (1, 2, 3) the median is 1 in 7, 2 in 13 and 3 in 7: each end has more than 2.5 %.
    assert bootstrap([1.0, 2.0, 3.0]) == (1.0, 3.0)
    assert bootstrap([1.0, 2.0, 3.0], share=0.4) == (2.0, 2.0)  # 30 % on each side: more than 7 of 27
    assert bootstrap([2.0] * 9) == (2.0, 2.0)


def test_the_bounds_cover_the_true_median_about_as_often_as_they_say() -> None:
    source = random.Random(1)
    covered = 0
    for _ in range(200):
        low, high = bootstrap([source.gauss(1.0, 0.1) for _ in range(20)], num_resamples=300)
        covered += low <= 1.0 <= high
    assert 180 <= covered <= 200  # 95 % of 200 is 190, give or take three deviations


def test_what_the_rounds_of_one_start_have_in_common_widens_the_bounds() -> None:
    """Each start's rounds lie close together; how starts differ is known from three of them only."""
    source = random.Random(6)
    starts = [start for start in range(3) for _ in range(10)]
    ratios = [0.97 + 0.03 * start + source.gauss(0.0, 0.002) for start in starts]
    low, high = bootstrap(ratios, starts)
    assert low < 0.98
    assert high > 1.02
    alone = bootstrap(ratios)
    assert 0.98 < alone[0] < alone[1] < 1.02
    assert bootstrap(ratios, [0] * 30) == alone
    assert Ratio.of(ratios, starts).low == low


def test_the_gap_before_an_event_is_shared_among_its_tokens() -> None:
    one = exchange((1.0, (5,)), (1.5, (6, 7)), (1.6, (8,)))
    assert one.first_token_seconds == 1.0
    assert one.token_gaps == pytest.approx([0.25, 0.25, 0.1])
    assert one.event_gaps == pytest.approx([0.5, 0.1])
    assert one.token_ids == (5, 6, 7, 8)


def test_tokens_per_step_weighs_streams_by_their_steps() -> None:
    one = exchange((1.0, (1,)), steps=3, rate=2.0)
    other = exchange((1.0, (1,)), steps=1, rate=4.0)
    assert a_round("auto", 1.0, one, other).tokens_per_step == 2.5
    assert a_round("auto", 1.0, one, other).drafts_per_step == 2.0
    assert a_round("auto", 1.0, exchange((1.0, (1,)), steps=0, rate=None)).tokens_per_step is None


def test_what_comes_after_the_end_of_a_round_does_not_count() -> None:
    late = exchange((0.5, (1, 2)), (1.5, (3,)))
    late.started = 1.0
    assert a_round("auto", 2.0, late).num_tokens == 2


def test_a_ratio_is_of_one_round_and_its_middle_is_the_median() -> None:
    four = exchange((0.1, (1, 2)), (0.2, (3, 4)))
    rounds = [(a_round("off", 4.0, four), a_round("auto", seconds, four)) for seconds in (1.0, 2.0, 4.0)]
    plain, fast = summaries(Closed(8), rounds, ARMS)
    assert plain.ratio is None
    assert fast.ratio == Ratio(median=2.0, low=1.0, high=4.0, num=3)
    assert fast.tokens_per_second == Spread(median=2.0, low=1.0, high=4.0)
    assert (plain.num_streams, plain.speculation, plain.identical) == (8, "off", "3/3")
    assert fast.cpu_shares == {"router": 0.5}


def test_with_two_baselines_plain_itself_is_compared_with_the_plain_server() -> None:
    one = exchange((0.1, (1, 2)))
    rounds = [a_round("plain server", 1.0, one), a_round("off", 2.0, one), a_round("auto", 1.0, one)]
    three = [arm("plain server", "off", is_baseline=True), *ARMS]
    server, plain, fast = summaries(Closed(1), [rounds, rounds], three)
    assert not server.ratios
    assert {name: ratio.median for name, ratio in plain.ratios.items()} == {"plain server": 0.5}
    assert {name: ratio.median for name, ratio in fast.ratios.items()} == {"plain server": 1.0, "off": 2.0}


def test_answers_that_differ_are_counted_and_shown() -> None:
    pair = (a_round("off", 1.0, exchange((0.1, (1,)))), a_round("auto", 1.0, exchange((0.1, (2,)))))
    found = summaries(Closed(1), [pair], ARMS)
    assert found[1].identical == "0/1"
    assert "0/1" in table(found)


def test_answers_without_ids_are_not_called_the_same() -> None:
    untold = Exchange(events=[TokenEvent(0.1, 1)], finished=True)
    found = summaries(Closed(1), [(a_round("a", 1.0, untold), a_round("b", 1.0, untold))], PAIR)
    assert [row.identical for row in found] == [None, None]


def test_failures_are_counted_by_status_and_spoil_no_latency() -> None:
    refused, broken = Exchange(error="429"), Exchange(error="broken")
    (row,) = summaries(Open(2.0), [[a_round("a", 2.0, exchange((0.1, (1,))), refused, refused, broken)]], PAIR[:1])
    assert row.errors == {"429": 2, "broken": 1}
    assert row.first_token_ms["p99"] == 100
    assert row.rate == 2.0
    assert "429×2 broken×1" in table([row])


def test_in_open_loop_the_time_is_compared_and_not_the_throughput_which_is_what_came() -> None:
    slow, fast = exchange((0.5, (1,)), (1.0, (2,))), exchange((0.25, (1,)), (0.5, (2,)))
    pair = [a_round("a", 2.0, slow), a_round("b", 2.0, fast, Exchange(error="429"))]
    (_, row) = summaries(Open(2.0), [pair], PAIR)
    assert (row.ratios, row.latency_ratios["a"].median) == ({}, 0.5)
    assert "time to a's" in table([row])


def test_goodput_counts_whole_answers_within_every_limit() -> None:
    limits = Limits.parse("ttft=500ms,itl=50ms,gap=1s,e2e=2s")
    good = exchange((0.5, (1,)), (0.6, (2, 3)))
    late = exchange((0.6, (1,)))
    slow = exchange((0.1, (1,)), (0.2, (2,)))
    cut = Exchange(events=[TokenEvent(0.1, 1)], seconds=0.1)
    silent = exchange((0.1, (1,)), (1.2, tuple(range(40))))
    assert [limits.kept(one) for one in (good, late, slow, cut, silent, Exchange())] == [True] + 5 * [False]
    (row,) = summaries(Closed(1), [[a_round("a", 2.0, good, late, slow, cut)]], PAIR[:1], limits=limits)
    assert (row.goodput, row.kept) == (Spread(0.5, 0.5, 0.5), 0.25)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("5s", 5.0), ("2m", 120.0), ("1.5", 1.5), ("1h", 3600.0)]
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_given_flags_win_over_the_smoke_preset() -> None:
    settings, serve_flags = parse(["--smoke", "--concurrency", "2,3", "--", "--num-threads", "1"], "")
    assert settings.concurrency == (2, 3)
    assert settings.num_rounds == 1
    assert settings.output_tokens == Lengths.parse("16")
    assert serve_flags == ["--num-threads", "1"]


def test_the_load_is_streams_or_rates_or_a_swing() -> None:
    assert parse(["--concurrency", "1,4"], "")[0].shapes == [Closed(1), Closed(4)]
    assert parse(["--rate", "0.5,2"], "")[0].shapes == [Open(0.5), Open(2.0)]
    assert parse(["--swing", "1:64:5s"], "")[0].shapes == [Swing(1, 64, 5.0)]


def test_servers_side_by_side_have_names() -> None:
    settings, _ = parse(["--url", "ours=http://a:1", "--url", "http://b:2/x=y"], "")
    assert settings.urls == (("ours", "http://a:1"), ("http://b:2/x=y", "http://b:2/x=y"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "0"], "must be a whole number of at least 1; got '0'"),
        (["--temperature", "hot"], "must be a number from 0 to 2; got 'hot'"),
        (["--speculation", "off"], "must be a whole number of at least 1; got 'off'"),
        (["--url", "x", "--model", "y"], "not allowed with"),
        (["--rate", "0"], "must be numbers above 0, in requests per second, or `file`; got '0'"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--swing", "64:1:5s"], "'64:1:5s' is no swing: give LOW:HIGH:PERIOD, such as 1:64:5s"),
        (["--slo", "speed=1s"], "'speed=1s' is no limit: give NAME=DURATION with ttft, itl, gap, e2e"),
        (["--duration", "5 parsecs"], "'5 parsecs' is no duration: give one such as 500ms, 5s or 2m"),
        (["--output-tokens", "about:5"], "'about:5' is no length: give N, uniform:LOW:HIGH"),
        (["--body", "[1]"], "must be a JSON object; got '[1]'"),
    ],
)
def test_flags_that_mean_nothing_are_refused_by_name(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--url", "ftp://x"], 1, "is no server address"),
        (["--url", "http://x", "--", "--port", "1"], 2, "leave out --url"),
        (["--url", "http://x", "--api-key-file", "/none"], 2, "there is no key in it"),
        (["--url", "http://x", "--starts", "2"], 2, "leave out --url"),
        (["--url", "http://x", "--plain-server"], 2, "give --model, and leave out --url"),
        (["--url", "a=http://x", "--url", "a=http://y"], 2, "two servers are called 'a'"),
        (["--url", "a=http://x", "--url", "b=http://y", "--control"], 2, "--control is about one server"),
        (["--url", "a=http://x", "--url", "b=http://y", "--speculation", "1,2"], 2, "is about one server"),
        (["--swing", "1:2:1s", "--requests", "5"], 2, "give --duration instead"),
        (["--url", "http://x", "--rate", "file"], 2, "takes the arrivals of --prompts FILE"),
        (["--url", "http://x", "--prompts", "/none"], 2, "There is no prompt file at /none"),
        (["--url", "http://x", "--out", f"{__file__}/out"], 2, "cannot be written: Not a directory"),
        (["--url", "http://x", "--out", f"{__file__}/out.json"], 2, "cannot be written: Not a directory"),
    ],
)
def test_unusable_settings_end_with_one_line(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(flags) == code
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_record_is_json_and_a_page() -> None:
    pair = (a_round("off", 1.0, exchange((0.1, (1,)))), a_round("auto", 1.0, exchange((0.1, (1,)))))
    found = summaries(Closed(1), [pair], ARMS)
    made = record({"machine": "m"}, {"output_tokens": "1"}, BenchResult(found, {}))
    ratio = {"median": 1.0, "low": 1.0, "high": 1.0, "num": 1}
    assert json.loads(json.dumps(made))["rows"][1]["ratio"] == ratio
    page = markdown(made, found, ["ratio.png"])
    assert "- machine: m" in page
    assert "| 1 stream | auto |" in page
    assert "![ratio](ratio.png)" in page


def test_a_word_before_the_flags_goes_to_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    module = types.ModuleType("space_eval.never")
    module.main = lambda argv: given.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(bench, "COMMANDS", {"never": (module.__name__, "")})
    assert bench.main(["never", "--flag", "1"]) == 7
    assert given == [["--flag", "1"]]


@pytest.mark.parametrize("word", bench.COMMANDS)
def test_the_other_benchmarks_are_shown_in_the_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    assert f"spaceserve bench {word}" in capsys.readouterr().out


def test_the_client_loads_no_torch(tmp_path: Path) -> None:
    """In a process of its own: this one may have loaded it before."""
    import subprocess

    code = "import sys, space_eval.bench.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def benched(flags: list[str], scripts: dict[str, Callable[[str, Any], Reply]], monkeypatch: pytest.MonkeyPatch) -> int:
    """`spaceserve bench` with `--url NAME=…` for each script, under the clock that jumps."""

    async def beside(main: Any) -> Any:
        async with AsyncExitStack() as stack:
            for target, script in zip(places.values(), scripts.values(), strict=True):
                server = await stack.enter_async_context(ScriptedServer(script).serving())
                object.__setattr__(target, "url", server.url)
            return await main

    places = {name: Target(name, "http://later") for name in scripts}
    monkeypatch.setattr(bench, "targets", lambda *_: list(places.values()))
    monkeypatch.setattr(bench.asyncio, "run", lambda main: jumping(beside(main)))
    urls = [part for name in scripts for part in ("--url", f"{name}=http://later")]
    return bench.main([*urls, *flags])


def foreign(reply: Reply) -> Callable[[str, Any], Reply]:
    def script(path: str, body: Any) -> Reply:
        if path == "/v1/models":
            return Reply.json({"data": [{"id": "m"}]})
        return reply if body is not None and path != "/tokenize" else Reply.json({"detail": "Not Found"}, 404)

    return script


def test_two_foreign_servers_are_measured_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 8}
    slow, fast = (openai_answer([(seconds, 4), (seconds, 4)], usage=usage) for seconds in (1.0, 0.5))
    flags = ["--concurrency", "2", "--rounds", "3", "--slo", "ttft=600ms", "--out", str(tmp_path / "out")]
    assert benched(flags, {"slow": foreign(slow), "fast": foreign(fast)}, monkeypatch) == 0
    made = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    slow_row, fast_row = made["rows"]
    assert (slow_row["arm"], slow_row["ratio"], slow_row["goodput"]["median"]) == ("slow", None, 0.0)
    assert fast_row["ratios"]["slow"] == {"median": 2.0, "low": 2.0, "high": 2.0, "num": 3}
    assert fast_row["tokens_per_second"]["median"] == 16.0
    assert (fast_row["first_token_ms"]["p50"], fast_row["event_gap_ms"]["p50"]) == (500.0, 500.0)
    assert fast_row["token_gap_ms"]["p99"] == 125.0
    assert (fast_row["goodput"]["median"], fast_row["kept"]) == (2.0, 1.0)
    assert fast_row["identical"] is None
    assert (fast_row["prompt_tokens"], fast_row["output_tokens"]) == (5.0, 8.0)
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "ratio to slow" in page
    assert "2.000 (≥ 2.000, ≤ 2.000)" in capsys.readouterr().out
    for picture in ("ratio.png", "first_token.png", "per_token.png"):
        assert picture in page
        assert (tmp_path / "out" / picture).stat().st_size > 1000


def test_a_tgi_server_in_open_loop_has_latency_by_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = foreign(tgi_answer([(0.25, 1), (0.5, 2)]))
    flags = ["--api", "tgi", "--rate", "2,8", "--duration", "5s", "--rounds", "2", "--out", str(tmp_path / "out")]
    assert benched(flags, {"tgi": script}, monkeypatch) == 0
    made = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row["load"] for row in made["rows"]] == ["2/s", "8/s"]
    for row in made["rows"]:
        assert row["first_token_ms"] == pytest.approx({"p50": 250.0, "p90": 250.0, "p99": 250.0})
        assert row["token_gap_ms"]["p50"] == pytest.approx(250.0)
        assert row["errors"] == {}
    assert 3 < made["rows"][1]["num_requests"] / made["rows"][0]["num_requests"] < 6
    assert (tmp_path / "out" / "first_token_by_rate.png").is_file()
    assert "late ms" in capsys.readouterr().out


def ours(path: str, body: Any) -> Reply:
    """A server of ours that answers at once with drafts and half as fast without."""
    if path == "/info":
        return Reply.json({"router": "spaceserve", "max_total_tokens": 256, "model_id": "m"})
    if path == "/metrics":
        return Reply([(0.0, b"spaceserve_draft_length_sum 6.0\nspaceserve_draft_length_count 2.0\n")])
    if path == "/load":
        return Reply.json({"num_queued": 0, "num_running": 0, "blocks_held": 0})
    if path == "/tokenize":
        return Reply.json({"tokens": list(range(100))})
    fast = body["speculation"] == "auto"
    steps = {"spaceserve": {"steps": 4, "drafted": 8, "tokens_per_step": 2.0 if fast else 1.0}}
    bursts = [(0.5, 2)] * 4 if fast else [(0.5, 1)] * 8
    return openai_answer(bursts, ids=True, usage={"prompt_tokens": 5, "completion_tokens": 8}, **steps)


def test_one_server_of_ours_is_paired_with_itself_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--concurrency", "1,2", "--rounds", "2", "--prompt-tokens", "7", "--out", str(tmp_path / "r.json")]
    assert benched(flags, {"ours": ours}, monkeypatch) == 0
    made = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [(row["num_streams"], row["arm"]) for row in made["rows"]] == [
        (1, "off"), (1, "auto"), (2, "off"), (2, "auto"),
    ]  # fmt: skip
    assert [row["tokens_per_second"]["median"] for row in made["rows"]] == [2.0, 4.0, 4.0, 8.0]
    assert made["rows"][1]["ratio"]["median"] == 2.0
    assert made["rows"][1]["tokens_per_step"]["median"] == 2.0
    assert made["rows"][1]["identical"] == "4/4"
    assert made["load"]["prompts_are"] == "token ids"
    assert "7 tokens, as token ids" in capsys.readouterr().out


def test_a_swing_is_reported_with_its_halves_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--swing", "1:3:4s", "--rounds", "2", "--out", str(tmp_path / "out")]
    assert benched(flags, {"ours": ours}, monkeypatch) == 0
    made = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    plain, fast = made["rows"]
    assert plain["phases"] == {}
    assert {half: ratio["num"] for half, ratio in fast["phases"]["off"].items()} == {"low": 2, "high": 2}
    assert 1.8 < fast["phases"]["off"]["high"]["median"] <= 2.2
    (timeline,) = made["moments"].values()
    assert [one["arm"] for one in timeline] == ["off", "auto"]
    assert len(timeline[1]["seconds"]) == 24
    said = capsys.readouterr().out
    assert "auto / off, high half:" in said
    assert "below off in" in said
    for picture in ("swing.png", "swing_ratio.png"):
        assert (tmp_path / "out" / picture).is_file()


def test_an_answer_longer_than_the_window_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benched(["--output-tokens", "uniform:1:256"], {"ours": ours}, monkeypatch) == 2
    assert "--output-tokens is up to 256; it must be below the model's window of 256" in capsys.readouterr().err


def test_one_server_is_measured_plain_twice_and_in_each_way_of_speculating() -> None:
    settings, _ = parse(["--url", "http://x", "--control", "--speculation", "auto,3"], "")
    info = Reply.json({"router": "spaceserve", "max_total_tokens": 64})

    async def run() -> list[Arm]:
        async with ScriptedServer(lambda path, body: info).serving() as server:
            return (await find_arms(settings, [Target("s", server.url)]))[0]

    made = jumping(run())
    assert [(arm.name, arm.speculation) for arm in made] == [
        ("off", "off"), ("off again", "off"), ("auto", "auto"), ("k 3", 3),
    ]  # fmt: skip
    assert [arm.is_baseline for arm in made] == [True, False, False, False]


LABEL = label(NAMED_CHANCES[0.78])


def info(*chances: float) -> dict[str, Any]:
    return {"model_id": "m", "synthetic_acceptance": list(chances) or None}


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ({"server": info()}, ""),
        ({"server": {"model_id": "somebody else's server"}}, ""),
        ({"server": info(*NAMED_CHANCES[0.78])}, LABEL),
        ({"a": info(), "b": info(*NAMED_CHANCES[0.78])}, f"b: {LABEL}"),
    ],
)
def test_what_servers_say_of_their_drafts_becomes_a_label(infos: dict[str, dict[str, Any]], said: str) -> None:
    assert synthetic_acceptance_label(infos) == said


@pytest.mark.parametrize(("said", "title"), [("", "# Load\n"), (LABEL, f"# Load, {LABEL}\n")])
def test_the_label_is_in_the_title_of_the_page(said: str, title: str) -> None:
    assert markdown({"facts": {"synthetic_acceptance": said}, "load": {}}, []).startswith(title)


WATTS = 40


def test_power_is_that_between_the_first_and_the_last_movement_of_the_counter() -> None:
    meter = PowerMeter()
    for seconds, joules in ((0, 7), (1, 7), (2, 30), (3, 30), (4, 130), (6, 230), (9, 230)):
        meter.add(seconds, joules)
    assert meter.watts == (230 - 30) / (6 - 2)


@pytest.mark.parametrize("joules", [(), (5, 5, 5), (5, 6), (5, 6, 7)])
def test_a_counter_that_hardly_moved_tells_nothing(joules: Sequence[float]) -> None:
    meter = PowerMeter()
    for seconds, value in enumerate(joules):
        meter.add(seconds, value)
    assert meter.watts is None


def test_devices_are_added_and_a_server_without_a_sensor_has_no_figure() -> None:
    head = "# HELP spaceserve_energy_joules_total Energy drawn, by device\n"
    reported = (
        'spaceserve_energy_joules_total{device="gpu-0"} 2.5\nspaceserve_energy_joules_total{device="package-0"} 1.5\n'
    )
    assert energy_figure(head + reported) == 4.0
    assert energy_figure(head) is None


def a_metered_round(arm: str, num_tokens: int, watts: float | None) -> Round:
    piece = TokenEvent(1.0, num_tokens, tuple(range(num_tokens)))
    return Round(arm, 2.0, [Exchange(events=[piece], seconds=1.0, finished=True)], {}, watts=watts)


def made(carbon_intensity: float | None, watts: float | None = 36.0) -> list[ArmSummary]:
    rounds = [[a_metered_round("off", 10, watts), a_metered_round("auto", 20, watts)]]
    arms = [Arm(name, Endpoint("h", 1), APIS["openai"]) for name in ("off", "auto")]
    return summaries(Closed(1), rounds, arms, grams=carbon_intensity)


def test_joules_per_token_stand_for_each_arm_and_grams_follow_the_grid() -> None:
    off, auto = made(500.0)
    assert off.joules_per_token is not None
    assert auto.joules_per_token is not None
    assert (off.joules_per_token.median, auto.joules_per_token.median) == (7.2, 3.6)
    assert auto.grams_per_million_tokens is not None
    assert auto.grams_per_million_tokens.median == 500.0  # 3.6 J for a million tokens is 1 kWh
    assert "g CO2e/M tokens" in table([off, auto])


def test_without_a_carbon_intensity_there_are_joules_and_no_grams() -> None:
    shown = table(made(None))
    assert "J/token" in shown
    assert "CO2e" not in shown


def test_without_a_sensor_there_is_neither() -> None:
    head = table(made(500.0, watts=None)).splitlines()[0]
    assert "J/token" not in head
    assert "CO2e" not in head


@pytest.mark.parametrize("text", ["-1", "much", "nan", "10001"])
def test_a_carbon_intensity_that_is_none_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--carbon-intensity", text], "")
    assert "must be grams of CO2e per kWh, from 0 to 10000" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.e2e
def test_a_real_server_with_a_counter_of_ours_is_measured_with_and_without_drafts(tmp_path: Path) -> None:
    zone, over, begun = tmp_path / "powercap" / "intel-rapl:0", threading.Event(), time.monotonic()
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")

    def count() -> None:
        while True:
            (zone / "fresh").write_text(f"{int((time.monotonic() - begun) * WATTS * 1e6)}\n")
            (zone / "fresh").replace(zone / "energy_uj")
            if over.wait(0.05):
                return

    thread = threading.Thread(target=count)
    thread.start()
    try:
        out = tmp_path / "bench.json"
        with ServerProcess(["--model", "demo", "--num-threads", "1", "--powercap", str(zone.parent)]) as server:
            flags = ["--url", server.url, "--concurrency", "2", "--rounds", "1", "--duration", "4s"]
            assert bench.main([*flags, "--carbon-intensity", "400", "--out", str(out)]) == 0
    finally:
        over.set()
        thread.join()
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["load"]["carbon_intensity"] == 400
    assert [row["arm"] for row in record["rows"]] == ["off", "auto"]
    for row in record["rows"]:
        assert row["watts"]["median"] == pytest.approx(WATTS, rel=0.25)
        joules = row["watts"]["median"] / row["tokens_per_second"]["median"]
        assert row["joules_per_token"]["median"] == pytest.approx(joules, rel=0.01)
        assert row["grams_per_million_tokens"]["median"] == pytest.approx(joules * 1e6 / 3.6e6 * 400, rel=0.01)
