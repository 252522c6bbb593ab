"""What the paper asked, of whom, and what it published; where the questions are read from."""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from space_eval.__main__ import main
from space_eval.flags import RecordError
from space_eval.paper import command
from space_eval.paper.table import PUBLISHED, PublishedFigure, published_for
from space_eval.paper.tasks import FAMILIES, TASKS, family_of, load_questions, place_and_split
from space_train.training.published_options import EVALUATION_OPTIONS

ADD = {"task_id": "t/0", "prompt": 'def add(a, b):\n    """Their sum."""\n', "test": "check(add)\n"}


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_code_is_asked_for_in_the_papers_words() -> None:
    question = TASKS["human_eval"].read(ADD, "-")
    asked = "Complete the following python code. Give the answer in a code block starts with '```python' and end with"
    assert question.turns == (f"{asked} '``'\n{ADD['prompt']}",)
    assert question.plain_turns == (ADD["prompt"],)
    assert FAMILIES["plain"].prompt(question.plain_turns, []) == ADD["prompt"]


def test_each_family_is_spoken_to_in_its_own_frame() -> None:
    said = ["Hello"]
    assert FAMILIES["qwen"].prompt(said, []) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert FAMILIES["chatglm"].prompt(said, []) == "\n[Round 0]\n\n问：Hello\n\n答："
    assert FAMILIES["llama-2"].prompt(said, []) == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions.\nHuman:Hello\nAssistant:"
    )
    assert FAMILIES["llama-2-chat"].prompt(said, []).startswith("<<SYS>>\nYou are a helpful, respectful")
    assert FAMILIES["falcon"].prompt(said, []) == FAMILIES["internlm"].prompt(said, []) == "\nHuman:Hello\nAssistant:"


def test_the_second_turn_holds_the_first_answer() -> None:
    turns = ["One?", "And two?"]
    assert FAMILIES["falcon"].prompt(turns, ["1."]) == "\nHuman:One?\nAssistant:\n1.\nHuman:And two?\nAssistant:"
    assert (
        FAMILIES["llama-2-chat"]
        .prompt(turns, ["1."])
        .endswith("[INST]One? [/INST]\n1. </s><s>\n[INST]And two? [/INST]")
    )
    assert FAMILIES["plain"].prompt(turns, ["1."]) == "One?\n1.\nAnd two?"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("demo", "plain"),
        ("meta-llama/Llama-2-7b-hf", "llama-2"),
        ("models/llama2-13b-chat/", "llama-2-chat"),
        ("AntMan/vicuna-v1.3-7b-space", "vicuna"),
        ("THUDM/chatglm3-6b", "chatglm"),
        ("Qwen/Qwen-14B", "qwen"),
        ("internlm/internlm-20b", "internlm"),
        ("tiiuae/falcon-40b", "falcon"),
        ("runs/vicuna-7b/model", "vicuna"),  # where a run of ours leaves its checkpoint
        ("qwen/model/", "qwen"),
        ("runs/mine/model", "plain"),
        ("model", "plain"),
    ],
)
def test_a_models_name_tells_its_family(name: str, family: str) -> None:
    assert family_of(name).name == family


@pytest.mark.parametrize(
    ("family", "name", "row", "xsum", "human_eval"),
    [
        ("chatglm", "chatglm3-6b", "ChatGLM-3-6B", (2.04, 1.48), (3.34, 2.73)),
        ("llama-2", "llama-2-7b", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
        ("llama-2-chat", "Llama-2-13b-chat-hf", "LLaMA-2-13B", (2.36, 2.10), (3.76, 3.44)),
        ("llama-2", "x/llama-2-70B", "LLaMA-2-70B", (2.54, 2.35), (4.32, 4.01)),
        ("qwen", "Qwen-7B", "Qwen-14B", (2.15, 1.94), (3.51, 3.18)),
        ("internlm", "internlm-20b", "InternLM-20B", (2.15, 1.96), (3.31, 3.19)),
        ("falcon", "falcon-40b", "Falcon-40B", (2.17, 2.01), (3.58, 3.61)),
        ("plain", "demo", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
        ("vicuna", "vicuna-v1.3-7b", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
    ],
)
def test_the_published_row_of_each_family_stands_beside_ours(
    family: str, name: str, row: str, xsum: tuple[float, float], human_eval: tuple[float, float]
) -> None:
    found = published_for(family, name)
    assert found.name == row
    assert found.figures["xsum"] == PublishedFigure(*xsum)
    assert found.figures["human_eval"] == PublishedFigure(*human_eval)
    assert set(found.figures) == {"xsum", "human_eval", "cip"}


def test_the_published_table_has_its_seven_models() -> None:
    assert len(PUBLISHED) == 7
    assert PUBLISHED["LLaMA-2-70B"].figures["cip"] == PublishedFigure(2.09, 1.91)


def test_help_maps_every_option_of_the_published_script(capsys: pytest.CaptureFixture[str]) -> None:
    published = "--mask_id --mask_num --mask_diff --do_sample --use_cache --model_type --dataset --llm_dir --save_data"
    mapped = {option.published.split()[0]: option.ours for option in EVALUATION_OPTIONS}
    assert set(published.split()) <= set(mapped)
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    shown = capsys.readouterr().out
    assert all(option.published in shown and option.ours in shown for option in EVALUATION_OPTIONS)


def test_the_flags_named_beside_the_published_ones_exist() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    for option in EVALUATION_OPTIONS:
        if option.ours.startswith("--"):
            assert {word for word in option.ours.split() if word.startswith("--")} <= known


def test_gsm8ks_reference_is_what_stands_behind_the_marks() -> None:
    question = TASKS["gsm8k"].read({"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, "gsm8k/1")
    assert (question.name, question.turns, question.reference) == ("gsm8k/1", ("How many?",), "4")


def test_instructions_may_have_an_input() -> None:
    assert TASKS["cip"].read({"prompt": "Sing."}, "-").turns == ("Sing.",)
    assert TASKS["cip"].read({"instruction": "Add.", "input": "1 2"}, "-").turns == ("Add.\n1 2",)


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", {"document": "d", "headline": "h"})
    with pytest.raises(RecordError, match=r"has no field summary, which XSum needs. It has: document, headline"):
        load_questions(TASKS["xsum"], str(file))


def test_a_source_may_name_configuration_and_split(tmp_path: Path) -> None:
    assert place_and_split("openai/gsm8k:main@train") == ("openai/gsm8k:main", "train")
    assert place_and_split("a/b") == ("a/b", "test")
    odd = jsonl(tmp_path / "a@b.jsonl", ADD)
    assert place_and_split(str(odd)) == (str(odd), "test")


def test_without_a_network_one_line_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_dataset(name: str, config: str | None, split: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert main(["paper", "--tasks", "xsum"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "EdinburghNLP/xsum" in said
    assert "--data xsum=FILE" in said
