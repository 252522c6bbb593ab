"""Memory and open files of a process, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessFigures:
    """Figures at one moment; zeros without such a process or without /proc."""

    resident_bytes: int = 0  # private and shared memory in RAM
    num_files: int = 0  # open file descriptors
    num_threads: int = 0

    @classmethod
    def of(cls, pid: int, processes: Path = Path("/proc")) -> ProcessFigures:
        folder = processes / str(pid)
        try:
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            num_files = sum(1 for _ in (folder / "fd").iterdir())
        except OSError:
            return cls()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
        resident = int(fields["VmRSS"][0]) * 1024 if "VmRSS" in fields else 0  # a zombie has none
        return cls(resident, num_files, int(fields["Threads"][0]))
