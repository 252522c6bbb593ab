"""What README.md tells people to type works as it is written."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from space_eval.__main__ import COMMANDS as EVALUATIONS
from space_eval.__main__ import parser as eval_parser
from space_eval.bench import COMMANDS as BENCHMARKS
from space_eval.bench import parse as parse_bench
from space_model.convert import _parser as convert_parser
from space_router.config import ServeConfig, settings
from space_router.metrics import Metrics
from space_router.text.chat_template import BUILT_IN
from space_train.__main__ import arguments as train_arguments
from space_train.__main__ import plan_of
from space_train.estimate import to_markdown
from space_train.model_shape import ModelShape


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def commands(readme: str) -> list[list[str]]:
    """Every line of every shell block, split into words."""
    blocks = re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line]


def targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (root / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_benchmark_exists_and_takes_the_flags_it_is_given(readme: str, commands: list[list[str]]) -> None:
    named = set(re.findall(r"`spaceserve bench ([a-z][a-z-]*)", readme))
    assert named == set(BENCHMARKS)
    for name in named:
        assert hasattr(importlib.import_module(BENCHMARKS[name][0]), "main")
    lines = [words[2:] for words in commands if words[0].endswith("spaceserve") and words[1] == "bench"]
    assert len(lines) >= 4
    for flags in lines:
        parse_bench(flags, "")


def test_every_make_target_exists(root: Path, readme: str) -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\n|`)", readme))
    assert named >= {"serve", "test"}
    assert named <= targets(root)


def test_make_help_lists_every_target_with_a_sentence(root: Path) -> None:
    text = (root / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)[1].split())
    assert phony - targets(root) == {"install"}


def test_every_command_begins_with_a_program_that_is_known(commands: list[list[str]]) -> None:
    known = {"make", "docker", "curl", "docker/install.sh", ".venv/bin/spaceserve", ".venv/bin/hf", ".venv/bin/python"}
    assert {words[0] for words in commands} <= known


def test_every_flag_of_serve_exists_and_takes_its_value(commands: list[list[str]]) -> None:
    serving = [words for words in commands if words[1:2] == ["serve"] and words[0].endswith("spaceserve")]
    serving += [
        words[words.index("spaceserve") :]
        for words in commands
        if words[:2] == ["docker", "run"] and "spaceserve" in words
    ]
    flags = settings()
    assert serving
    for words in serving:
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            if flag.startswith("--") and flag != "--help":
                flags[flag.removeprefix("--").replace("-", "_")][1].parse(value)


def test_the_variables_it_names_are_flags(readme: str) -> None:
    names = set(re.findall(r"SPACESERVE_([A-Z_]+)", readme))
    assert {name.lower() for name in names} <= settings().keys()


def test_every_convert_command_parses(commands: list[list[str]]) -> None:
    converting = [words[2:] for words in commands if words[1:2] == ["convert"]]
    assert converting
    for words in converting:
        convert_parser().parse_args(words)


def test_every_train_command_parses(commands: list[list[str]]) -> None:
    training = [words[2:] for words in commands if words[1:2] == ["train"] and "--help" not in words]
    assert training
    for words in training:
        plan_of(train_arguments(words))


def test_every_eval_command_parses_and_none_is_missing(commands: list[list[str]]) -> None:
    measuring = [words[2:] for words in commands if words[1:2] == ["eval"]]
    assert {words[0] for words in measuring} == set(EVALUATIONS)
    for words in measuring:
        if "--help" not in words:
            eval_parser(words).parse_args(words)


def test_the_computed_table_is_what_the_command_computes(readme: str) -> None:
    table = to_markdown([ModelShape.of(name) for name in ("1b", "7b", "13b")], 10_000_000)
    assert table.strip() in readme


def test_every_file_it_builds_from_exists(root: Path, commands: list[list[str]]) -> None:
    named = [words[n + 1] for words in commands if words[0] == "docker" for n, word in enumerate(words) if word == "-f"]
    assert named
    assert all((root / name).is_file() for name in named)


def test_the_python_example_is_python_and_names_the_default_model(readme: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    for each in examples:
        compile(each, "README.md", "exec")
    (example,) = [each for each in examples if "OpenAI" in each]
    config = ServeConfig()
    assert f'model="{config.model_name}"' in example
    assert f"http://{config.host}:{config.port}/v1" in example


def test_the_bodies_it_posts_are_json(commands: list[list[str]]) -> None:
    bodies = [json.loads(words[words.index("-d") + 1]) for words in commands if "-d" in words]
    assert bodies


def test_the_series_and_templates_it_names_exist(readme: str, commands: list[list[str]]) -> None:
    rendered = Metrics().render().decode()
    assert all(name in rendered for name in re.findall(r"spaceserve_[a-z_]+_per_[a-z]+", readme))
    named = [words[words.index("--chat-template") + 1] for words in commands if "--chat-template" in words]
    assert set(named) <= BUILT_IN.keys()


def test_it_cites_the_paper_and_thanks_those_it_owes(readme: str) -> None:
    for name in ("2402.11809", "cteant/SPACE", "LLaMA-Factory", "FastChat", "Text Generation Inference"):
        assert name in readme
