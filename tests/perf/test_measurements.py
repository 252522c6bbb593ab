"""The harness of the measurements, and each of them at a small size."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest
from doubles.worker import ScriptedModel
from overhead_arms import arms, full
from space_common.worker.settings import parse_chances
from space_eval.bench.command import MOVED
from space_eval.bench.command import main as bench
from space_kernels.build import cpu_library
from space_model.loading.load import load_model
from space_model.make_model import Size, random_llama
from space_model.networks.sampled_step import SampledStep
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.grpc_server import RouterSession
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_train.estimate import SHAPES

from perf import edge, matmul, overhead, sampling, scheduler
from perf.edge import ROUTERS_SHARE, Held, MemoryWatch, Visit, confined, installed, problems
from perf.harness import MEASUREMENTS, PerfError, Report, main, parser, table, take_turns, without_tails
from perf.host_time import PARTS, Cell, run_cell
from perf.memory import DRAFT_MODELS, Serving, adapter, check, side, sides_table, slot
from perf.overhead import Bench, Load, PassCost, Row, RowCurve, Subject, Turn, crossing, row
from perf.scheduler import Cost, measure


def test_every_other_round_is_in_reverse_order() -> None:
    turns: list[tuple[str, int]] = []
    take_turns(["a", "b", "c"], 3, lambda arm, number: turns.append((arm, number)))
    assert turns == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_no_round_begins_after_the_time_is_over_but_the_first() -> None:
    now = iter([0.0, 4.0, 11.0])
    turns: list[int] = []
    take_turns(["a"], 9, lambda arm, number: turns.append(number), seconds=10.0, clock=lambda: next(now))
    assert turns == [0, 1]


def test_a_spread_is_the_median_and_the_range_of_80_percent() -> None:
    spread = without_tails([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0])
    assert (spread.median, spread.low, spread.high) == (5.5, 1.0, 9.0)
    assert spread.shown(1) == "5.5 (1.0–9.0)"


def test_a_table_shows_a_missing_number_as_a_dash() -> None:
    assert table(("a", "b"), [(1, f"{float('nan'):.2f}"), ("x|y", 2)]).splitlines() == [
        "| a | b |", "|---|---|", "| 1 | – |", "| x/y | 2 |",
    ]  # fmt: skip


def test_a_report_has_machine_and_commit_in_both_files_and_names_what_is_wrong(tmp_path: Path) -> None:
    made = Report("Title", "How to read it.", ["| a |\n|---|\n"], {"rows": [1]}, {"load": "x"}, ["A text differs."])
    made.write(tmp_path, "name")
    lines = (tmp_path / "name.md").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[2:5]] == ["machine", "commit", "load"]
    assert lines[-1] == "WRONG: A text differs."
    record = json.loads((tmp_path / "name.json").read_text())
    assert record["facts"].keys() == {"machine", "commit", "load"}
    assert (record["rows"], record["failures"]) == ([1], ["A text differs."])


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_flags_and_runs(name: str) -> None:
    options = parser([name]).parse_args([name])
    assert callable(options.run)
    assert options.out is None


def test_removed_benchmarks_name_their_measurement_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    named = [found[1] for line in MOVED.values() if (found := re.search(r"tests/perf ([a-z-]+)`", line))]
    never_of_bench = {"kv-offload", "loading", "perplexity", "positions", "sampling", "sources"}
    assert {*named} | never_of_bench == set(MEASUREMENTS)
    assert bench(["product", "--rows", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spaceserve bench product was removed; in a checkout, `.venv/bin/python tests/perf matmul`")


def test_accepted_drafts_are_shown_by_position_and_kind_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(temperature: float, drafts: int, tokens: float, *accepted: float) -> dict[str, object]:
        measured = {"temperature": temperature, "max_drafts": drafts, "tokens_per_step": tokens}
        return {**measured, "accepted_by_position": accepted}

    runs = {
        "code": [row(0, 0, 1.0), row(0, 1, 1.8, 0.8), row(0, 2, 2.5, 0.8, 0.7), row(0.7, 2, 2.0, 0.6, 0.4)],
        "chat": [row(0, 3, 2.75, 0.75, 0.625, 0.375)],
    }
    for name, rows in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "acceptance.json").write_text(json.dumps({"rows": rows}))
    folders, picture = [str(tmp_path / name) for name in runs], tmp_path / "positions.png"
    assert main(["positions", *folders, "--picture", str(picture)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("| c")] == [
        "| chat | 0 | 2.75 | 0.75 | 0.62 | 0.38 |",
        "| code | 0 | 2.50 | 0.80 | 0.70 | – |",
        "| code | 0.7 | 2.00 | 0.60 | 0.40 | – |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "code" / "acceptance.json").write_text('{"rows": []}')
    for wrong in ([], [str(tmp_path)], folders):
        assert main(["positions", *wrong]) == 2
        assert capsys.readouterr().err.startswith("positions: ")


def test_all_ways_of_drafting_answer_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sources", "--max-tokens", "8"]) == 2
    assert "Give --prompts" in capsys.readouterr().err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n", encoding="utf-8")
    words = ["--prompts", str(prompts), "--max-tokens", "24", "--calibration-seconds", "0"]
    assert main(["sources", *words, "--out", str(tmp_path), "--", "--num-threads", "1"]) == 0
    record = json.loads((tmp_path / "sources.json").read_text(encoding="utf-8"))
    assert record["passed"]
    none, lookup, masks, joined = record["ways"]
    assert none["tokens_per_step"] == 1.0
    assert none["num_tokens"] == lookup["num_tokens"] == masks["num_tokens"] == joined["num_tokens"] > 0
    assert masks["drafted"]["masks"] >= masks["accepted"]["masks"] > 0
    assert not lookup["drafted"].get("masks")
    assert not masks["drafted"].get("lookup")


@dataclass(frozen=True)
class Ran:
    """The program, run in a folder of its own, to which it also wrote."""

    folder: Path
    result: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def host_time(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("host_time")
    words = ["host-time", "--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1", "--out", str(folder)]
    command = [sys.executable, str(Path(__file__).parent), *words]
    return Ran(folder, subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False))


def test_the_folder_is_a_program_from_any_working_folder(host_time: Ran) -> None:
    ran = host_time.result
    assert ran.returncode == 0, ran.stderr
    assert "| 1 |" in ran.stdout
    assert (host_time.folder / "host-time.md").read_text(encoding="utf-8") == ran.stdout


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="affinity, RLIMIT_DATA and /proc")

MIB = 1024**2
VISIT = Visit(
    "5", 3.0, Held(60 * MIB, MIB), Held(400 * MIB, MIB), Held(500 * MIB, 90 * MIB), 99, 2.0, 512, 300, 90, 4, 4
)


@linux_only
def test_what_is_started_inside_the_block_is_confined_and_nothing_else() -> None:
    cores, limit = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)
    core = max(cores)
    script = "import os, resource; print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)[0])"
    with confined(core, 512 * MIB):
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{{{core}}} {512 * MIB}"
    assert (os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)) == (cores, limit)


@linux_only
def test_data_beyond_the_limit_is_refused_by_the_system() -> None:
    with confined(min(os.sched_getaffinity(0)), 256 * MIB):
        run = subprocess.run([sys.executable, "-c", "bytearray(300 << 20)"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "MemoryError" in run.stderr


@linux_only
def test_the_watch_keeps_the_greatest_moment() -> None:
    script = "import sys; a = bytearray(64 << 20); print('full', flush=True); sys.stdin.readline(); del a; input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        with MemoryWatch(lambda: [process.pid], period=0.001) as watch:
            while not watch.num_looks:
                pass
        process.stdin.write("\n\n")
        process.stdin.flush()
    assert 64 * MIB <= watch.most.own < 100 * MIB
    assert Held.by(process.pid) == Held()


def test_pages_of_its_own_and_of_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text("0-1 ---p [rollup]\nRss: 100 kB\nPss: 50 kB\nAnonymous: 30 kB\n")
    assert Held.by(7, tmp_path) == Held(30 * 1024, 70 * 1024)


def test_a_text_that_differs_a_limit_that_was_passed_and_no_drafts_are_wrong() -> None:
    assert problems([VISIT], 1024 * MIB) == []
    assert "1 of 4 texts" in problems([replace(VISIT, num_equal=3)], 1024 * MIB)[0]
    assert "590 MiB were in memory at once; the limit is 512 MiB" in problems([VISIT], 512 * MIB)[0]
    assert "prove nothing" in problems([replace(VISIT, drafted=0)], 1024 * MIB)[0]


def test_the_report_has_every_figure_and_how_the_limit_was_kept() -> None:
    options = parser(["edge"]).parse_args(["edge"])
    text = edge.report(options, [replace(VISIT, num_equal=3)], {"torch": 700 * MIB, "spaceserve": 20 * MIB}).markdown()
    assert "worker at most 768 MiB, of the router 256 MiB (RLIMIT_DATA)" in text
    assert "| 5 | 3.0 s | 61 MiB | 401 MiB | 590 MiB | 90 MiB | 256 | 300 | 90 | 3 of 4 |" in text
    assert "no extras: 720 MiB (torch 700 MiB" in text
    assert "WRONG: 1 of 4 texts are not those of plain decoding alone." in text


def test_what_is_needed_is_counted_and_what_lies_beside_is_not() -> None:
    sizes = installed()
    assert {"spaceserve", "torch", "transformers", "fastapi"} <= sizes.keys()
    assert "pytest" not in sizes
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)


def test_a_core_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edge", "--core", "99999"]) == 2
    assert "may not run on --core 99999" in capsys.readouterr().err


@pytest.mark.slow
@linux_only
def test_the_embedded_model_serves_four_exact_streams_on_one_core_in_one_gib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["edge", "--out", str(tmp_path), "--tokens", "48"]) == 0
    text = capsys.readouterr().out
    assert text.count("4 of 4") == 2
    assert (tmp_path / "edge.md").read_text(encoding="utf-8") == text
    assert ROUTERS_SHARE == 0.25


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", num_threads=1)


def test_every_decode_step_has_its_parts_and_its_computation(demo: SpaceModel) -> None:
    if demo.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    steps = run_cell(demo, Cell(2, 2), num_steps=3, seed=1)
    assert len(steps) >= 3
    for step in steps:
        assert step.computed > 0
        assert all(getattr(step, part) > 0 for part in PARTS if part != "attend")
        assert step.attend == 0, "a step in one call plans no attention"
        assert step.host == pytest.approx(sum(getattr(step, part) for part in PARTS))
    assert median(step.computed for step in steps) > median(step.host for step in steps)  # one may be disturbed


def test_a_slow_event_loop_leaves_no_step_out(demo: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    message = RouterSession.message

    def late(session: RouterSession, patience: float) -> Coroutine[None, None, pb.WorkerMessage | None]:
        time.sleep(0.02)  # on the loop: the stepping thread goes ahead as far as it may
        return message(session, patience)

    monkeypatch.setattr(RouterSession, "message", late)
    assert len(run_cell(demo, Cell(1, 0), num_steps=2, seed=0)) >= 2


def test_more_steps_than_the_window_holds_are_refused(demo: SpaceModel) -> None:
    with pytest.raises(PerfError, match="500 steps of plain may need 703 positions; the window of demo has 600"):
        run_cell(load_model("demo", num_threads=1, max_model_len=600), Cell(1, 0), num_steps=500, seed=0)


def test_the_command_writes_figures_and_checks_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["host-time", "--batches", "1", "--drafts", "0", "--steps", "2", "--rounds", "1", "--check"]
    status = main([*words, "--out", str(tmp_path)])
    record = json.loads((tmp_path / "host-time.json").read_text())
    (row,) = record["rows"]
    assert (row["batch"], row["layout"], row["bound_ms"]) == (1, "plain", 0.3)
    assert status == (row["median"] >= 0.3) == len(record["failures"])
    assert set(row["parts_ms"]) == {*PARTS, "computed"}
    assert "| 1 | plain |" in capsys.readouterr().out


def test_masks_that_a_model_lacks_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host-time", "--batches", "1", "--drafts", "9", "--steps", "1", "--rounds", "1"]) == 2
    assert "demo has 5 masks; full(9,9) needs more" in capsys.readouterr().err


def test_the_command_ends_without_lists_of_what_is_left(host_time: Ran) -> None:
    assert host_time.result.returncode == 0, host_time.result.stderr
    assert "leaked" not in host_time.result.stderr


def test_a_small_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "WORKING_SET", 1 << 20)
    flags = ["matmul", "--shapes", "64x32", "--rows", "1", "5", "--rounds", "3", "--num-threads", "1"]
    flags += ["--out", str(tmp_path)]
    assert main(flags) == 0
    record = json.loads((tmp_path / "matmul.json").read_text())
    assert [(row["outputs"], row["inputs"], row["rows"]) for row in record["rows"]] == [(64, 32, 1), (64, 32, 5)]
    assert all(0 < row["error"] < 1e-6 for row in record["rows"])
    assert all(row["seconds"] > 0 and row["over_plain"] > 0 and row["over_float32"] > 0 for row in record["rows"])
    assert all(0 < row["int8_error"] < 0.03 and row["int8_over_bfloat16"] > 0 for row in record["rows"])
    assert all(row["gb_per_second"] > 0 and row["gflop_per_second"] > 0 for row in record["rows"])
    assert "| 64×32 | 5 |" in capsys.readouterr().out
    assert main([*flags, "--kind", cpu_library.own_kinds()[-1]]) == 0
    assert json.loads((tmp_path / "matmul.json").read_text())["facts"]["kind"] == cpu_library.own_kinds()[-1]


def test_a_kind_that_this_processor_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = next(kind for kinds in cpu_library.KINDS.values() for kind in kinds if kind not in cpu_library.own_kinds())
    assert main(["matmul", "--kind", other]) == 2
    assert f"this processor is no {other}" in capsys.readouterr().err


def test_without_compiled_operations_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cpu_library.SWITCH, "torch")
    cpu_library.cpu_library.cache_clear()
    assert main(["matmul"]) == 2
    assert "no compiled operations" in capsys.readouterr().err
    cpu_library.cpu_library.cache_clear()


def test_sampling_is_measured_compiled_and_by_torch(tmp_path: Path) -> None:
    flags = ["sampling", "--rows", "1,3", "--vocabulary", "64", "--rounds", "2", "--out", str(tmp_path)]
    assert main(flags) == 0
    record = json.loads((tmp_path / "sampling.json").read_text())
    measured = {(row["what"], row["rows"]) for row in record["rows"]}
    assert measured == {(what, count) for count in (1, 3) for what in sampling.subjects(1)}
    assert all(row["ratio"] > 0 for row in record["rows"])


@pytest.mark.parametrize("shape", ["64", "64x", "0x8", "8x7", "axb"])
def test_a_shape_that_is_none_is_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["matmul", "--shapes", shape])
    assert refused.value.code == 2
    assert "no shape" in capsys.readouterr().err


SERVING = Serving(8, 2048, 5, 32, 384)


def test_the_sums_are_those_of_the_shapes() -> None:
    space = side(SHAPES["7b"], None, SERVING)
    assert space.weights == 2 * 6_738_415_616  # Llama 2 7B has so many
    assert slot(SHAPES["7b"], SERVING) == 512 * 1024
    assert space.keys_values == 8 * 2048 * 512 * 1024
    assert space.reserved == 8 * 6 * 512 * 1024
    assert space.drafting == adapter(SHAPES["7b"], SERVING) < space.weights / 50
    assert space.total == space.weights + space.for_drafts + space.keys_values


def test_a_draft_model_brings_its_weights_and_its_own_keys_and_values() -> None:
    draft = DRAFT_MODELS["tinyllama-1.1b"]
    second = side(SHAPES["7b"], draft, SERVING)
    assert draft.num_parameters == 1_100_048_384
    assert second.drafting == 2 * draft.num_parameters
    assert second.drafting_keys_values == 8 * 2054 * slot(draft, SERVING)
    assert second.for_drafts > 10 * side(SHAPES["7b"], None, SERVING).for_drafts


@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_draft_models_are_smaller_than_what_they_draft_for(name: str) -> None:
    assert DRAFT_MODELS[name].num_parameters < SHAPES["1b"].num_parameters


def test_the_table_says_that_it_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--models", "1b", "--drafts", "llama-160m", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Computed from shapes, not measured" in text
    assert "| 1B | SPACE | 2.3 GiB |" in text
    assert (tmp_path / "memory.md").read_text(encoding="utf-8") == text


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--models", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err


def test_the_document_has_the_table_that_is_computed() -> None:
    drafts = [DRAFT_MODELS["tinyllama-1.1b"], DRAFT_MODELS["llama-160m"]]
    table = sides_table(list(SHAPES.values()), drafts, SERVING)
    document = Path(__file__).parents[2] / "router" / "guides" / "BENCHMARKS.md"
    assert table in document.read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_is_computed_is_what_memory_grows_by() -> None:
    for server, part, computed, measured in check():
        assert measured == pytest.approx(computed, rel=0.1), (server, part)


@pytest.mark.parametrize(
    ("few", "many"), [((10, 10_000), (2_000, 10_000)), ((100, 1_000), (100, 300_000))], ids=["queued", "pages"]
)
def test_the_cost_of_a_step_is_flat(few: tuple[int, int], many: tuple[int, int]) -> None:
    costs: dict[tuple[int, int], list[float]] = {few: [], many: []}
    for _ in range(6):  # a busy machine only adds: a cost that grows exceeds the bound each time
        for point, measured in costs.items():
            measured.append(measure(*point, num_steps=15).median_us)
        if min(costs[many]) < 2 * min(costs[few]):
            return
    pytest.fail(f"a step costs more with more queued or more pages: {costs}")


def test_a_cost_that_grows_with_the_queue_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from space_router.engine.queueing.queue import RequestQueue

    head = RequestQueue.head

    def slow(self: RequestQueue, now: float | None = None) -> object:
        for _ in range(16):
            sum(live.age for live in self._waiting)
        return head(self, now)

    monkeypatch.setattr(RequestQueue, "head", slow)
    few = min(measure(10, 10_000, num_steps=15).median_us for _ in range(5))
    many = measure(2_000, 10_000, num_steps=15).median_us  # some eight times as much
    assert many > 2 * few


def test_the_measurement_is_written_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(num_queued: int, num_blocks: int, *, num_steps: int, seed: int = 0) -> Cost:
        return Cost(num_queued, num_blocks, 2.0 + seed, 4.0, 1.0, 7)

    monkeypatch.setattr(scheduler, "measure", quick)
    assert main(["scheduler", "--out", str(tmp_path), "--rounds", "3", "--steps", "9"]) == 0
    record = json.loads((tmp_path / "scheduler.json").read_text())
    assert [(p["num_queued"], p["num_blocks"]) for p in record["points"][::3]] == [
        (10, 10_000), (100, 10_000), (1_000, 10_000), (10_000, 10_000),
        (100, 1_000), (100, 100_000), (100, 1_000_000),
    ]  # fmt: skip
    assert "cores" in record["facts"]["machine"]
    assert "| 10,000 | 10,000 | 3 (2–4) |" in capsys.readouterr().out


def test_flags_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["scheduler", "--steps", "0"])
    assert "of at least 1" in capsys.readouterr().err


PROMPTS = [[10 + n, 20, 30] for n in range(3)]
ALWAYS = (1.0,) * 5
FLAT = PassCost(RowCurve(((1, 1.0), (2, 1.0))), RowCurve(((1, 0.0), (2, 0.0))))  # rows are free
LINEAR = PassCost(RowCurve(((1, 1.0), (2, 2.0))), RowCurve(((1, 0.0), (2, 0.0))))  # far above the ridge


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    folder = random_llama(tmp_path_factory.mktemp("random") / "small", Size(64, 2, 2, 96, 500, 256, 8))
    return load_model(folder, num_threads=1)


def bench_of(model: ScriptedModel | SpaceModel, chances: tuple[float, ...] = ALWAYS) -> Bench:
    synthetic = SyntheticAcceptance(chances, vocab_size=model.facts.vocab_size, mask_ids=model.facts.mask_ids)
    chosen = arms([1, 3], [(3, 6)], most_masks=5)
    load = Load(PROMPTS, max_tokens=12)
    return Bench(model, load, chosen, most_sequences=3, synthetic=synthetic, calibration_seconds=0.2)


def test_a_turn_counts_what_its_steps_lay_out_and_emit(small: SpaceModel) -> None:
    bench = bench_of(small)
    bench.learn_texts(3)
    turn = bench.turn(full(3), 3, most_steps=99)
    assert (turn.num_steps, turn.tokens_per_step) == (3, 4.0)  # 1 + 3·4 ≥ 12 tokens, everything accepted
    assert (turn.num_chain_rows, turn.num_mask_rows) == (3 * 3 * 4, 3 * 3 * 12)
    assert min(turn.parts["call"], turn.parts["host"]) > 0
    assert turn.parts["network"] == turn.parts["head"] == turn.parts["drafting"] == 0.0


def test_steps_call_by_call_count_network_head_and_drafting(small: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampledStep, "drafts_for", lambda step, adapter: False)
    bench = bench_of(small)
    bench.learn_texts(3)
    parts = bench.turn(full(3), 3, most_steps=99).parts
    assert parts.pop("call") == 0.0
    assert min(parts.values()) > 0


def test_every_arm_takes_turns_on_the_same_pages_with_the_same_text(small: SpaceModel) -> None:
    bench = bench_of(small, parse_chances(".57"))
    bench.learn_texts(3)
    for arm in [*arms([1, 3], [(3, 6)], most_masks=5)] * 2:
        turn = bench.turn(arm, 2, most_steps=4)  # raises where a text differs
        assert turn.num_steps == 4
        assert turn.num_tokens >= 8


def test_a_text_that_changes_is_no_measurement() -> None:
    texts = {1: 10}
    model = ScriptedModel(num_masks=5, text=lambda position: 10 + (position * 7 + texts[1]) % 50)
    bench = bench_of(model)
    bench.learn_texts(1)
    texts[1] = 11
    with pytest.raises(PerfError, match="k=3 at batch 1 changed the text of prompt 1"):
        bench.turn(full(3), 1, most_steps=4)


def turn_of(seconds: float, *, tokens: int = 20, rows: int = 20) -> Turn:
    """Ten steps of two sequences."""
    shares = {"network": 0.7, "head": 0.1, "drafting": 0.1, "host": 0.1}
    return Turn(2, 10, tokens, rows // 2, rows // 2, {part: share * seconds for part, share in shares.items()})


def row_of(batch: int, ratio: float, cost: PassCost = FLAT) -> Row:
    plain = Turn(batch, 10, 10 * batch, 10 * batch, 0, {"network": 1.0})
    fast = Turn(batch, 10, 15 * batch, 20 * batch, 20 * batch, {"network": 1.5 / ratio})
    return row("k=1", [fast] * 3, [plain] * 3, cost)


def test_a_row_is_medians_and_ratios_of_rounds() -> None:
    plains = [turn_of(seconds) for seconds in (1.0, 2.0, 4.0)]
    fasts = [turn_of(seconds, tokens=30, rows=80) for seconds in (1.0, 2.0, 40.0)]  # the last one was disturbed
    found = row("k=1", fasts, plains, FLAT)
    assert (found.ratio.median, found.ratio.num) == (1.5, 3)
    assert found.ratio.low == pytest.approx(0.15)
    assert (found.tokens_per_step, found.chain_rows, found.mask_rows) == (1.5, 4.0, 4.0)
    assert found.step_ms == pytest.approx(200.0)
    assert list(found.parts_ms.values()) == pytest.approx([140, 20, 20, 20])


def test_prediction_is_e_where_rows_are_free_and_e_over_t_where_they_are_not() -> None:
    free, dear = row_of(4, 1.0, cost=FLAT), row_of(4, 1.0, cost=LINEAR)
    assert free.predicted == pytest.approx(1.5)
    assert free.limit == pytest.approx(1.5 / 4)
    assert dear.predicted == pytest.approx(dear.limit)


def test_rows_between_measured_ones_are_on_a_line_and_beyond_go_on() -> None:
    curve = RowCurve(((1, 1.0), (2, 1.0), (4, 2.0)))
    assert [curve.seconds(rows) for rows in (1, 1.5, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0]


@pytest.mark.parametrize(
    ("ratios", "at"),
    [
        ([(1, 1.4), (2, 1.2), (4, 1.1)], "> 4"),
        ([(1, 0.9), (2, 0.8)], "< 1"),
        ([(1, 1.5), (4, 1.5), (16, 0.5)], "8.0"),
        ([(8, 1.0), (16, 0.9)], "8.0"),
        ([], "–"),
    ],
)
def test_the_crossing_is_found_over_the_logarithm_of_the_batch(ratios: list[tuple[int, float]], at: str) -> None:
    assert crossing(ratios) == at


def test_tables_with_synthetic_acceptance_say_so(tmp_path: Path) -> None:
    subjects = [Subject("demo", None), Subject("/models/big", parse_chances(".78"))]
    made = overhead.report(subjects, [[row_of(batch, ratio) for batch in (1, 2)] for ratio in (1.25, 1.75)], {})
    own, synthetic = made.tables[:2], made.tables[2:]
    assert not any("SYNTHETIC" in table or "1.750" in table for table in own)
    assert all("SYNTHETIC ACCEPTANCE .84 .81 .78 .75 .72" in table.splitlines()[0] for table in synthetic)
    made.write(tmp_path, "overhead")
    records = json.loads((tmp_path / "overhead.json").read_text())["subjects"]
    assert [one["synthetic_acceptance"] for one in records] == [None, [0.84, 0.81, 0.78, 0.75, 0.72]]


def test_the_command_measures_every_layout_beside_plain_decoding(
    capsys: pytest.CaptureFixture[str], small: SpaceModel
) -> None:
    flags = ["--batch", "2", "--k", "1", "--rounds", "1", "--max-tokens", "4", "--steps", "2", "--prompt-tokens", "8"]
    flags += ["--calibration-seconds", "0.1", "--num-threads", "1", "--model", small.facts.name]
    assert main(["overhead", *flags]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 |")]
    assert [line.split(" | ")[1] for line in rows] == ["plain", "k=1", "auto"]
    assert "| 4.0 + 4.0 |" in rows[1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--batch", "0"], "must be a whole number of at least 1; got '0'"),
        (["--synthetic-acceptance", ".6"], "must be .78, .57, or five chances"),
        (["--model", "nowhere"], "nowhere"),
        (["--prompt-tokens", "5000"], "--prompt-tokens is 5000; with --max-tokens it is at most"),
    ],
)
def test_unusable_flags_end_with_2_and_a_reason(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["overhead", *flags])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert reason in capsys.readouterr().err
