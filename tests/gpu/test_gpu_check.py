"""One command checks what only a GPU can show: its stages, its report, and what it measures with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from overhead_arms import full
from space_common.worker.settings import NAMED_CHANCES, StepsHere
from space_kernels.dispatch import ops_for
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb

from gpu import __main__ as gpu_main
from gpu.__main__ import check, main, run_slice
from gpu.llama import (
    DRY,
    FIRST_MASK,
    NUM_MASKS,
    SHAPES,
    Foretold,
    facts_of,
    next_ids,
    random_llama,
    space_llama,
)
from gpu.pace import BLOCK_SIZE, DEVICE, HOST, PacedWorker, SequenceSize, covered
from gpu.report import TARGETS, Record, Report, Target, written
from gpu.stages import FAST_STAGES, LONGEST, STAGES, Slice, Stage, kernel_tests
from gpu.test_attention import Sizes, Step
from gpu.ties import Difference, TieRule, differences

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

MADE_UP = """
import os, subprocess, sys, time
import pytest

def test_passes(notes):
    notes.figure("one", 1.0)

def test_fails(notes):
    pytest.fail("it is so")

def test_breaks(notes):
    notes.missing("two", "never reached")
    raise ValueError("no such thing")

def test_cannot(notes):
    pytest.skip("there is none here")

def test_dies(notes):
    os._exit(7)

def test_hangs(notes):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    notes.figure("child", child.pid)
    time.sleep(600)
"""
CONFTEST = """
from gpu.conftest import *
from gpu.stages import STAGES, Stage

STAGES.update({name: Stage("", __file__, 60) for name in ("passes", "fails", "breaks", "cannot", "dies", "hangs")})

def pytest_itemcollected(item):
    item.add_marker("gpu")
"""


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    (tmp_path / "test_made_up.py").write_text(MADE_UP)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def stage(function: str, folder: Path, limit: float = 60.0) -> Stage:
    return Stage(f"It {function}", str(folder / "test_made_up.py"), limit)


def ran(function: str, folder: Path, limit: float = 60.0) -> Record:
    report = Report(folder, dry=True, commit_given="abc")
    return run_slice(Slice(function), stage(function, folder, limit), report, seconds=600.0)


def wait_until_ended(pid: int) -> None:
    """Until a process is gone, or a zombie that its new parent has yet to wait for."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail(f"process {pid} lives on")


# ------------------------------------------------------------------------------------------------- stages


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stage_ends_as_its_process_does(made_up: Path) -> None:
    outcomes = {name: ran(name, made_up) for name in ("passes", "fails", "breaks", "cannot", "dies")}
    assert {name: (record.outcome, record.why) for name, record in outcomes.items()} == {
        "passes": ("passed", ""), "fails": ("failed", "it is so"), "breaks": ("failed", "ValueError: no such thing"),
        "cannot": ("not run", "there is none here"), "dies": ("failed", "its process ended with status 7"),
    }  # fmt: skip
    assert outcomes["passes"].figures == {"one": (1.0, "")}
    assert outcomes["breaks"].missing == {"two": "never reached"}


@pytest.mark.slow
def test_a_stage_that_hangs_is_stopped_with_all_it_started_and_keeps_what_it_had(made_up: Path) -> None:
    record = ran("hangs", made_up, limit=20.0)
    assert record.outcome == "timed out"
    assert record.seconds < 60
    wait_until_ended(int(record.figures["child"][0]))


def test_a_stage_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    record = run_slice(Slice("hangs"), stage("hangs", tmp_path), Report(tmp_path, dry=True), seconds=3.0)
    assert (record.outcome, record.seconds) == ("not run", 0.0)
    assert "raise --minutes" in record.why


@pytest.mark.slow
def test_one_failure_ends_no_other_and_all_are_in_the_report(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fails", "hangs", "passes"):
        monkeypatch.setitem(STAGES, name, stage(name, made_up, 20.0 if name == "hangs" else 60.0))
    report = Report(made_up / "out", dry=True)
    records = check([*map(Slice, ("fails", "hangs", "passes"))], report, minutes=5)
    assert [record.outcome for record in records.values()] == ["failed", "timed out", "passed"]
    found = json.loads((made_up / "out" / "report.json").read_text())
    assert [found["stages"][name]["outcome"] for name in records] == ["failed", "timed out", "passed"]
    assert "| passes | It passes |" in (made_up / "out" / "report.md").read_text()


def test_stages_run_one_by_one_make_one_report_unless_one_of_them_was_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("passes", "cannot", "fails"):
        monkeypatch.setitem(STAGES, name, stage(name, tmp_path))
    report = Report(tmp_path, dry=False)
    for name, dry in (("passes", False), ("cannot", False), ("fails", True)):
        Record(name, dry, report.machine).save(tmp_path / f"{name}.json")
    assert list(report.records()) == ["passes", "cannot"]


def test_without_a_gpu_only_a_dry_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(["--out", str(tmp_path)])
    assert left.value.code == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_a_function_a_title_and_targets(name: str) -> None:
    found = STAGES[name]
    if found.file:
        source = (Path(__file__).parent / found.file).read_text()
        assert f"\ndef test_{name.replace('-', '_')}(notes: Notes" in source
    else:
        assert found.suite is not None
        assert found.suite(True)
    assert found.title[0].isupper()
    assert TARGETS[name]


def test_every_slice_takes_at_most_four_minutes_and_every_item_belongs_to_one() -> None:
    assert {name for name, one in STAGES.items() if one.seconds > LONGEST} == set()
    for name in STAGES:
        items = [f"test_{number}.py" for number in range(11)]
        shares = [one.words(["-m", "gpu", *items]) for one in Slice.all_of(name)]
        assert sorted(word for words in shares for word in words[2:]) == sorted(items)
        assert all(words[:2] == ["-m", "gpu"] for words in shares)


def test_the_plan_names_every_slice_and_runs_none_and_what_has_passed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_main, "run_slice", lambda *_: pytest.fail("nothing was to be run"))
    words = ["--out", str(tmp_path), "--plan", "--stages", "kernels", "worker", "llama-8b-2"]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"kernels-{n}" for n in (1, 2, 3, 4)] + ["worker", "llama-8b-2"]
    assert "≤ 240 s" in lines[0]
    assert last == "6 slices: ≤ 23 minutes"
    machine = Report(tmp_path, dry=False).machine
    for name, outcome in (("kernels-1", "passed"), ("kernels-2", "failed")):
        Record(name, False, machine, outcome=outcome).save(tmp_path / f"{name}.json")
    assert main([*words, "--resume"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == [
        "kernels-2", "kernels-3", "kernels-4",
    ]  # fmt: skip


def test_slices_share_the_targets_of_their_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = tuple(Target(name, 2.0, True) for name in ("one", "two", "three"))
    monkeypatch.setitem(TARGETS, "exact-products", targets)
    records = {f"exact-products-{n}": Record(f"exact-products-{n}", False, outcome="passed") for n in (1, 2)}
    records["exact-products-1"].figures = {"one": (3.0, "")}
    records["exact-products-2"].missing = {"two": "no time was left"}
    rows = [
        row for row in Report(tmp_path, dry=False).rows(records) if row[1] in ("one", "two", "three") or row[2] != "–"
    ]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("exact-products-1", STAGES["exact-products"].title, "passed"),
        ("", "one", "met"),
        ("exact-products-2", STAGES["exact-products"].title, "passed"),
        ("", "two", "not run: no time was left"),
        ("", "three", "not run: the stage did not get so far"),
    ]


@pytest.mark.slow
def test_nothing_of_it_needs_the_router_or_a_web_server() -> None:
    absent = ["fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "orjson", "space_router"]
    modules = [f"gpu.{file.stem}" for file in Path(__file__).parent.glob("*.py") if file.stem != "test_gpu_check"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(modules)}"
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_make_gpu_check_passes_on_what_it_is_told() -> None:
    words = ["make", "-n", "gpu-check", "DRY=1", "FLAGS=--stages worker"]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "-m gpu --dry --stages worker" in said


def dry_run(out: Path, *words: str) -> dict[str, Record]:
    assert main(["--dry", "--out", str(out), *words]) == 0
    assert "mean nothing" in (out / "report.md").read_text()
    found = {name: Record.read(out / f"{name}.json") for name in STAGES}
    return {name: record for name, record in found.items() if record is not None}


@pytest.mark.slow
def test_the_fast_stages_run_dry(tmp_path: Path) -> None:
    records = dry_run(tmp_path, "--stages", "fast")
    assert {name: record.outcome for name, record in records.items()} == dict.fromkeys(FAST_STAGES, "passed")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_runs_dry(tmp_path: Path) -> None:
    records = dry_run(tmp_path)
    assert {name: record.outcome for name, record in records.items()} == dict.fromkeys(STAGES, "passed")
    of_a_size = ("attention ", "1b auto/plain", "8b auto/plain", "1b device idle", "8b device idle")
    for name, targets in TARGETS.items():
        for target in targets:
            assert target.name in records[name].figures or target.name.startswith(of_a_size)


# ------------------------------------------------------------------------------------------------- report


def record(value: float | None, *, dry: bool = False, outcome: str = "running") -> Record:
    figures = {} if value is None else {"speed": (value, "")}
    return Record("worker", dry, figures=figures, outcome=outcome)


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [(2.0, True, "met"), (1.9, True, "missed"), (2.1, True, "met"), (2.0, False, "met"), (2.1, False, "missed")],
)
def test_a_target_is_met_or_missed(value: float, at_least: bool, verdict: str) -> None:
    found = record(value)
    assert Target("speed", 2.0, at_least).verdict(found, "GPU") == verdict


def test_a_target_that_was_not_measured_says_why() -> None:
    target = Target("speed", 2.0, True)
    known = record(None)
    assert target.verdict(known, "GPU") == "not run: the stage did not get so far"
    known.why = "stopped after 3 s"
    assert target.verdict(known, "GPU") == "not run: stopped after 3 s"
    known.missing["speed"] = "no time was left"
    assert target.verdict(known, "GPU") == "not run: no time was left"


def test_a_bound_for_one_gpu_binds_no_other() -> None:
    target, found = Target("speed", 2.0, True, only="H200"), record(1.0)
    assert target.verdict(found, "NVIDIA H100") == "no bound for NVIDIA H100"
    assert target.verdict(found, "NVIDIA H200") == "missed"


def test_a_dry_run_meets_no_target_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "worker", (Target("speed", 2.0, True),))
    text = Report(tmp_path, dry=True).markdown({"worker": record(9.0, dry=True, outcome="passed")})
    assert "Its figures mean nothing" in text
    assert "| speed | 9 | ≥ 2 | dry run: means nothing |" in text


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Record("worker", False, "here", missing={"a": "b"}, figures={"speed": (2.5, "ms")})
    made.save(tmp_path / "worker.json")
    assert Record.read(tmp_path / "worker.json") == made
    assert Record.read(tmp_path / "other.json") is None


def test_numbers_are_written_with_three_digits() -> None:
    assert [written(value) for value in (0.01234, 1.2345, 12.345, 12345.6, 3.0)] == [
        "0.0123", "1.23", "12.3", "12346", "3",
    ]  # fmt: skip
    assert written(0.7031, "%") == "70.3 %"
    assert written(float("nan"), "ms") == "–"


def test_kernels_are_tested_on_the_device_whatever_their_file_is_called() -> None:
    files = kernel_tests()
    assert {"tests/kernels/step/test_step_state.py", "tests/kernels/attention/test_attention_triton.py"} <= set(files)
    tried = {file.name for file in (Path(__file__).parents[1] / "kernels").rglob("test_*triton.py")}
    assert tried <= {Path(file).name for file in files}


SLEEPER = """
import pathlib, time
def test_sleep():
    pathlib.Path(__file__).with_name("asleep").touch()
    time.sleep(600)
"""

KILLED = """
import os, pathlib, subprocess, sys, time
words = [sys.executable, "-m", "pytest", "-p", "gpu.stages", sys.argv[1]]
stage = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
while not pathlib.Path(sys.argv[1], "asleep").exists():
    assert stage.poll() is None
    time.sleep(0.05)
print(stage.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_no_stage_outlives_a_check_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as check:
        said, _ = check.communicate(timeout=120)
    wait_until_ended(int(said))


# ------------------------------------------------------------------------------------------------- measuring


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_attention_must_move_its_prefix_once_whatever_the_rows() -> None:
    sizes = Sizes(num_heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    prefix = 2 * 3 * 32 * 2 * 8 * 4  # keys and values of 3 sequences, 32 positions, 2 heads of 8 in 4 bytes
    plain, whole = (Step.of(sizes, 32, 3, rows, 16, CPU) for rows in (1, 36))
    row = 2 * 2 * 8 * 4 + 2 * 4 * 8 * 4  # its own key and value read; its queries, its result
    stored = 2 * 2 * 8 * 4
    assert plain.least_bytes == prefix + 3 * (row + stored)
    assert whole.least_bytes == prefix + 3 * (36 * row + 6 * stored)


def test_shapes_are_as_large_as_they_are_called() -> None:
    weights = {name: shape.num_bytes / 2 / 1e9 for name, shape in SHAPES.items()}
    assert weights == pytest.approx({"1b": 1.24 + 0.26, "8b": 8.03}, rel=0.01)  # ours has a head of its own


@pytest.fixture(scope="module")
def llama() -> SpaceModel:
    facts = facts_of(DRY, CPU, NAMED_CHANCES[0.78])
    return space_llama(random_llama(DRY, CPU), facts, ops_for(CPU), DRY)


def test_the_next_id_is_a_cycle_through_all_that_can_be_said() -> None:
    following = next_ids(64).tolist()
    assert following[: FIRST_MASK + NUM_MASKS] == list(range(FIRST_MASK + NUM_MASKS))
    seen, at = set(), FIRST_MASK + NUM_MASKS
    while at not in seen:
        seen.add(at)
        at = following[at]
    assert seen == set(range(FIRST_MASK + NUM_MASKS, 64))


@pytest.mark.parametrize("steps", [HOST, DEVICE])
@pytest.mark.parametrize(("chances", "low", "high"), [((1.0,) * 5, 6.0, 6.0), ((0.0,) * 5, 1.0, 1.0)])
def test_drafts_come_true_as_decreed(
    llama: SpaceModel, steps: StepsHere, chances: tuple[float, ...], low: float, high: float
) -> None:
    sequence_size = SequenceSize(context=16, most_tokens=60)
    kv = llama.allocate_kv(2 * sequence_size.blocks_each, BLOCK_SIZE)
    foretold = Foretold(llama.facts, chances)
    paced = PacedWorker(llama, kv, full(NUM_MASKS), sequence_size, max_sequences=2, steps=steps, foretold=foretold)
    pace = paced.pace(2, num_steps=5, warm_up=3)
    assert low <= pace.tokens_per_step <= high
    assert pace.num_accepted == (pace.num_drafted if low > 1 else 0)
    assert foretold.synthetic.num_unknown == 0 < foretold.synthetic.num_replaced


@pytest.mark.parametrize("steps", [HOST, DEVICE])
def test_drafts_of_chance_78_give_the_tokens_that_they_should(llama: SpaceModel, steps: StepsHere) -> None:
    sequence_size = SequenceSize(context=16, most_tokens=500)
    kv = llama.allocate_kv(2 * sequence_size.blocks_each, BLOCK_SIZE)
    foretold = Foretold(llama.facts, NAMED_CHANCES[0.78])
    paced = PacedWorker(llama, kv, full(NUM_MASKS), sequence_size, max_sequences=2, steps=steps, foretold=foretold)
    pace = paced.pace(2, num_steps=120, seconds=60, warm_up=3)
    expected, reached = 1.0, 1.0
    for chance in NAMED_CHANCES[0.78]:
        reached *= chance
        expected += reached
    assert pace.tokens_per_step == pytest.approx(expected, rel=0.12)


# ------------------------------------------------------------------------------------------------- ties


class NearIds(TieRule):
    """Ids that differ by one are a tie."""

    def __init__(self) -> None:
        pass

    def difference(self, where: str, known: object, ours: int, theirs: int, sampling: pb.Sampling) -> Difference:
        return Difference(where, len(list(known)), ours, theirs, abs(ours - theirs), 1.5)  # type: ignore[call-overload]


def test_texts_are_followed_behind_each_tie_and_what_is_none_is_a_fault() -> None:
    ours = [10, 21, 30, 45, 50]
    asked = []

    def theirs_behind(known: object) -> list[int]:
        count = len(list(known))  # type: ignore[call-overload]
        asked.append(count)
        return [10, 20, 30, 40, 50][count:]

    found = differences("here", [1, 2, 3], ours, theirs_behind, NearIds(), pb.Sampling())
    assert [(one.position, one.ours, one.theirs, one.is_tie) for one in found] == [
        (4, 21, 20, True),
        (6, 45, 40, False),
    ]
    assert asked == [0, 2, 4]


def test_a_text_that_ends_early_is_no_tie() -> None:
    (found,) = differences("here", [1], [7, 8], lambda known: [7, 8, 9][len(known) :], NearIds(), pb.Sampling())
    assert (found.ours, found.theirs, found.is_tie) == (None, 9, False)
