"""Every option of the published script has its equal here, and every equal exists."""

import re

import pytest
from space_train.__main__ import main
from space_train.data.examples import TEMPLATES
from space_train.training.published_options import TRAINING_OPTIONS, options_markdown, options_table

# As run_sft_multi_node.sh gives them, and the further ones that SPACE added to the script's data arguments.
PUBLISHED_SCRIPT = """
stage model_name_or_path do_train dataset template finetuning_type output_dir overwrite_cache
per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type logging_steps save_strategy learning_rate
num_train_epochs plot_loss bf16 cutoff_len overwrite_output_dir mask_num remove_unused_columns mask_random mask_prob
mask_efficient_train mask_id mask_loss_weight mask_diff
"""


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9_-]*", text))


def test_every_option_of_the_published_script_is_in_the_table() -> None:
    published = set().union(*(flags(option.published) for option in TRAINING_OPTIONS))
    assert {f"--{name}" for name in PUBLISHED_SCRIPT.split()} <= published


def test_every_flag_the_table_names_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = flags(capsys.readouterr().out)
    for option in TRAINING_OPTIONS:
        assert flags(option.ours) <= known, option


def test_the_template_the_table_names_is_built_in() -> None:
    (template,) = [option.ours for option in TRAINING_OPTIONS if option.published.startswith("--template")]
    assert template.split()[1] in TEMPLATES


def test_the_tables_have_a_line_for_each_option() -> None:
    assert len(options_table().splitlines()) == len(TRAINING_OPTIONS)
    assert options_markdown().splitlines()[2] == "| `--mask_num 5` | `--num-masks 5` |  |"
