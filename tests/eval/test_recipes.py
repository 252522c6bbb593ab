"""The comparison of training recipes: the same compute for each, kept when cut off, ratios seed by seed."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from space_eval import recipes_queue
from space_eval.__main__ import main
from space_eval.recipes_data import Ingredients
from space_eval.recipes_named import Kitchen, levers, main_recipes
from space_eval.recipes_queue import Queue
from space_eval.recipes_run import RESULT_FILE, Job, job_of, read_result, run_job
from space_model.testing import tiny_checkpoint
from space_train.example import Example
from space_train.run_folder import STATE_FILE
from space_train.train_plan import TrainPlan

LINE = "def add(x, y):\n    return x + y\n\n\n"
RATES = {"paper": 1e-3, "full": 1e-2, "gated-lora": 2e-2}
COMMON = TrainPlan(
    length=48, num_masks=2, rows_per_step=2, optimiser="adamw", precision="no", evaluations=2, head_hidden=16
)
KITCHEN = Kitchen(COMMON, 4, 4, RATES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return tiny_checkpoint(folder, num_masks=0, window=160, num_layers=1, hidden_size=32, num_heads=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [LINE.replace("x", name) * 4 for name in "abcdefgh"]
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "apart.jsonl").write_text("\n".join(json.dumps({"text": LINE * 5}) for _ in range(3)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"def add{n}(x):\n"}) for n in range(2)))
    return folder


@pytest.fixture(scope="module")
def fields(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every job has in common."""
    ingredients = read(base, data)
    file = tmp_path_factory.mktemp("ingredients") / "ingredients.npz"
    ingredients.save(file)
    decoding = {"k": 2, "temperatures": [0.0], "max_tokens": 8, "batch": 2}
    told = ("base", ingredients.fingerprint)
    return {"base": str(base), "data": str(file), "fingerprints": told, "held_out_rows": 2, "decoding": decoding}


def read(base: Path, data: Path) -> Ingredients:
    return Ingredients.read(
        base,
        128,
        data=[str(data / "train.jsonl")],
        held_out=str(data / "apart.jsonl"),
        prompts=data / "prompts.jsonl",
        limit=None,
        num_prompts=2,
        length=48,
        longest_prompt=100,
    )


def job(fields: dict[str, Any], name: str, *, flops: float = 2e8, seed: int = 0, **more: Any) -> Job:
    found = [*main_recipes(KITCHEN), *levers(KITCHEN)]
    recipe = next(recipe for recipe in found if recipe.name == name)
    return job_of(recipe, seed=seed, flops=flops, tokens=None, **fields | more)


def result_of(folder: Path, wanted: Job) -> dict[str, Any]:
    wanted.save(folder)
    return run_job(folder)


# -------------------------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("name", ["paper", "full + head", "gated-lora + head", "head trained afterwards"])
def test_every_run_uses_its_budget_up_to_one_update(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    result = result_of(tmp_path, job(fields, name))
    assert 2e8 <= result["flops"] <= 2e8 + 1.5 * result["last_update_flops"]
    assert result["updates"] >= 2
    assert result["curve"][-1]["flops"] == result["flops"]
    assert {row["prompts"] for row in result["decoding"]} == {"prompts", "held out"}
    assert all(len(row["accepted_by_position"]) == 2 for row in result["decoding"])


def test_a_run_without_a_budget_measures_the_untrained_masks(fields: dict[str, Any], tmp_path: Path) -> None:
    result = result_of(tmp_path, job(fields, "full", flops=0.0))
    assert result["updates"] == 0
    assert result["flops"] == 0.0
    assert len(result["curve"]) == 1
    assert result["decoding"]


def test_text_of_its_own_counts_as_compute_and_is_learnt_from(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(base: str, prompts: list[list[int]], *, file: Path, max_tokens: int, **_: Any) -> Any:
        lines = [{"prompt": p, "output": [50] * max_tokens, "temperature": 0.0, "seed": 0} for p in prompts]
        file.write_text("\n".join(map(json.dumps, lines)))
        return argparse.Namespace(num_rows=1000, seconds=3.0)

    monkeypatch.setattr("space_eval.recipes_run.write_own_texts", written)
    monkeypatch.setattr(
        "space_eval.recipes_run.own_examples",
        lambda file: [
            Ingredients.load(Path(fields["data"])).examples[0] for _ in file.read_text(encoding="utf-8").splitlines()
        ],
    )
    result = result_of(tmp_path, job(fields, "own text"))
    assert 0 < result["own_text_flops"] < result["flops"] <= 2e8 + 1.5 * result["last_update_flops"]
    assert result["curve"][0]["flops"] == result["own_text_flops"]
    assert result["seconds"] > 3.0


def test_one_long_prompt_leaves_the_room_of_the_others_own_texts(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Ingredients.load(Path(fields["data"]))
    long = Example([50] * 47 + [51], [False] * 47 + [True])
    file, asked = tmp_path / "data.npz", list[tuple[list[list[int]], int]]()
    replace(found, examples=[long, *found.examples]).save(file)

    def written(base: str, prompts: list[list[int]], *, max_tokens: int, **_: Any) -> Any:
        asked.append((prompts, max_tokens))
        return argparse.Namespace(num_rows=1, seconds=1.0)

    monkeypatch.setattr("space_eval.recipes_run.write_own_texts", written)
    monkeypatch.setattr("space_eval.recipes_run.own_examples", lambda _: found.examples)
    wanted = job(fields | {"data": str(file)}, "own text")
    result_of(tmp_path / "run", replace(wanted, recipe=wanted.recipe | {"own_texts": 40}))
    ((prompts, max_tokens),) = asked
    assert max_tokens == COMMON.length // 2
    assert max(map(len, prompts)) <= COMMON.length // 2


def test_a_run_that_was_cut_off_goes_the_way_of_one_that_was_not(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(fields, "full + head")
    wanted = replace(wanted, recipe=wanted.recipe | {"plan": wanted.recipe["plan"] | {"checkpoint_steps": 1}})
    whole = result_of(tmp_path / "whole", wanted)

    from space_train.trainer import Run

    update, calls = Run.update, []

    def cut_off(self: Run, *arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return update(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "update", cut_off)
        with pytest.raises(KeyboardInterrupt):
            result_of(tmp_path / "cut", wanted)
    assert (tmp_path / "cut" / "train" / STATE_FILE).is_file()
    assert not (tmp_path / "cut" / RESULT_FILE).exists()
    again = run_job(tmp_path / "cut")
    assert again["updates"] == whole["updates"]
    assert again["curve"][-1]["loss"] == whole["curve"][-1]["loss"]
    assert json.dumps(again["decoding"]) == json.dumps(whole["decoding"])  # text: a nan equals itself there


def test_a_finished_run_is_read_not_run_and_leaves_no_model(fields: dict[str, Any], tmp_path: Path) -> None:
    first = result_of(tmp_path, job(fields, "paper"))
    assert not (tmp_path / "train").exists()
    file = tmp_path / RESULT_FILE
    before = file.stat().st_mtime_ns
    assert json.dumps(run_job(tmp_path)) == json.dumps(first)
    assert file.stat().st_mtime_ns == before


def test_a_seed_a_budget_or_another_plan_is_another_run_and_a_name_is_not(fields: dict[str, Any]) -> None:
    one = job(fields, "full + head")
    assert one.digest == replace(one, name="another name", threads=2, keep_model=True).digest
    others = [
        job(fields, "full + head", seed=1),
        job(fields, "full + head", flops=3e8),
        job(fields, "full"),
        job(fields, "own text"),
        job(fields, "head trained afterwards"),
        job(fields | {"fingerprints": ("another base", "x")}, "full + head"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_ingredients_come_back_from_their_file(base: Path, data: Path, tmp_path: Path) -> None:
    found = read(base, data)
    found.save(tmp_path / "a.npz")
    assert Ingredients.load(tmp_path / "a.npz") == found
    assert Ingredients.load(tmp_path / "a.npz").fingerprint == found.fingerprint


# -------------------------------------------------------------------------------------------------------- the command


def arguments(base: Path, data: Path, out: Path) -> list[str]:
    given = ["recipes", "--base", str(base), "--data", str(data / "train.jsonl"), "--out", str(out)]
    given += ["--held-out", str(data / "apart.jsonl"), "--prompts", str(data / "prompts.jsonl")]
    given += ["--flops", "1e8", "--seeds", "0", "--length", "48", "--num-masks", "2", "--max-tokens", "6"]
    given += [
        "--num-prompts",
        "2",
        "--batch",
        "2",
        "--held-out-rows",
        "2",
        "--evaluations",
        "2",
        "--optimiser",
        "adamw",
    ]
    return [
        *given,
        "--paper-rates",
        "1e-3",
        "--full-rates",
        "1e-3",
        "2e-3",
        "--gated-rates",
        "1e-3",
        "--temperature",
        "0",
    ]


class Here:
    """A process that is none: the run is done where it is started."""

    sentinel = 0

    def __init__(self, target: Any, args: tuple[Path]) -> None:
        self.args = args

    def start(self) -> None:
        run_job(*self.args)

    def is_alive(self) -> bool:
        return False

    def join(self) -> None:
        pass


def test_the_command_sweeps_then_compares_and_a_second_time_only_reads(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes_queue._CONTEXT, "Process", Here)
    monkeypatch.setattr(recipes_queue, "wait", lambda sentinels: sentinels)
    command = [*arguments(base, data, tmp_path), "--part", "main", "--only", "paper", "full + head"]
    assert main(command) == 0
    out = capsys.readouterr()
    assert out.out.count("| paper |") == 3
    assert "learning rates: paper 0.001, full 0.00" in out.out
    folders = {path.parent: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert len(folders) == 5  # two starts, two rates of full, of which the best is ours, and the paper's
    report = json.loads((tmp_path / "report" / "recipes.json").read_text())
    assert [run["name"] for run in report["main"]] == ["paper", "full + head"]
    assert (tmp_path / "report" / "curves.png").is_file()
    assert main(command) == 0
    assert {path.parent: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")} == folders
    assert "seed" not in capsys.readouterr().err


class Endless(Here):
    """A process that ends when it is told to."""

    told: ClassVar[list[Path]] = []

    def start(self) -> None:
        pass

    def terminate(self) -> None:
        self.told.extend(self.args)


def test_a_comparison_that_is_stopped_stops_its_runs_and_says_how_to_go_on(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes_queue._CONTEXT, "Process", Endless)
    monkeypatch.setattr(recipes_queue, "wait", interrupted)
    jobs = [job(fields, "paper", seed=seed) for seed in range(3)]
    with pytest.raises(recipes_queue.Stopped, match="the same command goes on"):
        Queue(tmp_path, 2).results(jobs)
    assert Endless.told == [tmp_path / wanted.folder_name for wanted in jobs[:2]]
    assert [Job.read(folder).digest for folder in Endless.told] == [wanted.digest for wanted in jobs[:2]]


@pytest.mark.slow  # torch is imported anew
def test_a_run_in_a_process_of_its_own_that_fails_names_its_log(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = job(fields, "full", flops=0.0), job(fields | {"base": str(tmp_path / "absent")}, "paper")
    with pytest.raises(recipes_queue.RunFailed, match=r"1 runs gave no result.*log\.txt"):
        Queue(tmp_path, 2).results([good, bad])
    found = read_result(tmp_path / good.folder_name)
    assert found["updates"] == 0
    assert found["curve"][0]["tokens_per_step"] >= 1.0
    assert "no result" in capsys.readouterr().err


def test_data_that_cannot_be_used_is_said_in_one_line(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "short.jsonl").write_text(json.dumps({"text": "x = 1"}))
    command = arguments(base, data, tmp_path)
    command[command.index("--held-out") + 1] = str(data / "short.jsonl")
    assert main(command) == 2
    assert "give longer ones" in capsys.readouterr().err
