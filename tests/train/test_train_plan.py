"""The switches of a run: each that does not do is refused with its bound, its value and the cure."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from space_train.__main__ import arguments, main, plan_of
from space_train.data.examples import TEMPLATES
from space_train.train_plan import (
    Anchors,
    Budget,
    HeadForm,
    InvalidPlan,
    LearningRate,
    Method,
    TrainPlan,
    between,
    paper,
)
from space_train.training.published_options import TRAINING_OPTIONS, options_table


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"ar_share": 1.5}, "ar_share is a share and lies in 0..1; got 1.5"),
        ({"keep": -0.1}, "keep is a share"),
        ({"warmup": math.nan}, "warmup is a share and lies in 0..1; got nan"),
        ({"num_masks": 0}, "num_masks must be at least 1; got 0"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"lora_alpha": 0.0}, "lora_alpha must be above 0; got 0"),
        ({"anchors_per_token": -1.0}, "anchors_per_token must be above 0; got -1"),
        ({"learning_rate": 0.0}, "peak_rate must be above 0; got 0"),
        ({"learning_rate": math.nan}, "peak_rate must be above 0; got nan"),
        ({"mask_loss_weight": -1.0}, "mask_loss_weight must be 0 or more; got -1"),
        ({"seed": -1}, "seed must be 0 or more; got -1"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1; got 0"),
        ({"rows_per_step": 8, "accumulate": 3}, r"rows_per_step \(8\) must be a multiple of 3 parts"),
        ({"length": 12}, "Rows of 12 ids are too short for 5 masks"),
        ({"method": Method.HEAD, "head": HeadForm.NONE}, "Method head trains the draft head alone: give it a form"),
        ({"activation_checkpointing": True}, "Activation checkpointing is for methods that train all weights"),
        ({"mask_loss_weight": 0.0, "head": HeadForm.NONE}, "Nothing would be learnt"),
        ({"anchors": Anchors.ONE}, "One cut a text needs rows of one text each: leave packing off"),
        ({"precision": "fp16"}, "precision is bf16 or no; got 'fp16'"),
        ({"optimiser": "sgd"}, "The optimiser is adamw or muon; got 'sgd'"),
        ({"recurrent_head": -1}, "recurrent_head must be 0 or more; got -1"),
        ({"recurrent_head": 8, "recurrent_drafts": 0}, "num_recurrent_drafts must be at least 1; got 0"),
        ({"recurrent_head": 8, "draft_vocab": 0}, "draft_vocab must be at least 1; got 0"),
        ({"recurrent_head": 8, "method": Method.FULL}, "A recurrent head learns over a base that stays as it is"),
        ({"recurrent_head": 8, "recurrent_drafts": 12, "length": 24}, "Rows of 24 ids are too short for 12 drafts"),
        ({"recurrent_head": 8, "recurrent_drafts": 17}, "A recurrent head makes at most 16 drafts; got 17"),
    ],
)
def test_switches_that_do_not_do_are_refused_by_name(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        TrainPlan(**switches)


def planned(flags: str) -> TrainPlan:
    return plan_of(arguments(["--model", "m", "--data", "d", "--out", "o", *flags.split()]))


def test_flags_change_what_they_name_and_win_over_the_preset() -> None:
    assert planned("") == TrainPlan()
    assert planned("--preset paper") == paper(TrainPlan(length=2048, rows_per_step=32, warmup=0.0))
    plan = planned("--preset paper --ar-share 0 --anchors many --head mlp --steps 7")
    assert plan.method is Method.FULL
    assert (plan.ar_share, plan.anchors, plan.head, plan.budget) == (0.0, Anchors.MANY, HeadForm.MLP, Budget(steps=7))
    assert planned("--method sft").head is HeadForm.NONE
    assert planned("--no-pack --no-distill --lora-rank 4") == TrainPlan(pack=False, distill=False, lora_rank=4)
    plan = planned("--epochs 0.5 --steps 3 --minutes 2 --tokens 1e7 --flops 1e15")
    assert plan.budget == Budget(epochs=0.5, steps=3, minutes=2.0, tokens=10**7, flops=1e15)


@pytest.mark.parametrize("flag", ["--steps -1", "--minutes nan", "--tokens inf", "--flops -2"])
def test_a_budget_that_no_run_has_is_refused(flag: str) -> None:
    with pytest.raises(InvalidPlan, match="A budget is 0 or more, and finite"):
        planned(flag)


def test_the_rate_is_the_methods_own_unless_given() -> None:
    assert planned("--method full").peak_rate == planned("--method sft").peak_rate == 5e-5
    assert planned("--method gated-lora").peak_rate == planned("--method head").peak_rate == 1e-3
    assert planned("--learning-rate 2e-4").peak_rate == 2e-4


def test_all_values_of_a_flag_that_is_given_twice_are_taken() -> None:
    flags = {"--data": (["a"], ["b", "c"]), "--mask-ids": (["1"], ["2"]), "--decontaminate": (["x"], ["y"])}
    words = [word for name, values in flags.items() for given in values for word in (name, *given)]
    found = arguments(["--model", "m", "--out", "o", *words])
    assert (found.data, found.mask_ids, found.decontaminate) == (["a", "b", "c"], [1, 2], [Path("x"), Path("y")])


def test_every_switch_that_has_no_flag_is_known() -> None:
    """A switch that is forgotten on the command line is one that nobody has."""
    options = vars(arguments(["--model", "m", "--data", "d", "--out", "o"]))
    by_other_names = {"budget", "pack", "distill"}  # --steps …, --no-pack, --no-distill
    without = set(TrainPlan.__dataclass_fields__) - set(options) - by_other_names
    assert without == set()


def test_progress_is_the_larger_share_of_the_budgets_and_never_above_one() -> None:
    budget = Budget(minutes=2, tokens=1000)
    assert budget.progress(30, 100) == 0.25
    assert budget.progress(30, 900) == 0.9
    assert budget.progress(500, 0) == 1.0
    assert Budget(minutes=0).progress(0, 0) == 1.0
    assert Budget(tokens=0).progress(0, 0) == 1.0
    with pytest.raises(ValueError, match="needs a budget"):
        Budget()


def test_the_rate_warms_up_stays_and_falls_to_its_end() -> None:
    rate = LearningRate(warmup=0.1, decay_from=0.5, final=0.2)
    assert 0 < rate.at(0.0) < rate.at(0.05) < 1.0
    assert rate.at(0.1) == rate.at(0.4) == 1.0
    assert rate.at(0.75) == pytest.approx(0.6)
    assert rate.at(1.0) == pytest.approx(0.2)
    assert [between(2.0, 4.0, progress) for progress in (0.0, 0.5, 1.0)] == [2.0, 3.0, 4.0]


# As run_sft_multi_node.sh gives them, and the further ones that SPACE added to the script's data arguments.
PUBLISHED_SCRIPT = """
stage model_name_or_path do_train dataset template finetuning_type output_dir overwrite_cache
per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type logging_steps save_strategy learning_rate
num_train_epochs plot_loss bf16 cutoff_len overwrite_output_dir mask_num remove_unused_columns mask_random mask_prob
mask_efficient_train mask_id mask_loss_weight mask_diff
"""


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9_-]*", text))


def test_the_table_has_every_option_of_the_published_script() -> None:
    published = set().union(*(flags(option.published) for option in TRAINING_OPTIONS))
    assert {f"--{name}" for name in PUBLISHED_SCRIPT.split()} <= published
    (template,) = [option.ours for option in TRAINING_OPTIONS if option.published.startswith("--template")]
    assert template.split()[1] in TEMPLATES
    assert len(options_table().splitlines()) == len(TRAINING_OPTIONS)


def test_every_flag_the_table_names_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = flags(capsys.readouterr().out)
    for option in TRAINING_OPTIONS:
        assert flags(option.ours) <= known, option
