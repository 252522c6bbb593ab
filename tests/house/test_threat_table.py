"""Each row of the threat table in SECURITY.md names a test that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PARTIES = {
    "client without a key", "client with a key", "hostile checkpoint", "hostile prompt", "hostile schema",
    "hostile peer on the worker port",
}  # fmt: skip


def rows(text: str) -> Iterator[list[str]]:
    table = text.partition("\n## Threat table\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith("| party "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def fault(row: list[str], root: Path) -> str | None:
    """What is wrong with a row; None: nothing."""
    if len(row) != 4 or not all(row):
        return "it has not four cells"
    named = re.fullmatch(r"`(tests/\S+\.py)::(\w+)`", row[3])
    if named is None:
        return "it names no test"
    file = root / named[1]
    if not file.is_file() or not re.search(rf"^(?:async )?def {named[2]}\(", file.read_text("utf-8"), re.MULTILINE):
        return f"there is no test {row[3]}"
    return None


def test_every_row_of_the_threat_table_names_a_test_that_exists(root: Path) -> None:
    found = list(rows((root / "router/SECURITY.md").read_text("utf-8")))
    assert {row[0] for row in found} == PARTIES
    assert {row[1]: why for row in found if (why := fault(row, root)) is not None} == {}
    assert len({(row[0], row[1]) for row in found}) == len(found)


def test_a_row_without_a_test_would_be_seen(root: Path) -> None:
    here = Path(__file__).relative_to(root)
    good = ["a", "b", "c", f"`{here}::test_a_row_without_a_test_would_be_seen`"]
    assert fault(good, root) is None
    for wrong in ("`make fuzz`", f"`{here}::test_of_nothing`", "`tests/house/none.py::test_x`", ""):
        assert fault([*good[:3], wrong], root) is not None
