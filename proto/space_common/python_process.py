"""Starts Python subprocesses without the current folder on their path.

`python -m` puts the current folder first on the path, so that a `json.py` or `torch.py` there would run in place of the
real module. `-P` omits the folder, and PYTHONSAFEPATH does the same for the subprocess's own children. The folders of
PYTHONPATH stay.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SAFE_PATH = "PYTHONSAFEPATH"


def module_command(module: str, *words: object) -> list[str]:
    """Return the command `python -m module words` of this interpreter."""
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def safe_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for a subprocess, with the variables `added`."""
    return {**os.environ, **(added or {}), SAFE_PATH: "1"}
