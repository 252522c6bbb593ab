"""Energy in the load benchmark: told where it was counted, and nothing where it was not."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from space_eval.bench import command as bench
from space_eval.bench.arms import APIS, Arm, Exchange, TokenEvent
from space_eval.bench.client import Endpoint
from space_eval.bench.options import parse
from space_eval.bench.polling import PowerMeter, energy_figure
from space_eval.bench.report import ArmSummary, summaries, table
from space_eval.bench.rounds import Round
from space_eval.bench.server_process import ServerProcess
from space_eval.bench.workload import Closed

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
