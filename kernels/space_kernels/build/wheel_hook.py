"""hatch's build hook: with SPACESERVE_WHEEL_KERNELS set, the wheel carries the compiled CPU operations of every kind.

    SPACESERVE_WHEEL_KERNELS=1 python -m build --wheel       or: uv build --wheel

The libraries are compiled by zig for the named architecture (`1`: this machine's) and need glibc 2.28, so the wheel is
tagged manylinux_2_28. Without the variable the wheel is pure: its libraries are compiled where it is installed.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SPACESERVE_WHEEL_KERNELS"
ZIG = "ziglang==0.17.1"

sys.path.insert(0, str(Path(__file__).parents[2]))
from space_kernels.build import compiler, cpu_library  # noqa: E402


class WheelKernels(BuildHookInterface[Any]):
    """Adds space_kernels/built/*.so to a wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What a build environment needs beside hatchling."""
        return [ZIG] if _machine() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries. Raises OSError with the compiler's message."""
        machine = _machine()
        if not machine or version == "editable":
            return
        if machine not in cpu_library.KINDS:
            known = ", ".join(cpu_library.KINDS)
            raise ValueError(f"{VARIABLE} is {machine!r}; there are operations for {known}.")
        self.folder = tempfile.TemporaryDirectory()
        os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path(self.folder.name) / "zig"))
        for kind in cpu_library.KINDS[machine]:
            place = Path(self.folder.name) / kind
            place.mkdir()
            library = cpu_library.build(compiler.zig(machine), kind, machine, place)
            inside = f"space_kernels/built/{cpu_library.library_name(kind, machine)}"
            build_data["force_include"][str(library)] = inside
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{compiler.GLIBC.replace('.', '_')}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _machine() -> str:
    """Return the architecture that the variable names, "" for none."""
    value = os.environ.get(VARIABLE, "")
    return platform.machine() if value == "1" else value
