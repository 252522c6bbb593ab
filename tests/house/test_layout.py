"""A top-level folder is a room's address, not a package; nothing in the repository knows the machine it was made on.

Folders hold about twenty modules, a class name means one thing, and words of the old vocabulary do not come back. What
is otherwise today is in `snapshots/may_only_shrink.toml`; `python tests/house/house_table.py --lists` shrinks it.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import LARGEST_FOLDER, Repository, nodes_of, old_words, prose_words

SNAPSHOTS = Path(__file__).parent / "snapshots"

TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "Dockerfile", "LICENSE", "Makefile", "README.md", "docker", "kernels",
    "proto", "pyproject.toml", "router", "server", "tests",
}  # fmt: skip
MACHINE = re.compile(r"/(?:work|root|home|Users)/[a-z]|/opt/(?:wheels|pypi)")


def test_the_top_level_holds_the_rooms_and_nothing_else(files: list[Path]) -> None:
    assert {path.parts[0] for path in files} <= TOP_LEVEL


def test_a_top_level_folder_holds_no_python_of_its_own(files: list[Path]) -> None:
    loose = {path for path in files if len(path.parts) == 2 and path.suffix == ".py"}
    assert loose <= {Path("tests/conftest.py")}  # pytest's own file: nobody imports it by name


def test_every_package_is_typed(files: list[Path]) -> None:
    inits = [path for path in files if path.name == "__init__.py" and len(path.parts) == 3]
    packages = {path.parent for path in inits if path.parts[0] != "tests"}
    code = {package for package in packages if package.name not in {"space_demo", "space_smollm2"}}
    assert {package / "py.typed" for package in code} <= set(files)


def test_no_file_names_a_folder_of_one_machine(root: Path, files: list[Path]) -> None:
    found = []
    for path in files:
        if path.suffix in {".safetensors", ".gguf", ".npz", ".png"} or path == Path("tests/house/test_layout.py"):
            continue
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{path}:{number}: {line.strip()}")
    assert found == []


def test_nothing_is_left_for_later(root: Path, files: list[Path]) -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    sources = [path for path in files if path.suffix in {".py", ".sh", ".proto"} and path.parent.name != "house"]
    assert [str(path) for path in sources if marks.search((root / path).read_text())] == []


@pytest.fixture(scope="module")
def shrinking() -> dict[str, Any]:
    return tomllib.loads((SNAPSHOTS / "may_only_shrink.toml").read_text(encoding="utf-8"))


def grown(now: Mapping[str, int], listed: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{listed.get(name, 0)} -> {size}" for name, size in now.items() if size > listed.get(name, 0)}


def test_a_folder_has_at_most_twenty_modules(repository: Repository, shrinking: dict[str, Any]) -> None:
    large = {name: size for name, size in repository.folder_sizes().items() if size > LARGEST_FOLDER}
    assert grown(large, shrinking["folders"]) == {}


def test_a_folder_of_tests_has_at_most_twenty_modules(files: list[Path]) -> None:
    modules = [path for path in files if path.parts[0] == "tests" and path.suffix == ".py"]
    sizes = Counter(str(path.parent) for path in modules if path.name not in ("__init__.py", "conftest.py"))
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_one_class_name_means_one_thing(repository: Repository, shrinking: dict[str, Any]) -> None:
    shared = repository.shared_class_names()
    listed = shrinking["shared_class_names"]
    counts = {name: len(modules) for name, modules in shared.items()}
    assert {name: shared[name] for name in grown(counts, listed)} == {}


def test_no_identifier_of_the_old_vocabulary_comes_back(repository: Repository, shrinking: dict[str, Any]) -> None:
    words = old_words(SNAPSHOTS / "old_words.txt")
    now = repository.old_identifiers(words)
    names = {word.word: word.now for word in words}
    more = grown(now, shrinking["old_identifiers"])
    assert {f"{word} (now {names[word]})": size for word, size in more.items()} == {}


def test_the_subject_of_a_sentence_is_the_code_or_the_user(repository: Repository, shrinking: dict[str, Any]) -> None:
    prose = repository.old_prose(prose_words(SNAPSHOTS / "old_prose.txt"))
    now = {f"{place}: {word}": count for (place, word), count in prose.items()}
    places = shrinking["old_prose"].items()
    listed = {f"{place}: {word}": count for place, counts in places for word, count in counts.items()}
    assert grown(now, listed) == {}


def test_no_program_of_ours_starts_another_without_the_safe_path(root: Path, files: list[Path]) -> None:
    product = [path for path in files if path.parts[0] in ("proto", "kernels", "router", "server", "docker")]
    unsafe = re.compile(r'sys\.executable,\s*(?!"-P"|"-I")"-|(?:python3?|PYTHON_IN_VENV\)) -m space_', re.DOTALL)
    texts = {path: (root / path).read_text() for path in (*product, Path("Makefile"), Path("Dockerfile"))
             if path.suffix in {".py", ".sh"} or path.name.endswith(("Makefile", "Dockerfile"))}  # fmt: skip
    code = {path: re.sub(r'"""(?:.|\n)*?"""|prog="[^"]*"|Example: [^"]*', "", text) for path, text in texts.items()}
    assert [str(path) for path, text in code.items() if unsafe.search(text)] == []


ROOMS = (
    "router/space_router", "server/space_server", "server/space_model", "kernels/space_kernels", "proto/space_proto",
)  # fmt: skip
DATES = {
    "router/space_router/api_keys.py",  # keys expire at a date
    "router/space_router/api/openai/stream.py",  # `created`
    "router/space_router/api/openai/responses.py",  # `created_at`, `completed_at`
    "router/space_router/api/pooling/sources.py",  # `created`
    "router/space_router/api/service.py",  # `created` of a model
    "router/space_router/engine/engine_metrics.py",  # the value of `spaceserve_lora_requests_info`
    "router/space_router/text/chat_template.py",  # `strftime_now`
    "server/space_server/startup/calibration.py",  # the day on which a file was written
}
"""Places that show a date to clients, write one into a file, or compare one with what an operator wrote."""


def wall_clocks(source: str) -> list[str]:
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{alias.name}" for alias in node.names if alias.name in {"time", "time_ns"}]
    return found


def test_only_dates_that_clients_are_told_come_from_a_clock_that_can_be_set(root: Path) -> None:
    using = {
        str(file.relative_to(root))
        for room in ROOMS
        for file in (root / room).rglob("*.py")
        if wall_clocks(file.read_text(encoding="utf-8"))
    }
    assert using == DATES


def test_a_clock_that_can_be_set_is_seen() -> None:
    assert wall_clocks("import time\nbegun = time.time()") == ["time.time"]
    assert wall_clocks("from time import time") == ["time.time"]
    assert wall_clocks("import time\nbegun = time.monotonic()") == []
