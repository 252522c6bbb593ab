"""Nothing is installed that is not pinned with hashes, and nothing in the house runs what it reads."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = [*sorted((ROOT / "docker" / "locks").glob("*.txt")), ROOT / "proto" / "space_common" / "default_model.txt"]
ROOMS = ("proto", "kernels", "router", "server")
DANGEROUS = {
    "pickle.load", "pickle.loads", "torch.load", "yaml.load", "marshal.loads", "shelve.open", "joblib.load",
    "dill.load", "os.system", "os.popen", "ssl._create_unverified_context",
}  # fmt: skip


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_is_one_version_with_hashes_from_a_registry(lock: Path) -> None:
    lines = [line for line in lock.read_text().replace("\\\n", " ").splitlines() if line and line[0] not in "# -"]
    assert lines
    for line in lines:
        requirement = line.split(" #")[0]
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,-]+\])?==[^ ]+", requirement), line
        if lock.name != "torch.txt":  # whose builds for this or that device are no one file
            assert "--hash=sha256:" in requirement, line.split()[0]
        assert "://" not in requirement, line.split()[0]


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield file, node


def test_nothing_that_is_read_is_run() -> None:
    found = []
    for file, call in _calls():
        function = call.func
        where = f"{file.relative_to(ROOT)}:{call.lineno}"
        if isinstance(function, ast.Name) and function.id in ("eval", "exec"):
            found.append(where)
        name = ast.unparse(function)
        if name in DANGEROUS and "weights_only=True" not in ast.unparse(call):
            found.append(where)
        for keyword in call.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("trust_remote_code", "shell") and is_true:
                found.append(where)
    assert found == []
