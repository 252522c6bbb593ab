"""`spaceserve bench` on scripted servers, under a clock that jumps: what it writes and what it refuses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from doubles.scripted_http import Reply, ScriptedServer, jumping, openai_answer, tgi_answer
from space_common.worker_settings import NAMED_CHANCES
from space_eval.bench import command as bench
from space_eval.bench.arms import APIS, Arm, Exchange, TokenEvent
from space_eval.bench.client import Endpoint, PowerMeter, energy_figure
from space_eval.bench.command import Target, find_arms
from space_eval.bench.options import parse
from space_eval.bench.report import ArmSummary, markdown, summaries, synthetic_acceptance_label, table
from space_eval.bench.rounds import Round
from space_eval.bench.server_process import ServerProcess
from space_eval.bench.workload import Closed
from space_server.speculation.synthetic_acceptance import label


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
    """A server that is not ours."""

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
    told = (
        'spaceserve_energy_joules_total{device="gpu-0"} 2.5\nspaceserve_energy_joules_total{device="package-0"} 1.5\n'
    )
    assert energy_figure(head + told) == 4.0
    assert energy_figure(head) is None


def a_round(arm: str, num_tokens: int, watts: float | None) -> Round:
    piece = TokenEvent(1.0, num_tokens, tuple(range(num_tokens)))
    return Round(arm, 2.0, [Exchange(events=[piece], seconds=1.0, finished=True)], {}, watts=watts)


def made(carbon_intensity: float | None, watts: float | None = 36.0) -> list[ArmSummary]:
    rounds = [[a_round("off", 10, watts), a_round("auto", 20, watts)]]
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
