"""The repository as a whole: where it is, which files it has, and what its documents tell people to type."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import interface
import pytest
from repository import Repository

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Command:
    """A line of a shell block: `make gpu-check  # needs a GPU`."""

    document: str  # relative to the root
    line: str  # without the remark
    needs: str  # what no test here has; empty: a test runs it

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def named(self) -> str:
        return f"{self.document}: {self.line}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(interface.Recorder(), "recorder of every test")


def listed(root: Path) -> list[Path]:
    """Every file that is in the repository or is about to be, relative to its root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [Path(name) for name in sorted(filter(None, listing.stdout.split("\0"))) if (root / name).is_file()]


def read_documents(root: Path) -> dict[str, str]:
    """Every page, by its path; the README comes first."""
    pages = sorted((path for path in listed(root) if path.suffix == ".md"), key=lambda path: (len(path.parts), path))
    return {str(path): (root / path).read_text(encoding="utf-8") for path in pages}


def commands_of(document: str, text: str) -> list[Command]:
    """Every line of every shell block; a line that ends with a backslash goes on."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            typed, _, remark = line.partition("  # ")
            if typed.strip():
                found.append(Command(document, typed.strip(), remark.removeprefix("needs ").strip()))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def repository() -> Repository:
    return Repository(ROOT)


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file that is in the repository or is about to be, relative to its root."""
    return listed(ROOT)


@pytest.fixture(scope="session")
def documents() -> dict[str, str]:
    """The text of every page, by its path."""
    return read_documents(ROOT)


@pytest.fixture(scope="session")
def commands(documents: dict[str, str]) -> list[Command]:
    """What the pages tell people to type, in their order."""
    return [command for name, text in documents.items() for command in commands_of(name, text)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `command` is made for each that needs nothing special."""
    if "command" in metafunc.fixturenames:
        pages = read_documents(ROOT).items()
        plain = [each for name, text in pages for each in commands_of(name, text) if not each.needs]
        metafunc.parametrize("command", plain, ids=lambda each: each.named)
