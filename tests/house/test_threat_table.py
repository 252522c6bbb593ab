"""Each claim of SECURITY.md, and each row of its threat table, names tests that exist, and the latter ones that run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PARTIES = {
    "client without a key", "client with a key", "hostile checkpoint", "hostile prompt", "hostile schema",
    "hostile peer on the worker port",
}  # fmt: skip


NAMED = re.compile(r"`(tests/\S+\.py)::(\w+)`")


def rows(text: str, chapter: str = "Threat table") -> Iterator[list[str]]:
    table = text.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith(("| party ", "| threat ")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def is_there(file: str, name: str, root: Path) -> bool:
    path = root / file
    return path.is_file() and re.search(rf"^(?:async )?def {name}\(", path.read_text("utf-8"), re.MULTILINE) is not None


def is_slow(file: str, name: str, root: Path) -> bool:
    """Whether `make test` leaves the test, or each of its file, out."""
    marks = list[ast.expr]()
    for node in ast.parse((root / file).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks += node.value.elts if isinstance(node.value, ast.List) else [node.value]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            marks += node.decorator_list
    return "pytest.mark.slow" in map(ast.unparse, marks)


def fault_of_claim(row: list[str], root: Path) -> str | None:
    """What is wrong with a row of claims; None: nothing."""
    if len(row) != 3 or not row[1]:
        return "it has no claim"
    if ";" in row[1]:
        return "it makes more than one claim"
    if not row[2] or NAMED.sub("", row[2]).strip(", "):
        return "something else than tests stands in its last cell"
    missing = [f"{file}::{name}" for file, name in NAMED.findall(row[2]) if not is_there(file, name, root)]
    return f"there is no {missing}" if missing else None


def fault(row: list[str], root: Path) -> str | None:
    """What is wrong with a row; None: nothing."""
    if len(row) != 4 or not all(row):
        return "it has not four cells"
    if NAMED.sub("", row[3]).strip(", "):
        return "it names something else than tests"
    named = NAMED.findall(row[3])
    if missing := [f"{file}::{name}" for file, name in named if not is_there(file, name, root)]:
        return f"there is no {missing}"
    slow = [f"{file}::{name}" for file, name in named if is_slow(file, name, root)]
    return f"`make test` does not run {slow}" if slow else None


def test_every_row_of_the_threat_table_names_a_test_that_exists(root: Path) -> None:
    found = list(rows((root / "router/SECURITY.md").read_text("utf-8")))
    assert {row[0] for row in found} == PARTIES
    assert {row[1]: why for row in found if (why := fault(row, root)) is not None} == {}
    assert len({(row[0], row[1]) for row in found}) == len(found)


def test_every_claim_names_tests_that_exist(root: Path) -> None:
    text = (root / "router/SECURITY.md").read_text("utf-8")
    claims = list(rows(text, "What stands in the way"))
    assert len(claims) > 70
    assert {row[1]: why for row in claims if (why := fault_of_claim(row, root)) is not None} == {}
    for party, _, not_trusted, tests in rows(text, "Trust"):
        assert bool(not_trusted) == bool(NAMED.findall(tests)), party
    assert [one for one in NAMED.findall(text) if not is_there(*one, root)] == []


def test_a_claim_without_a_test_would_be_seen(root: Path) -> None:
    here = Path(__file__).relative_to(root)
    test = f"`{here}::test_a_claim_without_a_test_would_be_seen`"
    assert fault_of_claim(["", "it holds", f"{test}, {test}"], root) is None
    nothing = f"`{here}::test_of_nothing`"
    for claim, tests in (
        ("", test),
        ("it holds; it is so", test),
        *(("it holds", cell) for cell in ("", "x", nothing)),
    ):
        assert fault_of_claim(["", claim, tests], root) is not None


def test_a_row_without_a_test_would_be_seen(root: Path) -> None:
    here = Path(__file__).relative_to(root)
    good = ["a", "b", "c", f"`{here}::test_a_row_without_a_test_would_be_seen`"]
    assert fault(good, root) is None
    assert fault([*good[:3], f"{good[3]}, {good[3]}"], root) is None
    measured = "`tests/router/process/test_crowd_process.py::test_sixty_four_slow_readers_are_felt_by_no_fast_one`"
    slow = "`tests/router/engine/test_scenarios.py::test_the_same_over_two_thousand_scenarios`"
    for wrong in ("`make fuzz`", f"`{here}::test_of_nothing`", "`tests/house/none.py::test_x`", "", measured, slow):
        assert fault([*good[:3], wrong], root) is not None
