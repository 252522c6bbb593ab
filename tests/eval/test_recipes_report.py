"""Which recipes are compared, and the figures, tables and pictures that a comparison ends in."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from space_eval.recipes_data import prompts_within
from space_eval.recipes_decoding import Yield
from space_eval.recipes_figures import Spread, best_rate, ratios, total
from space_eval.recipes_named import RESCORING, Kitchen, balance, cost, levers, main_recipes, sweep, with_rate
from space_eval.recipes_plots import write_plots
from space_eval.recipes_report import Found, as_markdown, write_report
from space_train.train_plan import HeadForm, Method, TrainPlan

RATES = {"paper": 1e-3, "full": 1e-2, "gated-lora": 2e-2}
COMMON = TrainPlan(length=48, num_masks=2, rows_per_step=2, precision="no", head_hidden=16)
KITCHEN = Kitchen(COMMON, 4, 4, RATES)


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
