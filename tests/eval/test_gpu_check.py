"""One command checks what only a GPU can show: its stages, its report, and what it measures with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from space_eval.gpu_attention import Sizes, Step
from space_eval.gpu_check import check, main
from space_eval.gpu_clock import covered
from space_eval.gpu_kernels import on_any_device
from space_eval.gpu_llama import (
    DRY,
    FIRST_MASK,
    NUM_MASKS,
    SHAPES,
    Foretold,
    draft_head,
    facts_of,
    next_ids,
    random_llama,
    space_llama,
)
from space_eval.gpu_pace import BLOCK_SIZE, DEVICE, HOST, PacedWorker, Room
from space_eval.gpu_record import Figure, Record, written
from space_eval.gpu_report import to_markdown
from space_eval.gpu_stages import BY_NAME, FAST_STAGES, STAGES, Stage, run_stage
from space_eval.gpu_targets import TARGETS, Target
from space_eval.gpu_ties import Judge, Parting, partings
from space_eval.overhead_arms import full
from space_kernels.dispatch import ops_for
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.synthetic_acceptance import NAMED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

MADE_UP = """
import os, subprocess, sys, time
from space_eval.gpu_record import StageFailed, StageNotRun

def passes(notes, until):
    notes.figure("one", 1.0)

def fails(notes, until):
    raise StageFailed("it is so")

def breaks(notes, until):
    notes.missing("two", "never reached")
    raise ValueError("no such thing")

def cannot(notes, until):
    raise StageNotRun("there is none here")

def dies(notes, until):
    os._exit(7)

def hangs(notes, until):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    notes.figure("child", child.pid)
    time.sleep(600)
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of stages that the stages' processes can import."""
    (tmp_path / "made_up_stages.py").write_text(MADE_UP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def stage(function: str, limit: float = 60.0) -> Stage:
    return Stage(function, f"It {function}", "made_up_stages", function, limit)


def ran(function: str, folder: Path, limit: float = 60.0) -> Record:
    return run_stage(stage(function, limit), folder, dry=False, machine="here", seconds=600.0)


# ------------------------------------------------------------------------------------------------- stages


def test_a_stage_ends_as_its_process_does(made_up: Path) -> None:
    assert ran("passes", made_up).figures == [Figure("one", 1.0)]
    outcomes = {name: ran(name, made_up) for name in ("passes", "fails", "breaks", "cannot", "dies")}
    assert {name: (record.outcome, record.why) for name, record in outcomes.items()} == {
        "passes": ("passed", ""),
        "fails": ("failed", "it is so"),
        "breaks": ("failed", "ValueError: no such thing"),
        "cannot": ("not run", "there is none here"),
        "dies": ("failed", "its process ended with status 7"),
    }
    assert outcomes["breaks"].missing == {"two": "never reached"}


def test_a_stage_that_hangs_is_stopped_with_all_it_started_and_keeps_what_it_had(made_up: Path) -> None:
    record = ran("hangs", made_up, limit=4.0)
    assert record.outcome == "timed out"
    assert record.seconds < 30
    (child,) = [int(figure.value) for figure in record.figures]
    status = Path(f"/proc/{child}/stat")
    for _ in range(600):  # whoever adopts it takes its exit status in time
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, 9)
    pytest.fail("the process that the stage started lives on")


def test_a_stage_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    record = run_stage(stage("hangs"), tmp_path, dry=False, machine="here", seconds=3.0)
    assert (record.outcome, record.seconds) == ("not run", 0.0)
    assert "raise --minutes" in record.why


def test_one_failure_ends_no_other_and_all_are_in_the_report(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fails", "hangs", "passes")
    stages = tuple(stage(name, 4.0 if name == "hangs" else 60.0) for name in names)
    monkeypatch.setattr("space_eval.gpu_check.STAGES", stages)
    out = made_up / "out"
    records = check(stages, out, dry=False, minutes=5, commit="abc")
    assert [record.outcome for record in records.values()] == ["failed", "timed out", "passed"]
    report = json.loads((out / "report.json").read_text())
    assert [report["stages"][name]["outcome"] for name in names] == ["failed", "timed out", "passed"]
    assert "| passes | passed |" in (out / "report.md").read_text()


def test_stages_run_one_by_one_make_one_report_unless_one_of_them_was_dry(
    made_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (stage("passes"), stage("cannot"), stage("fails"))
    monkeypatch.setattr("space_eval.gpu_check.STAGES", stages)
    check(stages[2:], made_up / "out", dry=True, minutes=5)
    for one in stages[:2]:
        records = check([one], made_up / "out", dry=False, minutes=5)
    assert list(records) == ["passes", "cannot"]


def test_without_a_gpu_only_a_dry_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(["--out", str(tmp_path)])
    assert left.value.code == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.parametrize("name", BY_NAME)
def test_every_stage_has_a_function_a_title_and_targets(name: str) -> None:
    found = BY_NAME[name]
    assert callable(found.load())
    assert found.title[0].isupper()
    assert TARGETS[name]


def test_nothing_of_it_needs_the_router_or_a_web_server() -> None:
    absent = ["fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "orjson", "space_router"]
    modules = sorted({stage.module for stage in STAGES} | {"space_eval.gpu_check"})
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_make_gpu_check_passes_on_what_it_is_told() -> None:
    words = ["make", "-n", "gpu-check", "DRY=1", "FLAGS=--stages worker"]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "-m space_eval.gpu_check --dry --stages worker" in said


def dry_run(out: Path, *words: str) -> dict[str, Record]:
    assert main(["--dry", "--out", str(out), *words]) == 0
    assert "means nothing" in (out / "report.md").read_text()
    found = {stage.name: Record.read(out / f"{stage.name}.json") for stage in STAGES}
    return {name: record for name, record in found.items() if record is not None}


def test_the_fast_stages_run_dry(tmp_path: Path) -> None:
    records = dry_run(tmp_path, "--stages", "fast")
    assert {name: record.outcome for name, record in records.items()} == dict.fromkeys(FAST_STAGES, "passed")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_runs_dry(tmp_path: Path) -> None:
    records = dry_run(tmp_path)
    assert {name: record.outcome for name, record in records.items()} == dict.fromkeys(BY_NAME, "passed")
    of_a_size = ("attention ", "1b auto/plain", "8b auto/plain", "1b device idle", "8b device idle")
    for name, targets in TARGETS.items():
        for target in targets:
            assert records[name].value(target.name) is not None or target.name.startswith(of_a_size)


# ------------------------------------------------------------------------------------------------- report


def record(value: float | None, *, dry: bool = False, **fields: str) -> Record:
    figures = [] if value is None else [Figure("speed", value)]
    return Record("worker", dry, figures=figures, **fields)


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [(2.0, True, "met"), (1.9, True, "missed"), (2.1, True, "met"), (2.0, False, "met"), (2.1, False, "missed")],
)
def test_a_target_is_met_or_missed(value: float, at_least: bool, verdict: str) -> None:
    found = record(value)
    assert Target("speed", 2.0, at_least).verdict(found.value("speed"), found, "GPU") == verdict


def test_a_target_that_was_not_measured_says_why() -> None:
    target = Target("speed", 2.0, True)
    known = record(None)
    assert target.verdict(None, known, "GPU") == "not run: the stage did not get so far"
    known.why = "stopped after 3 s"
    assert target.verdict(None, known, "GPU") == "not run: stopped after 3 s"
    known.missing["speed"] = "no time was left"
    assert target.verdict(None, known, "GPU") == "not run: no time was left"


def test_a_bound_for_one_gpu_binds_no_other() -> None:
    target, found = Target("speed", 2.0, True, only="H200"), record(1.0)
    assert target.verdict(found.value("speed"), found, "NVIDIA H100") == "no bound for NVIDIA H100"
    assert target.verdict(found.value("speed"), found, "NVIDIA H200") == "missed"


def test_a_dry_run_meets_no_target_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "worker", (Target("speed", 2.0, True),))  # type: ignore[attr-defined]
    text = to_markdown(
        {"device": "cpu"}, {"worker": "W"}, {"worker": record(9.0, dry=True, outcome="passed")}, dry=True
    )
    assert "Its figures mean nothing" in text
    assert "| speed | ≥ 2 | 9 | dry run: means nothing |" in text


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Record("worker", False, "here", missing={"a": "b"}, figures=[Figure("speed", 2.5, "ms")])
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
    files = on_any_device()
    assert {"tests/kernels/test_step_state.py", "tests/kernels/test_attention_triton.py"} <= set(files)
    tried = {file.name for file in (Path(__file__).parents[1] / "kernels").glob("test_*triton.py")}
    assert tried <= {Path(file).name for file in files}


SLEEPER = """
import pathlib, time
def sleep(notes, until):
    pathlib.Path(__file__).with_name("asleep").touch()
    time.sleep(600)
"""

KILLED = """
import os, pathlib, subprocess, sys, time
words = [sys.executable, "-m", "space_eval.gpu_stages", "sleeper", "sleeper:sleep", sys.argv[1], "600", "--dry"]
stage = subprocess.Popen(words, start_new_session=True)
while not pathlib.Path(sys.argv[1], "asleep").exists():
    assert stage.poll() is None
    time.sleep(0.05)
print(stage.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_no_stage_outlives_a_check_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as check:
        said, _ = check.communicate(timeout=120)
    stage = int(said)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(stage) and psutil.Process(stage).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the stage goes on"
        time.sleep(0.05)


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
    facts = facts_of(DRY, CPU, NAMED[0.78])
    return space_llama(random_llama(DRY, CPU), facts, ops_for(CPU), draft_head(DRY, CPU))


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
    llama: SpaceModel, steps: str, chances: tuple[float, ...], low: float, high: float
) -> None:
    room = Room(context=16, most_tokens=60)
    kv = llama.allocate_kv(2 * room.blocks_each, BLOCK_SIZE)
    foretold = Foretold(llama.facts, chances)
    paced = PacedWorker(llama, kv, full(NUM_MASKS), room, max_sequences=2, steps=steps, foretold=foretold)
    pace = paced.pace(2, num_steps=5, warm_up=3)
    assert low <= pace.tokens_per_step <= high
    assert pace.num_accepted == (pace.num_drafted if low > 1 else 0)
    assert foretold.synthetic.num_unknown == 0 < foretold.synthetic.num_replaced


@pytest.mark.parametrize("steps", [HOST, DEVICE])
def test_drafts_of_chance_78_give_the_tokens_that_they_should(llama: SpaceModel, steps: str) -> None:
    room = Room(context=16, most_tokens=500)
    kv = llama.allocate_kv(2 * room.blocks_each, BLOCK_SIZE)
    foretold = Foretold(llama.facts, NAMED[0.78])
    paced = PacedWorker(llama, kv, full(NUM_MASKS), room, max_sequences=2, steps=steps, foretold=foretold)
    pace = paced.pace(2, num_steps=120, seconds=60, warm_up=3)
    expected, reached = 1.0, 1.0
    for chance in NAMED[0.78]:
        reached *= chance
        expected += reached
    assert pace.tokens_per_step == pytest.approx(expected, rel=0.12)


# ------------------------------------------------------------------------------------------------- ties


class NearIds(Judge):
    """Ids that differ by one are a tie."""

    def __init__(self) -> None:
        pass

    def parting(self, where: str, known: object, ours: int, theirs: int, sampling: pb.Sampling) -> Parting:
        return Parting(where, len(list(known)), ours, theirs, abs(ours - theirs), 1.5)  # type: ignore[call-overload]


def test_texts_are_followed_behind_each_tie_and_what_is_none_is_a_fault() -> None:
    ours = [10, 21, 30, 45, 50]
    asked = []

    def theirs_behind(known: object) -> list[int]:
        count = len(list(known))  # type: ignore[call-overload]
        asked.append(count)
        return [10, 20, 30, 40, 50][count:]

    found = partings("here", [1, 2, 3], ours, theirs_behind, NearIds(), pb.Sampling())
    assert [(parting.position, parting.ours, parting.theirs, parting.is_tie) for parting in found] == [
        (4, 21, 20, True),
        (6, 45, 40, False),
    ]
    assert asked == [0, 2, 4]


def test_a_text_that_ends_early_is_no_tie() -> None:
    (found,) = partings("here", [1], [7, 8], lambda known: [7, 8, 9][len(known) :], NearIds(), pb.Sampling())
    assert (found.ours, found.theirs, found.is_tie) == (None, 9, False)
