"""The version of spaceserve."""

from __future__ import annotations

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path

_DISTRIBUTION = "spaceserve"


@cache
def version() -> str:
    """Return the installed version; of a source tree that is not installed, its own version with `+source`."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"{_of_the_source(Path(__file__).parents[2] / 'pyproject.toml')}+source"


def _of_the_source(file: Path) -> str:
    """Return the version in pyproject.toml; 0 if the packages were copied without it."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == _DISTRIBUTION else "0"
    except (OSError, ValueError, KeyError, TypeError):
        return "0"
