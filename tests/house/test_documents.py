"""What the documents tell people to type works as it is written, and where they point there is something."""

import importlib
import itertools
import json
import re
from pathlib import Path

import pytest
from perf.harness import MEASUREMENTS
from perf.harness import parser as perf_parser
from space_eval.__main__ import COMMANDS as EVALUATIONS
from space_eval.__main__ import parser as eval_parser
from space_eval.bench.command import COMMANDS as BENCHMARKS
from space_eval.bench.options import parse as parse_bench
from space_model.convert.command import parser as convert_parser
from space_model.geometry.draft_layout import DraftLayout
from space_router.commands.programs import PROGRAMS
from space_router.config import ServeConfig, settings
from space_router.foreign_flags.command_line import translate
from space_router.metrics import Metrics
from space_router.text.chat_template import BUILT_IN
from space_train.__main__ import arguments as train_arguments
from space_train.__main__ import plan_of
from space_train.estimate import ModelShape, to_markdown

GUIDES = {
    f"router/guides/{name}.md"
    for name in (
        "serve", "api", "train", "tune", "deploy", "operate", "how_it_works", "BENCHMARKS", "ARCHITECTURE",
        "coming_from",
    )
}  # fmt: skip
PAGES = GUIDES | {"docker/README.md", "docker/KUBERNETES.md", "docker/RAY.md", "router/SECURITY.md", "server/MODELS.md"}
BENCHMARK_PAGE = "router/guides/BENCHMARKS.md"
MAY_NEED = {"a GPU", "Docker", "13 GB", "Docker and a cluster", "a package registry", "those engines"}
"""What a command may need that no test has: said beside it, for whoever types it."""


@pytest.fixture(scope="module")
def readme(documents: dict[str, str]) -> str:
    return documents["README.md"]


@pytest.fixture(scope="module")
def whole(documents: dict[str, str]) -> str:
    """All pages."""
    return "\n".join(documents.values())


@pytest.fixture(scope="module")
def typed(commands: list) -> list[list[str]]:
    """Every command, split into words."""
    return [command.words for command in commands]


def targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (root / "Makefile").read_text(), flags=re.MULTILINE))


def of(typed: list[list[str]], subcommand: str) -> list[list[str]]:
    """The words behind `spaceserve SUBCOMMAND`."""
    return [words[2:] for words in typed if words[0].endswith("spaceserve") and words[1] == subcommand]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(root: Path, documents: dict[str, str]) -> list[str]:
    found = []
    for name, text in documents.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            path, _, anchor = link.partition("#")
            if re.match(r"https?://", link):
                continue
            there = (root / name).parent / path if path else root / name
            page = str(there.resolve().relative_to(root))
            if not there.exists() or (anchor and anchor not in anchors(documents.get(page, ""))):
                found.append(f"{name}: {link}")
    return found


def test_every_link_and_anchor_leads_somewhere(root: Path, documents: dict[str, str]) -> None:
    assert broken_links(root, documents) == []
    assert broken_links(root, {"README.md": "[a](docker/README.md#nowhere) [b](nothing.md) [c](#x)\n# y"}) == [
        "README.md: docker/README.md#nowhere",
        "README.md: nothing.md",
        "README.md: #x",
    ]


def test_the_readme_links_to_every_page(readme: str, documents: dict[str, str]) -> None:
    assert documents.keys() >= PAGES
    assert {name for name in PAGES if f"]({name})" not in readme} == set()
    assert {name for name in documents if name.startswith("router/guides/")} == GUIDES


def test_the_files_of_the_architecture_page_exist(root: Path, documents: dict[str, str]) -> None:
    named = set(
        re.findall(
            r"`((?:router|server|kernels|proto|docker|tests)/[\w./]+)`", documents["router/guides/ARCHITECTURE.md"]
        )
    )
    assert len(named) > 40
    assert {name for name in named if not (root / name).exists()} == set()


def test_the_readme_is_a_screen_and_a_half(readme: str) -> None:
    assert len(readme.splitlines()) <= 90


def test_what_a_command_needs_that_no_test_has_is_said_beside_it(commands: list) -> None:
    assert {command.needs for command in commands} - {""} <= MAY_NEED
    assert [each.line for each in commands if "--gpus" in each.line and each.needs != "a GPU"] == []
    assert [each.line for each in commands if each.words[0] == "docker" and not each.needs] == []


def test_every_benchmark_is_named_exists_and_takes_the_flags_it_is_given(whole: str, typed: list[list[str]]) -> None:
    named = set(re.findall(r"`spaceserve bench ([a-z][a-z-]*)", whole))
    assert named >= set(BENCHMARKS)
    for name in BENCHMARKS:
        assert hasattr(importlib.import_module(BENCHMARKS[name][0]), "main")
    lines = of(typed, "bench")
    assert len(lines) >= 4
    for flags in lines:
        if flags[0] in BENCHMARKS:
            named.discard(flags[0])
        else:
            parse_bench(flags, "")


def test_every_measurement_of_parts_is_named_and_takes_the_flags_it_is_given(
    whole: str, typed: list[list[str]]
) -> None:
    assert set(re.findall(r"`python tests/perf ([a-z-]+)", whole)) == set(MEASUREMENTS)
    lines = [words[2:] for words in typed if words[1:2] == ["tests/perf"]]
    assert len(lines) >= 4
    for flags in lines:
        perf_parser(flags).parse_args(flags)


def test_every_program_of_the_command_line_is_named_on_the_first_page(readme: str) -> None:
    listed = " ".join(re.findall(r"^\| (`spaceserve [^|]*)\|", readme, flags=re.MULTILINE))
    assert {
        name for name in {"serve", "router", "doctor", *PROGRAMS} if not re.search(rf"[ `]{name}`", listed)
    } == set()


def test_every_make_target_exists(root: Path, whole: str, readme: str) -> None:
    named = set(re.findall(r"`make ([a-z-]+)(?=[ `])", whole)) | set(
        re.findall(r"^make ([a-z-]+)", whole, re.MULTILINE)
    )
    assert named <= targets(root)
    assert "```sh\nmake serve\nmake test\n```" in readme


def test_make_help_lists_every_target_with_a_sentence(root: Path) -> None:
    text = (root / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)[1].split())
    assert phony - targets(root) == {"install"}


def test_every_flag_of_serve_exists_and_takes_its_value(typed: list[list[str]]) -> None:
    serving = [words[2:] for words in typed if words[1:2] == ["serve"] and words[0].endswith("spaceserve")]
    serving += [
        words[words.index("spaceserve") + 1 :]
        for words in typed
        if words[:2] == ["docker", "run"] and "spaceserve" in words
    ]
    flags = settings()
    assert serving
    for given in serving:
        words = given if "--help" in given else translate(given, {}, [*flags]).arguments  # also other engines' flags
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            if flag.startswith("--") and flag != "--help":
                flags[flag.removeprefix("--").replace("-", "_")][1].parse(value)


def test_the_variables_they_name_are_flags(whole: str) -> None:
    names = set(re.findall(r"SPACESERVE_([A-Z_]+)", whole))
    # no flags: the keys, which every process reads, and what is read where a wheel is built
    assert {name.lower() for name in names} <= settings().keys() | {"api_keys", "wheel_kernels"}


def test_every_convert_command_parses(typed: list[list[str]]) -> None:
    assert of(typed, "convert")
    for words in of(typed, "convert"):
        convert_parser().parse_args(words)


def test_every_train_command_parses(typed: list[list[str]]) -> None:
    training = [words for words in of(typed, "train") if "--help" not in words]
    assert training
    for words in training:
        plan_of(train_arguments(words))


def test_every_eval_command_parses_and_none_is_missing(typed: list[list[str]]) -> None:
    measuring = of(typed, "eval")
    assert {words[0] for words in measuring} == set(EVALUATIONS)
    for words in measuring:
        if "--help" not in words:
            eval_parser().parse_args(words)


def test_the_computed_table_is_what_the_command_computes(documents: dict[str, str]) -> None:
    table = to_markdown([ModelShape.of(name) for name in ("1b", "7b", "13b")], 10_000_000)
    assert table.strip() in documents[BENCHMARK_PAGE]


def test_the_figures_of_the_readme_are_in_the_benchmarks(readme: str, documents: dict[str, str]) -> None:
    section = readme.partition("## Figures")[2].partition("\n## ")[0]
    figures = re.findall(r"\*\*([\d.]+)\*\*", section)
    assert len(figures) >= 3
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", documents[BENCHMARK_PAGE]), figure


def test_measurements_are_on_the_benchmarks_page_alone(documents: dict[str, str]) -> None:
    """A measurement names its commit; model cards report those of their weights."""
    measured = re.compile(r"\bcommits?\s+[0-9a-f]{7}\b")
    cards = {"server/space_demo/README.md", "server/space_smollm2/README.md"}
    assert {name for name, text in documents.items() if measured.search(text)} <= {BENCHMARK_PAGE, *cards}
    assert len(measured.findall(documents[BENCHMARK_PAGE])) > 20


def test_the_step_is_drawn_as_it_is_laid_out(documents: dict[str, str]) -> None:
    """Rows, positions and who sees whom, for two drafts, three tokens of text."""
    k, root_position = 2, 2
    layout = DraftLayout.full(k, k)
    chain = ["root", *(f"c{i}" for i in range(1, k + 1))]
    groups = [[f"M{g}.{j}" for j in range(1, count + 1)] for g, count in enumerate(layout.masks)]
    rows = [*chain, *itertools.chain.from_iterable(groups)]
    positions = [root_position + i for i in range(k + 1)] + layout.mask_positions(root_position)
    sees = {name: chain[: i + 1] for i, name in enumerate(chain)}
    sees |= {name: chain[: g + 1] + group[: j + 1] for g, group in enumerate(groups) for j, name in enumerate(group)}

    drawing = next(
        block for block in documents["router/guides/how_it_works.md"].split("```") if "who sees whom" in block
    )
    head, _, below = drawing.partition("who sees whom")
    lines = {words[0]: words[1:] for words in map(str.split, head.splitlines()) if words}
    drawn = {words[0]: words[1:] for words in map(str.split, below.splitlines()) if words}
    assert lines["row"] == rows
    assert [int(word) for word in lines["position"]] == positions
    assert [int(word) for word in lines["predicts"]] == [position + 1 for position in positions]
    assert drawn == {name: ["■" if other in sees[name] else "·" for other in rows] for name in rows}


def test_every_file_they_build_from_exists(root: Path, typed: list[list[str]]) -> None:
    named = [words[n + 1] for words in typed if words[0] == "docker" for n, word in enumerate(words) if word == "-f"]
    assert named
    assert all((root / name).is_file() for name in named)


def test_the_python_examples_are_python_and_name_the_default_model(whole: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", whole, flags=re.DOTALL)
    for each in examples:
        compile(each, "a document", "exec")
    config = ServeConfig()
    clients = [each for each in examples if "OpenAI" in each]
    assert clients
    for each in clients:
        assert f'model="{config.model_name}"' in each
        assert f"http://{config.host}:{config.port}/v1" in each


def test_the_bodies_they_post_are_json(typed: list[list[str]]) -> None:
    bodies = [json.loads(words[words.index("-d") + 1]) for words in typed if words[0] == "curl" and "-d" in words]
    assert bodies


def test_the_series_and_templates_they_name_exist(whole: str, typed: list[list[str]]) -> None:
    rendered = Metrics().render().decode()
    assert all(name in rendered for name in re.findall(r"spaceserve_[a-z_]+_per_[a-z]+", whole))
    named = [words[words.index("--chat-template") + 1] for words in typed if "--chat-template" in words]
    assert set(named) <= BUILT_IN.keys()


def test_the_first_page_cites_the_paper_and_thanks_those_it_owes(readme: str) -> None:
    for name in ("2402.11809", "cteant/SPACE", "LLaMA-Factory", "FastChat", "Text Generation Inference"):
        assert name in readme


KEPT = {
    "server/space_server/__main__.py": "step-cost-MODEL-HASH.json",
    "proto/space_common/gguf/view.py": "`gguf`",
    "proto/space_common/tokenizer/tokenizer_files.py": "tokenizers`",
    "server/space_model/kept_structure.py": "spaceserve/transformers`",
    "kernels/space_kernels/build/cpu_library.py": "compiled operations of CPUs",
    "router/space_router/response_store.py": "--response-store",
}
"""What keeps files between starts, and the words of its row on the page."""


def test_whatever_is_kept_between_starts_has_a_row_that_says_which_version_it_belongs_to(
    root: Path, documents: dict[str, str]
) -> None:
    page = documents["router/guides/deploy.md"].partition("## State on disk")[2].partition("\n## ")[0]
    keeps = re.compile(r"(?<!def )(?:cache_folder|keep_files)\(|sqlite3\.connect\(")
    packages = (file for room in ("proto", "kernels", "router", "server") for file in (root / room).rglob("*.py"))
    found = {str(file.relative_to(root)) for file in packages if keeps.search(file.read_text(encoding="utf-8"))}
    assert found - {"server/space_server/startup/doctor.py"} == KEPT.keys()  # doctor only looks whether it may write
    assert [words for words in KEPT.values() if words not in page] == []
