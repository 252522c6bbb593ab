"""What a run takes of its machine: memory on a CPU and space on the disk, known before it begins."""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.train_command import train, write_records
from space_model.free_memory import FreeMemory
from space_train.estimate import CPU_ALLOWANCE, CPU_FILL, SHAPES, ModelShape, estimate, fitted, parts_on_cpu
from space_train.train_plan import Method, TrainPlan


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"instruction": f"Say {n}", "output": f"the cat and {n} more cats sat on a mat"} for n in range(20)]
    return write_records(tmp_path_factory.mktemp("data") / "chats.jsonl", records)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    found = FreeMemory(int(num_bytes), "the limit in /sys/fs/cgroup/memory.max")
    monkeypatch.setattr(FreeMemory, "on", lambda *_, **__: found)


MEASURE = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
sys.path.insert(0, sys.argv[1])
from doubles.training import random_ids, rows_for
from space_train.data.examples import Example
from space_train.train_plan import Budget, Method, TrainPlan
from space_train.training.trainer import TrainingRun
torch.set_num_threads(1)
method, precision, rows, out = Method(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])
layers, length = int(sys.argv[6]), int(sys.argv[7])
plan = TrainPlan(method=method, budget=Budget(steps=1), length=length, rows_per_step=rows, precision=precision)
config = LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=8192, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
model.save_pretrained(out / "base")
examples = [Example(random_ids(length, seed), [True] * length) for seed in range(rows)]
run = TrainingRun(model, out / "base", rows_for(plan, examples), plan, out / "run", tokenizer_size=8192,
    given_mask_ids=None, inputs={})
before = run.peak_bytes()
run.update(1.0)
print(before, run.peak_bytes())
"""


@pytest.mark.parametrize(
    ("method", "precision", "rows"),
    [
        ("gated-lora", "bf16", 4),
        pytest.param("gated-lora", "bf16", 8, marks=pytest.mark.slow),
        pytest.param("gated-lora", "no", 4, marks=pytest.mark.slow),
        pytest.param("gated-lora", "bf16", 1, marks=pytest.mark.slow),
        pytest.param("full", "no", 4, marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_a_run_on_a_cpu_is_that_of_its_process(
    method: str, precision: str, rows: int, tmp_path: Path
) -> None:
    support = Path(__file__).parents[1] / "support"
    # Most CPUs compute bfloat16 products slowly: a small model, of which what is beside Python and torch counts, too.
    is_half = precision == "bf16"
    layers, length = (2, 128) if is_half else (6, 256)
    command = [sys.executable, "-c", MEASURE, str(support), method, precision, str(rows), str(tmp_path)]
    command += [str(layers), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    before, measured = map(float, done.stdout.split()[-2:])
    shape = replace(
        SHAPES["1b"], vocab_size=8192, hidden_size=256, num_layers=layers, num_heads=4, num_kv_heads=2,
        intermediate_size=768,
    )  # fmt: skip
    plan = TrainPlan(method=Method(method), length=length, rows_per_step=rows, precision=precision)
    found = estimate(shape, plan, cpu=True).bytes
    assert 0.85 * measured < found < 1.6 * measured, (found / 1e9, measured / 1e9)
    grown, added = measured - before, found - CPU_ALLOWANCE
    assert not is_half or 0.5 * grown < added < 1.5 * grown, (added / 1e6, grown / 1e6)


def test_updates_come_in_parts_that_a_cpu_computes_at_full_speed() -> None:
    assert parts_on_cpu(TrainPlan()) == 2, "four rows of 1024 are enough"
    assert parts_on_cpu(TrainPlan(length=256)) == 1
    assert parts_on_cpu(TrainPlan(length=48)) == 1
    assert parts_on_cpu(TrainPlan(rows_per_step=6, length=300)) == 1
    assert parts_on_cpu(TrainPlan(rows_per_step=1)) == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_are_chosen_by_the_memory_that_is_free(
    parts: int,
    base: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(base, chats, tmp_path / "first", "--accumulate 1") == 0
    plan = TrainPlan(**{**TRAINED, **plan_in(tmp_path / "first", *TRAINED)})
    needed = estimate(ModelShape.of(str(base)), replace(plan, accumulate=parts), cpu=True).bytes
    said = capsys.readouterr().err
    assert re.search(
        r"^memory: about 0\.6 of the \d+\.\d GB that are free; updates of 4 rows are computed in 1 part "
        r"\(--accumulate 1\)\.$",
        said,
        re.M,
    )
    free(monkeypatch, needed / CPU_FILL + 1)
    assert train(base, chats, tmp_path / "out") == 0
    assert f"updates of 4 rows are computed in {parts} part" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(base, chats, tmp_path / "out", "--steps 4") == 0
    assert f"updates of 4 rows are computed in {parts} part" in capsys.readouterr().err, "as before"


def test_parts_leave_room_for_other_programs_on_a_cpu_where_any_do() -> None:
    shape, plan = SHAPES["1b"], TrainPlan()
    sizes = {n: estimate(shape, replace(plan, accumulate=n), cpu=True).bytes for n in (1, 2, 8)}
    chosen = {
        memory: fit and fit.accumulate
        for memory in (sizes[1] / 0.79, sizes[1] / 0.81, sizes[8] / 0.94, sizes[8] / 0.96)
        for fit in [fitted(shape, plan, memory, cpu=True)]
    }
    assert list(chosen.values()) == [1, 2, 8, None]
    gpu = estimate(shape, plan).bytes / 0.94
    assert fitted(shape, plan, gpu) == plan, "a GPU has no other programs"


TRAINED: dict[str, Any] = {
    "num_masks": 3, "length": 48, "rows_per_step": 4, "head_hidden": 8, "lora_rank": 2, "precision": "no",
    "anchors_per_token": 0.375,
}  # fmt: skip


def plan_in(out: Path, *names: str) -> dict[str, Any]:
    plan = json.loads((out / "run.json").read_text())["plan"]
    return {name: plan[name] for name in names}


def test_a_run_that_cannot_fit_is_refused_before_anything_is_written(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1e5)
    assert train(base, chats, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "0.0 GB are free (the limit in /sys/fs/cgroup/memory.max). " in said
    assert "a shorter --length or a smaller model" in said
    assert not (tmp_path / "out").exists()


def test_parts_that_do_not_fit_are_refused_with_those_that_do(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(base, chats, tmp_path / "first", "--accumulate 4") == 0
    plan = TrainPlan(**{**TRAINED, **plan_in(tmp_path / "first", *TRAINED)})
    shape = ModelShape.of(str(base))
    one, four = (estimate(shape, replace(plan, accumulate=n), cpu=True).bytes for n in (1, 4))
    monkeypatch.setattr("space_train.estimate.FILL", 1.0)
    monkeypatch.setattr("space_train.estimate.CPU_ALLOWANCE", 0.0)
    free(monkeypatch, (one + four) / 2 - CPU_ALLOWANCE)
    capsys.readouterr()
    assert train(base, chats, tmp_path / "out", "--accumulate 1") == 2
    assert "An update in 1 part needs about" in (said := capsys.readouterr().err)
    assert "Give --accumulate 2" in said or "Give --accumulate 4" in said


def test_memory_that_runs_out_on_a_cpu_is_named(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("space_train.training.trainer.TrainingRun.update", full)
    assert train(base, chats, tmp_path / "out", "--accumulate 2") == 2
    assert "An update in 2 parts does not fit" in (said := capsys.readouterr().err)
    assert "Give --accumulate 4" in said


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_the_space_is_named_before_anything_is_written(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 10**6, 10**6))
    assert train(base, chats, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"The disk of {tmp_path / 'out'} has 0.001 GB free, and the run needs 0.02" in said
    assert "for the run's state" in said
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_before_the_first_save_is_not_said_to_hold_one(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert train(base, chats, tmp_path / "out", "--evaluations 0") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("No update was saved.")
    assert not (tmp_path / "out" / "state.pt").exists()
