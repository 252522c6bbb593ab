"""Where a measurement is kept: its record for programs, its words for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, name: str, record: Mapping[str, object], text: str) -> None:
    """`name`.json and `name`.md in the folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")
