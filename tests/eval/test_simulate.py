"""The simulator: the real router and worker in virtual time lose nothing, and repeat themselves."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from space_eval import simulate
from space_eval.bench_limits import Limits
from space_eval.load_lengths import Lengths
from space_eval.simulate_figures import percentiles
from space_eval.simulate_load import AsRecorded, OnOff, Poisson, Prefixes, Shares, Streams, Work
from space_eval.simulate_machine import PRESETS, Known, Ridge, estimate
from space_eval.simulate_plan import PRECISION, fewest_workers, highest_rate
from space_eval.simulate_run import Scenario, Simulation
from space_eval.simulate_text import EOS, Acceptance, Library, prefix_ids, prompt_ids
from space_eval.simulate_worker import WorkerSettings
from space_server.step_cost import StepShape

HALF = Acceptance((0.5,) * 5)
FLAT = Ridge(0.005, 0.0)  # rows are free


def lengths(text: str) -> Lengths:
    return Lengths.parse(text)


def scenario(rate: float = 40.0, seconds: float = 1.0, **changes: object) -> Scenario:
    work = Work(Poisson(rate), prompt_tokens=lengths("uniform:4:64"), output_tokens=lengths("uniform:1:32"))
    made = Scenario(FLAT, HALF, work, seconds, cost_error=None)
    return replace(made, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ nothing is lost


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_and_every_page_comes_back(seed: int) -> None:
    source = random.Random(seed)
    work = Work(
        OnOff(source.choice([60.0, 120.0]), 0.3, 0.2),
        prompt_tokens=lengths("uniform:4:90"),
        output_tokens=lengths("uniform:1:40"),
        max_tokens=source.choice([None, 64]),
        prefixes=source.choice([None, Prefixes(3, 40, 0.7)]),
        keys=Shares(("a", "b"), (3.0, 1.0)),
        priorities=Shares(("0", "1"), (1.0, 1.0)),
        choices=Shares(("1", "3"), (3.0, 1.0)),
        cancelled=0.2,
        seed=seed,
    )
    deaths = ((0.4, 0, 0.1), (0.6, 1, 0.05)) if seed % 2 else ()
    blocks = source.choice([24, 200])  # 24: too few for all that run, so that some are preempted
    simulation = Simulation(
        scenario(
            work=work,
            num_workers=2,
            worker=WorkerSettings(num_blocks=blocks, max_sequences=8, speculation=source.choice(["auto", "off", 3])),
            deaths=deaths,
            link=source.choice([0.0, 0.0002, 0.02]),
            max_prefill_rows=32,
            seed=seed,
        )
    )
    figures = simulation.run()
    simulation.check()
    assert set(figures.outcomes) <= {"finished", "left", "refused"}
    assert figures.outcomes["finished"] > 10
    assert figures.outcomes["left"] > 0


def test_where_pages_are_few_requests_are_preempted_and_still_whole() -> None:
    work = Work(Streams(6), prompt_tokens=lengths("30"), output_tokens=lengths("60"))
    simulation = Simulation(scenario(work=work, worker=WorkerSettings(num_blocks=14, max_sequences=6)))
    figures = simulation.run()
    simulation.check()
    assert figures.num_preemptions > 0
    assert figures.outcomes["finished"] > 6


def test_a_queue_that_is_full_refuses() -> None:
    simulation = Simulation(scenario(rate=400.0, max_queue=4, worker=WorkerSettings(max_sequences=2)))
    figures = simulation.run()
    simulation.check()
    assert figures.outcomes["refused"] > 0
    assert figures.num_requests == sum(figures.outcomes.values())


# ---------------------------------------------------------------------------------------------------- repeatable


def test_a_run_repeats_itself_and_another_seed_is_another_run() -> None:
    def told(seed: int) -> object:
        made = Simulation(scenario(jitter=0.1, seed=seed, work=replace(scenario().work, seed=seed))).run().as_json()
        return {name: value for name, value in made.items() if name not in ("wall_seconds", "cpu_seconds")}

    assert json.dumps(told(1)) == json.dumps(told(1)) != json.dumps(told(2))


def test_arms_are_asked_the_same_and_get_the_same_number_of_tokens() -> None:
    runs = [Simulation(scenario().arm(arm)) for arm in ("off", "auto", 2)]
    tokens = [sum(visit.num_tokens for visit in run.ended) for run in runs if run.run()]
    asked = [sorted((visit.ask.number, visit.ask.arrives, visit.begun) for visit in run.ended) for run in runs]
    assert tokens[0] == tokens[1] == tokens[2] > 0
    assert asked[0] == asked[1] == asked[2]


# ------------------------------------------------------------------------------------------------ drafts and time


@pytest.mark.parametrize(("k", "expected"), [(1, 1.5), (2, 1.75), (3, 1.875)])
def test_drafts_bring_what_their_chances_say(k: int, expected: float) -> None:
    """SPACE §5: E = sum of A_j, with all groups laid out."""
    work = Work(Streams(4), prompt_tokens=lengths("16"), output_tokens=lengths("400"))
    figures = Simulation(scenario(seconds=6.0, work=work).arm(k)).run()
    assert figures.tokens_per_step == pytest.approx(expected, rel=0.03)
    assert figures.draft_length == pytest.approx(k, rel=0.03)


def test_time_is_the_machines_plain_decoding_takes_a_step_a_token() -> None:
    work = Work(Streams(1), prompt_tokens=lengths("8"), output_tokens=lengths("51"))
    figures = Simulation(scenario(link=0.001, work=work).arm("off")).run()
    assert figures.latencies["ttft"]["p50"] == pytest.approx(0.005 + 2 * 0.001)
    assert figures.latencies["itl"]["max"] == pytest.approx(0.005)
    assert figures.latencies["e2e"]["p50"] == pytest.approx(51 * 0.005 + 2 * 0.001)
    assert figures.busy > 0.9


def test_a_draft_comes_true_by_text_and_position_alone() -> None:
    library = Library(HALF, seed=3)
    text = library.write(seed=7, choice=0, length=100)
    together = [library.num_true(text, position, 1, 5) for position in range(200)]
    alone = [library.num_true(text, position, 1, 1) for position in range(200)]
    assert [min(1, number) for number in together] == alone
    assert sum(alone) == pytest.approx(100, abs=25)


def test_a_text_ends_with_the_end() -> None:
    library = Library(HALF, seed=3)
    text = library.write(seed=7, choice=0, length=4)
    assert EOS not in library.ids(text, 0, 3)
    assert library.ids(text, 2, 6)[1] == EOS


def test_prompts_differ_and_prefixes_are_shared() -> None:
    prefix = prefix_ids(1, 16)
    one, other = prompt_ids(1, 24, prefix), prompt_ids(2, 24, prefix)
    assert len(one) == 24
    assert one[:16] == other[:16] == prefix
    assert not set(one[16:]) & set(other[16:])
    assert not set(prefix) & set(prefix_ids(2, 16))


def test_a_shared_prefix_is_computed_once() -> None:
    work = Work(Poisson(40.0), lengths("16"), lengths("8"), prefixes=Prefixes(1, 160))
    assert Simulation(scenario(work=work)).run().prompt_cached == pytest.approx(160 / 176, abs=0.05)


def test_a_worker_that_dies_costs_time_and_no_token() -> None:
    calm, stormy = Simulation(scenario(seconds=0.5)), Simulation(scenario(seconds=0.5, deaths=((0.2, 0, 0.3),)))
    assert calm.run().outcomes == stormy.run().outcomes
    stormy.check()
    assert stormy.figures().latencies["e2e"]["max"] > 0.3 > calm.figures().latencies["e2e"]["max"]


# ----------------------------------------------------------------------------------------------------- the machine


def test_the_roofline_is_that_of_the_reference() -> None:
    h200 = PRESETS["h200-8b"]
    assert h200.seconds(StepShape.plain(1)) == pytest.approx(0.5e-3 + 16.06e9 / (0.8 * 4.8e12))
    assert h200.seconds(StepShape(64, 64, 2240)) == pytest.approx(0.5e-3 + 2 * 8.03e9 * 2304 / (0.65 * 989e12))
    ridge = next(rows for rows in range(1, 999) if h200.seconds(StepShape(1, rows)) > h200.seconds(StepShape.plain(1)))
    assert ridge == pytest.approx(206 * 0.65 / 0.8, abs=2)  # SPACE §5: 206 at the data sheet's peak


def test_below_its_ridge_a_machine_has_rows_for_nothing() -> None:
    machine = Ridge(0.005, 0.001, 8)
    assert machine.seconds(StepShape(1, 3, 5)) == 0.005
    assert machine.seconds(StepShape(1, 3, 7)) == pytest.approx(0.007)


def test_a_worker_knows_its_machine_as_well_as_it_is_told() -> None:
    machine = Ridge(0.005, 0.0001, 16)
    shapes = [StepShape.plain(n, 64 * n) for n in (1, 8, 32)]

    def error(shape: StepShape, share: float) -> float:
        return abs(estimate(machine, share, 1).seconds(shape) / machine.seconds(shape) - 1)

    assert all(Known(machine).seconds(shape) == machine.seconds(shape) for shape in shapes)
    assert max(error(shape, 0.0) for shape in shapes) < 0.02
    assert 0.02 < max(error(shape, 0.3) for shape in shapes) < 0.35


def test_what_one_worker_learns_no_other_knows() -> None:
    one, other = estimate(FLAT, 0.0, 1), estimate(FLAT, 0.0, 1)
    before = other.seconds(StepShape.plain(1))
    one.learn(StepShape.plain(1), 0.05)
    assert one.seconds(StepShape.plain(1)) > before == other.seconds(StepShape.plain(1))


# -------------------------------------------------------------------------------------------------------- the load


def test_arrivals_come_as_often_as_they_are_told_to() -> None:
    times = Poisson(50.0).times(random.Random(1))
    assert [next(times) for _ in range(2000)][-1] == pytest.approx(40.0, rel=0.1)
    times = OnOff(50.0, 1.0, 3.0).times(random.Random(1))
    busy = [next(times) for _ in range(400)]
    assert busy == sorted(busy)
    assert all(time % 4.0 < 1.0 for time in busy)
    recorded = AsRecorded((5.0, 6.0, 8.0)).times(random.Random(1))
    assert [next(recorded) for _ in range(5)] == pytest.approx([0.0, 1.0, 3.0, 4.5, 5.5])


def test_a_swing_has_its_low_half_first_and_cuts_off_what_is_too_many() -> None:
    work = Work(Streams(6, 1, 0.25), prompt_tokens=lengths("8"), output_tokens=lengths("500"))
    figures = Simulation(scenario(work=work)).run()
    running = [round(moment.running) for moment in figures.moments]
    assert running[15] == running[75] == 1
    assert running[45] == running[105] == 6
    assert figures.outcomes["cut"] >= 6


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles([0.1 * n for n in range(1, 101)])
    assert (found["p50"], found["p99"], found["max"]) == pytest.approx((5.0, 9.9, 10.0))


# ----------------------------------------------------------------------------------------------------- capacity


def planned(seconds: float = 1.0) -> Scenario:
    """Two at a time, 10 steps of 5 ms each: 40 a second at the very most."""
    work = Work(Poisson(1.0), prompt_tokens=lengths("8"), output_tokens=lengths("10"))
    limits = Limits.parse("ttft=100ms")
    return scenario(seconds=seconds, work=work, worker=WorkerSettings("off", max_sequences=2), limits=limits)


def test_the_rate_that_is_found_is_held_and_lies_below_what_can_be() -> None:
    said: list[str] = []
    rate, figures = highest_rate(planned(), 0.95, said.append)
    assert figures is not None
    assert figures.kept_late >= 0.95
    assert 12 < rate < 45
    failed = [float(line.split()[1][:-3]) for line in said if float(line.split()[2][:-1]) < 95]
    assert min(failed) <= rate * (1 + PRECISION) * 1.01


def test_a_limit_that_nothing_keeps_is_held_at_no_rate() -> None:
    work = replace(planned().work, output_tokens=lengths("1"))
    hopeless = replace(planned(0.1), work=work, limits=Limits.parse("ttft=1ms"))
    assert highest_rate(hopeless, 0.95, lambda line: None) == (0.0, None)


def test_workers_are_tried_and_not_only_divided() -> None:
    number, figures = fewest_workers(planned(), 0.95, 60.0, 20.0, lambda line: None)
    assert number in (2, 3)
    assert figures is not None
    assert figures.num_workers == number


# ------------------------------------------------------------------------------------------------ the command


QUICK = ["--step-ms", "5,0.05,16", "--rate", "20", "--duration", "500ms", "--cost-error", "exact"]


def test_the_command_writes_a_table_a_record_and_figures_that_say_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main([*QUICK, "--speculation", "off,auto,2", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "simulate.json").read_text())
    report = (tmp_path / "simulate.md").read_text()
    assert [run["arm"] for run in record["runs"]] == ["off", "auto", "2"]
    assert record["facts"]["what"].startswith("SIMULATED")
    assert len(record["runs"][0]["moments"]) == 120
    assert report.startswith("# SIMULATED")
    assert capsys.readouterr().out.startswith("SIMULATED")
    for name in ("tokens", "drafts", "rows", "queue", "pages", "running"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"]({name}.png)" in report


def test_the_command_plans_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", "--slo", "ttft=200ms,itl=50ms", "--speculation", "off", "--prompt-tokens", "8"]
    flags += ["--output-tokens", "2", "--max-sequences", "1", "--out", str(tmp_path)]
    assert (
        simulate.main(["--step-ms", "20,0", "--rate", "50", "--duration", "1s", "--cost-error", "exact", *flags]) == 0
    )
    record = json.loads((tmp_path / "simulate.json").read_text())
    [found] = record["capacity"]
    assert 10 < found["rate"] < 25
    assert found["num_workers"] >= 1
    assert "workers for 50/s" in capsys.readouterr().out


def test_a_trace_gives_lengths_and_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"prompt_tokens": 9, "output_tokens": {n}, "arrival": {n / 10}}}\n' for n in (1, 2, 4)))
    assert simulate.main([*QUICK[:2], "--duration", "300ms", "--cost-error", "exact", "--trace", str(trace)]) == 0
    assert "3 arrivals of a file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan"], "--slo"),
        (["--plan", "--slo", "ttft=1s", "--streams", "4"], "--streams"),
        (["--machine", "abacus"], "h200-8b"),
        (["--machine", "/nowhere/points.json"], "step-cost-"),
        (["--on-off", "1s:1s", "--streams", "4"], "--on-off"),
        (["--num-blocks", "8"], "--num-blocks"),
    ],
)
def test_flags_that_make_no_sense_together_are_refused_in_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculation", "fast"],
        ["--speculation", "off,off"],
        ["--step-ms", "5"],
        ["--swing", "5"],
        ["--slo", "ttft"],
        ["--acceptance", "1.5"],
        ["--cost-error", "2"],
        ["--prefixes", "8"],
        ["--choices", "0"],
    ],
)
def test_flags_that_cannot_be_read_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulate.main(flags)
    assert flags[0] in capsys.readouterr().err
