"""Sizing: a router's own time bounds what its workers bring, fleets are cells, and the page says what is found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from space_eval import sizing
from space_eval.bench_limits import Limits
from space_eval.load_lengths import Lengths
from space_eval.simulate_load import Poisson, Streams, Work
from space_eval.simulate_machine import MEASURED, PRESETS, Ridge, named
from space_eval.simulate_router import NOTHING, RouterCost
from space_eval.simulate_run import Scenario, Simulation
from space_eval.simulate_text import Acceptance
from space_eval.simulate_worker import WorkerSettings
from space_eval.sizing_fleet import MARGIN, Cells, fleets
from space_eval.sizing_node import NODES, pages
from space_eval.sizing_report import facts, row, table
from space_server.step_cost import read_points

PAGE = Path(__file__).parents[2] / "docker" / "SIZING.md"
COMMAND = re.compile(r"^\.venv/bin/spaceserve bench sizing --node (\S+)$", flags=re.MULTILINE)

TOLERANCE = 0.1
"""Of a figure on the page: the controller may become better without a new page for each step of it."""


def scenario(**changes: object) -> Scenario:
    """Rows are free, a step takes 5 ms, drafts never come true: two at a time bring 400 tokens a second."""
    work = Work(Poisson(1.0), prompt_tokens=Lengths.parse("8"), output_tokens=Lengths.parse("10"))
    made = Scenario(
        Ridge(0.005, 0.0),
        Acceptance((0.0,)),
        work,
        1.0,
        worker=WorkerSettings("off", max_sequences=2),
        limits=Limits.parse("ttft=100ms"),
        cost_error=None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


BUSY = scenario(router=RouterCost(0.0, 0.0012))


def quiet(line: str) -> None:
    pass


# ------------------------------------------------------------------------------------------------ the router's time


@pytest.mark.parametrize(
    ("cost", "most"), [(RouterCost(0.0, 0.005), 200), (RouterCost(0.1, 0.0), 100), (RouterCost(0.05, 0.005), 100)]
)
def test_a_router_that_works_all_the_time_bounds_its_workers(cost: RouterCost, most: float) -> None:
    work = replace(scenario().work, arrivals=Streams(16))
    simulation = Simulation(scenario(work=work, router=cost, num_workers=4, seconds=12.0))
    figures = simulation.run()
    simulation.check()
    assert 0.8 * most < figures.tokens_per_second < 1.01 * most  # what is under way at the end has not come yet
    assert figures.router_busy > 0.9
    assert figures.busy < 0.5


def test_a_router_without_a_cost_adds_nothing_and_a_little_one_is_in_every_first_token() -> None:
    fast, slow = (scenario(work=replace(scenario().work, arrivals=Poisson(5.0)), link=0.0, router=router, seconds=4.0)
                  for router in (NOTHING, RouterCost(0.02, 0.001)))  # fmt: skip
    before, after = Simulation(fast).run(), Simulation(slow).run()
    assert before.router_busy == 0.0
    assert before.latencies["ttft"]["p50"] == pytest.approx(0.005)
    assert after.latencies["ttft"]["p50"] == pytest.approx(0.005 + 0.02 + 0.001)
    assert after.num_tokens == pytest.approx(before.num_tokens, rel=0.02)
    assert after.router_busy == pytest.approx((0.02 * after.num_requests + 0.001 * after.num_pieces) / 4.0, rel=0.03)


def test_bytes_of_messages_are_counted_as_they_are_encoded() -> None:
    found = [Simulation(scenario(work=replace(scenario().work, arrivals=Streams(n)))).run() for n in (1, 2)]
    one, two = (figures.link_bytes_per_token for figures in found)
    assert 10 < two < one < 200  # two sequences share what a report has beside them


@pytest.mark.parametrize("text", ["3ms", "3ms,", "75us,x", "3ms,75us,1s", ""])
def test_a_cost_that_cannot_be_read_says_its_form(text: str) -> None:
    with pytest.raises(ValueError, match="3ms,75us"):
        RouterCost.parse(text)


# -------------------------------------------------------------------------------------------------------- fleets


def test_a_router_gets_as_many_workers_as_its_time_allows() -> None:
    """What a worker brings takes a fifth of the router's time, and so much more: four fit, or three where arrivals are
    uneven, and never five.
    """
    cells = Cells(BUSY, 0.95, quiet)
    assert cells.largest(16).num_workers in (3, 4)
    assert cells.largest(1).num_workers == 1
    assert cells.of(5) is None


def test_a_router_that_cannot_carry_one_worker_has_one_and_slows_it() -> None:
    slow = scenario(router=RouterCost(0.0, 0.01))  # 100 tokens a second
    cell = Cells(slow, 0.95, quiet).largest(16)
    assert cell.num_workers == 1
    assert cell.rate < 10.0
    assert cell.figures.kept_late >= 0.95


def test_a_fleet_is_so_many_cells() -> None:
    one, six, many = fleets(BUSY, 0.95, 1, (1, 6, 102), quiet)
    assert [fleet.num_workers for fleet in (one, six, many)] == [1, 6, 102]
    assert (one.num_routers, six.num_routers) == (1, 2)
    assert many.num_routers in (26, 34)
    assert many.rate == pytest.approx(102 * one.rate)
    assert row(six)["tokens/s"] == pytest.approx(2 * six.cell.figures.tokens_per_second)
    assert len(table([one, six, many]).splitlines()) == 5


def test_where_nothing_keeps_the_limits_there_is_no_fleet() -> None:
    with pytest.raises(ValueError, match="--slo"):
        fleets(scenario(limits=Limits.parse("ttft=1ms"), seconds=0.1), 0.95, 1, (1,), quiet)


def test_workers_of_a_fleet_have_room_left() -> None:
    cells = Cells(scenario(), 0.95, quiet)
    cell = cells.of(1)
    assert cell is not None
    assert cell.rate == MARGIN * cells.rate_of_one


# ---------------------------------------------------------------------------------------------------------- nodes


def test_pages_are_what_the_weights_leave_of_the_memory() -> None:
    made = pages(80e9, PRESETS["h100-8b"])
    assert made * 16 * 2 * 32 * 8 * 128 * 2 == pytest.approx(0.9 * 80e9 - 2 * 8.03e9, rel=1e-4)


@pytest.mark.parametrize("name", ["cpu-embedded", "cpu-125m"])
def test_a_measured_machine_takes_as_long_as_its_points_say(name: str) -> None:
    """To a quarter: the parts of the cost are few."""
    points = read_points(json.loads((files("space_eval") / "machines" / MEASURED[name][0]).read_text()))
    machine = named(name)
    assert len(points) >= 4
    errors = sorted(abs(machine.seconds(shape) / seconds - 1) for shape, seconds in points)
    assert errors[len(errors) * 9 // 10 - 1] < 0.25


# --------------------------------------------------------------------------------------------- command and page

SMALL = ["--node", "cpu-embedded", "--nodes", "1,2", "--max-sequences", "2", "--speculation", "off",
         "--duration", "100ms"]  # fmt: skip


def test_the_command_says_what_it_simulated_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sizing.main([*SMALL, "--output-tokens", "4", "--prompt-tokens", "8", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("SIMULATED")
    record = json.loads((tmp_path / "cpu-embedded.json").read_text())
    assert [fleet["workers"] for fleet in record["fleets"]] == [1, 2]
    assert [round(cells[3]) for cells in _rows(said)] == [round(fleet["requests/s"]) for fleet in record["fleets"]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--nodes", "0"], "--nodes"), (["--speculation", "auto,off"], "one way"), (["--node", "x"], "h200")],
)
def test_flags_that_cannot_be_read_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sizing.main(flags)
    assert said in capsys.readouterr().err


def test_the_page_says_of_each_node_what_its_figures_follow_from() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert COMMAND.findall(text) == list(NODES)
    for node in NODES.values():
        for line in facts(node, node.scenario(sizing.ROUTER, 1), 0.95).values():
            assert line in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NODES)
def test_the_page_has_the_figures_that_the_command_finds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sizing.main(["--node", name]) == 0
    found = _rows(capsys.readouterr().out)
    written = _rows(text[text.index(f"bench sizing --node {name}\n") :])
    assert len(found) == 3
    for ours, theirs in zip(found, written[:3], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def _rows(text: str) -> list[list[float]]:
    """The figures of tables of fleets; seconds in ms."""
    units = {"s": 1000.0, "%": 0.01}
    found = []
    for line in re.findall(r"^\| \d.*\|$", text, flags=re.MULTILINE):
        cells = [re.fullmatch(r"([\d.,]+) ?(ms|s|%)?", cell.strip()) for cell in line.strip("|").split("|")]
        found.append([float(cell[1].replace(",", "")) * units.get(cell[2] or "", 1.0) for cell in cells if cell])
    return found
