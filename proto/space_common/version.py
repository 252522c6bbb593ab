"""Which version of spaceserve this is."""

from __future__ import annotations

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path

_DISTRIBUTION = "spaceserve"


@cache
def version() -> str:
    """Of the installed distribution; in a source tree that is not installed, `+source` follows its own version."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"{_of_the_source(Path(__file__).parents[2] / 'pyproject.toml')}+source"


def _of_the_source(file: Path) -> str:
    """What pyproject.toml says; 0 where the packages were copied without it."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == _DISTRIBUTION else "0"
    except (OSError, ValueError, KeyError, TypeError):
        return "0"
