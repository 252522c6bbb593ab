"""Writes a measurement as a JSON record and a Markdown report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, name: str, record: Mapping[str, object], text: str) -> None:
    """Write `name`.json and `name`.md to the folder, creating it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text.rstrip("\n") + "\n", encoding="utf-8")
