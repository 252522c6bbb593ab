"""The folder for files that were measured or compiled on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/spaceserve`, or `~/.cache/spaceserve`."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "spaceserve"
