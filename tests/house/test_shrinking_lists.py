"""The lists that may only shrink have no entry that is not needed, and no number larger than what there is."""

import runpy
import tomllib
from pathlib import Path

from repository import Repository


def test_the_lists_allow_what_there_is_and_no_more(root: Path, repository: Repository) -> None:
    table = runpy.run_path(str(root / "tests/house/house_table.py"))
    listed = table["LISTS"].read_text(encoding="utf-8")
    needed = table["lists"](repository, tomllib.loads(listed))
    assert tomllib.loads(listed) == tomllib.loads(needed), "run python tests/house/house_table.py --lists"
