"""The comparison of training recipes: the same compute for each, kept when cut off, ratios seed by seed."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from space_eval import recipes_queue
from space_eval.__main__ import main
from space_eval.recipes_data import Ingredients, prompts_within
from space_eval.recipes_decoding import Yield
from space_eval.recipes_figures import Spread, best_rate, ratios, total
from space_eval.recipes_named import RESCORING, Kitchen, balance, cost, levers, main_recipes, sweep, with_rate
from space_eval.recipes_plots import write_plots
from space_eval.recipes_queue import Queue
from space_eval.recipes_report import Found, as_markdown, write_report
from space_eval.recipes_run import RESULT_FILE, Job, job_of, read_result, run_job
from space_model.testing import tiny_checkpoint
from space_train.train_plan import HeadForm, Method, TrainPlan
from space_train.trainer import STATE_FILE

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


# -------------------------------------------------------------------------------------------------------- the recipes


def test_each_lever_is_the_reference_with_something_switched() -> None:
    reference, *switched = levers(KITCHEN)
    for recipe in switched:
        assert recipe.as_json() != reference.as_json(), recipe.name
        assert recipe.plan.method is Method.FULL
    assert len({json.dumps(recipe.as_json()) for recipe in switched}) == len(switched)


def test_the_papers_recipe_has_one_cut_hard_labels_fresh_places_and_its_own_rate() -> None:
    plan = main_recipes(KITCHEN)[0].plan
    assert (plan.distill, plan.fixed_cuts, plan.head, plan.optimiser) == (False, False, HeadForm.NONE, "adamw")
    assert plan.peak_rate == RATES["paper"]
    assert plan.rows_per_step == 4
    fixed = next(recipe.plan for recipe in main_recipes(KITCHEN) if recipe.name == "paper, cuts fixed")
    assert replace(fixed, fixed_cuts=False) == plan


def test_a_sweep_has_one_run_for_each_rate_and_the_best_drafts_most() -> None:
    swept = sweep(KITCHEN, "gated-lora", [0.1, 0.2, 0.3])
    assert [recipe.plan.peak_rate for recipe in swept] == [0.1, 0.2, 0.3]
    curves = [{"curve": [{"tokens_per_step": value}]} for value in (1.1, 1.3, math.nan)]
    assert best_rate(list(zip([0.1, 0.2, 0.3], curves, strict=True))) == 0.2


def test_a_muon_rate_brings_a_fifth_of_it_for_adamw() -> None:
    plan = with_rate(replace(COMMON, optimiser="muon"), 0.01)
    assert (plan.muon_rate, plan.peak_rate) == (0.01, 0.002)


def test_the_balance_and_the_cost_have_every_point_that_was_asked_for() -> None:
    plans = [recipe.plan for recipe in balance(KITCHEN)]
    assert [plan.ar_share for plan in plans[:5]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [plan.mask_loss_weight for plan in plans[5:]] == [0.3, 1.0, 3.0]
    assert [recipe.plan.method.value for recipe in cost(KITCHEN)] == ["sft", "full", "full", "gated-lora"]


# -------------------------------------------------------------------------------------------------------- the figures


def result(name: str, seed: int, accepted: int, text: int) -> dict[str, Any]:
    """A run with 10 steps in each of two cells."""
    half = {"num_steps": 10, "num_accepted": accepted, "num_accepted_text": text}
    rows = [
        {"prompts": prompts, "temperature": 0.0, "yield": half, "looping": 0.5, "num_outputs": 4}
        | {"accepted_by_position": [0.5, 0.25]}
        for prompts in ("code", "held out")
    ]
    entry = {"loss": 2.0, "mask_1": 0.5, "mask_2": 0.4, "tokens_per_step": 1.7, "flops": 1e12, "seconds": 9.0}
    return {
        "name": name,
        "seed": seed,
        "plan": {"optimiser": "adamw"},
        "decoding": rows,
        "rescored": {"64": rows},
        "curve": [entry | {"flops": 0.0}, entry],
        "flops": 1e12,
        "seconds": 1.0,
        "updates": 3,
        "tokens": 100,
        "masks": 50,
        "peak_bytes": 10,
    }


def test_a_ratio_is_taken_seed_by_seed_over_all_cells() -> None:
    runs = [result("paper", 0, 4, 2), result("paper", 1, 5, 4), result("full", 1, 15, 4), result("full", 0, 8, 6)]
    assert ratios(runs, "full", "paper") == [2.0, 3.0]
    assert ratios(runs, "full", "paper", blanks=False) == pytest.approx([3.0, 1.0])
    spread = Spread.of(ratios(runs, "full", "paper"))
    assert (spread.mean, spread.low, spread.high) == (2.5, 2.0, 3.0)
    assert spread.text() == "2.50 (2.00–3.00)"
    assert total(runs[0]).accepted == 0.4


def test_a_yield_of_no_steps_is_no_number() -> None:
    assert math.isnan(Yield().accepted)
    assert (Yield(2, 1, 0) + Yield(2, 3, 2)).accepted == 1.0
    assert Spread.of([math.nan]).text() == "–"


def test_the_report_has_a_row_for_every_recipe_and_pictures(tmp_path: Path) -> None:
    found = Found({"base": "tiny"})
    found.start = [result("start, full", 0, 1, 1)]
    found.main = [result(r.name, seed, 4 + seed, 2) for r in main_recipes(KITCHEN) for seed in (0, 1)]
    found.levers = [result(r.name, 0, 6, 2) for r in levers(KITCHEN)]
    found.balance = [result(r.name, 0, 6, 2) for r in balance(KITCHEN)]
    found.cost = [result(r.name, 0, 6, 2) for r in cost(KITCHEN)]
    found.sweep = {"paper": [(0.1, result("a", 0, 1, 1)), (0.2, result("b", 0, 1, 1))]}
    text = as_markdown(found)
    for recipe in [*main_recipes(KITCHEN), *levers(KITCHEN), *balance(KITCHEN), *cost(KITCHEN)]:
        if recipe.name != RESCORING:
            assert f"| {recipe.name} |" in text, recipe.name
    assert "| 64 |" in text
    assert "| start, full |" in text
    assert {path.name for path in write_plots(tmp_path, found)} == {
        "curves.png",
        "curves_by_seconds.png",
        "loss.png",
        "recipes.png",
        "levers.png",
        "balance.png",
    }


def test_a_report_keeps_the_parts_that_were_not_asked_for_again(tmp_path: Path) -> None:
    facts: dict[str, object] = {"base": "tiny", "training text": "t", "compute of a run": "1", "commit": "a"}
    first = Found(facts, main=[result("paper", 0, 4, 2)], sweep={"paper": [(0.1, result("a", 0, 1, 1))]})
    write_report(tmp_path, first)
    assert Found.kept(tmp_path, facts | {"commit": "b"}) == replace(first, facts=facts | {"commit": "b"})
    assert Found.kept(tmp_path, facts | {"base": "another"}).main == []


def test_prompts_are_cut_from_texts_that_are_long_enough() -> None:
    texts = [list(range(n)) for n in (5, 10, 30, 8)]
    cut = prompts_within(texts, 8, length=8)
    assert [len(prompt) for prompt in cut] == [8, 8, 8]
    assert cut == prompts_within(texts, 8, length=8)
    assert all(prompt == list(range(prompt[0], prompt[0] + 8)) for prompt in cut)


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
