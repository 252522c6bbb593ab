"""What the system says of a process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessFigures:
    """Of one moment; zeros where there is no such process, or no /proc."""

    resident_bytes: int = 0  # memory of its own and shared, in RAM
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
