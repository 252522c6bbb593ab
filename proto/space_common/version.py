"""What runs, for records of measurements: version, commit, and the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

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


def environment() -> dict[str, Any]:
    """Return date, version, commit and machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version(),
        "commit": commit(),
        "machine": machine(),
    }


def machine() -> str:
    """Describe processor, cores and memory."""
    name = _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    memory = _field(Path("/proc/meminfo"), "MemTotal").split()
    gib = f", {int(memory[0]) / 1024**2:.0f} GiB" if memory else ""
    return f"{name}, {os.cpu_count()} cores{gib}, {platform.system()} {platform.release()}"


def commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` if it has changes; None without a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return made.stdout.strip() or None


def _field(path: Path, name: str) -> str:
    """Return the first value of `name` in a file of `name : value` lines, or ""."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
