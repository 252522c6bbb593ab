"""The C++ compiler that the CPU operations are built with: the machine's own, or zig from PyPI's `ziglang` package.

zig is a clang with its own headers and C++ runtime, installed by pip. It also builds for other architectures and for an
older glibc than the machine's, which a wheel needs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

GLIBC = "2.28"
"""The oldest glibc that what zig builds runs with: that of manylinux_2_28."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
_ZIG_FLAGS = {"-march=armv8.2-a+bf16": "-mcpu=generic+v8_2a+bf16"}
"""What zig calls a flag of gcc and clang."""
_SECONDS = 1800.0
"""Timeout of one compiler call, in seconds: the first link by zig builds a C++ runtime, which takes minutes."""

MISSING = "no C++ compiler is installed (Debian: `apt install g++`; without root: `pip install ziglang`)"


@dataclass(frozen=True)
class Compiler:
    """A compiler with gcc's command line."""

    command: tuple[str, ...]
    is_zig: bool = False

    def __str__(self) -> str:
        """For a log line: what it is, and how long it takes."""
        return (
            "zig: once, some minutes, as it builds its C++ runtime first"
            if self.is_zig
            else (f"{self.command[0]}: once, some 10 s")
        )

    def build(self, sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
        """Compile `sources` in parallel and link them to a shared library in `folder`. Raises OSError with the
        compiler's message."""
        objects = [folder / f"{source.name}.o" for source in sources]
        flags = [*_FLAGS, *(_ZIG_FLAGS.get(flag, flag) if self.is_zig else flag for flag in flags)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pairs = zip(sources, objects, strict=True)
            list(pool.map(lambda pair: self._run(folder, *flags, "-c", str(pair[0]), "-o", str(pair[1])), pairs))
        library = folder / "library.so"
        self._run(folder, "-shared", "-pthread", "-s", "-o", str(library), *map(str, objects))
        return library

    def _run(self, folder: Path, *arguments: str) -> None:
        # zig builds its C++ runtime once per cache folder
        caches = {name: str(folder / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
        environment = caches | os.environ if self.is_zig else None
        try:
            done = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, timeout=_SECONDS, env=environment
            )
        except subprocess.SubprocessError as error:
            raise OSError(str(error)) from error
        if done.returncode:
            raise OSError(f"{self.command[0]} failed: {done.stderr.strip()[-400:]}")


def find_compiler() -> Compiler:
    """Return $CXX or the machine's compiler, else zig if it is installed in this environment. Raises OSError."""
    own = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if own is not None:
        return Compiler((own,))
    if importlib.util.find_spec("ziglang") is None:
        raise OSError(MISSING)
    return zig(platform.machine())


def zig(machine: str) -> Compiler:
    """Return zig for an architecture as `platform.machine` names it."""
    command = (sys.executable, "-P", "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}")
    return Compiler(command, is_zig=True)
