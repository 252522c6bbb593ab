"""How one program of ours starts another: never with the current folder on Python's path.

`python -m` puts the current folder first on the path, so that a `json.py` or `torch.py` that lies there is executed in
place of the real one. `-P` leaves the folder out, and PYTHONSAFEPATH does so in what the program starts itself. The
folders of PYTHONPATH stay.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SAFE_PATH = "PYTHONSAFEPATH"


def module_command(module: str, *words: object) -> list[str]:
    """`python -m module words`, in this interpreter."""
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def safe_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a program it starts, with the variables `added`."""
    return {**os.environ, **(added or {}), SAFE_PATH: "1"}
