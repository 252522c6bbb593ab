"""The environment of a figure: machine, commit, model, flags."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from space_common.version import version

_OF_THE_MODEL = ("model_id", "model_sha", "model_dtype", "model_device_type", "attention", "block_size", "num_blocks")


def environment() -> dict[str, Any]:
    """Return date, version, commit and machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version(),
        "commit": commit(),
        "machine": machine(),
    }


def facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this machine and of the server's /info, `info`."""
    return {
        **environment(),
        "python": platform.python_version(),
        **{name.removeprefix("model_"): info.get(name) for name in _OF_THE_MODEL},
        "window": info.get("max_total_tokens"),
        "speculation": info.get("speculation"),
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
