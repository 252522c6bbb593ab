"""A top-level folder is a room's address, not a package; nothing in the repository knows the machine it was made on."""

import re
from pathlib import Path

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
