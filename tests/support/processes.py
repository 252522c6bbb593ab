"""Memory, open files and ports of processes that tests start."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessFigures:
    """Figures at one moment; zeros without such a process or without /proc."""

    resident_bytes: int = 0  # private and shared memory in RAM
    num_files: int = 0  # open file descriptors
    num_threads: int = 0
    peak_bytes: int = 0  # the most that was ever resident

    @classmethod
    def of(cls, pid: int, processes: Path = Path("/proc")) -> ProcessFigures:
        folder = processes / str(pid)
        try:
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            num_files = sum(1 for _ in (folder / "fd").iterdir())
        except OSError:
            return cls()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
        resident, peak = (int(fields[name][0]) * 1024 if name in fields else 0 for name in ("VmRSS", "VmHWM"))
        return cls(resident, num_files, int(fields["Threads"][0]), peak)  # a zombie has no memory


_given_ports: set[int] = set()


def free_port() -> int:
    """Return a free port, never the same twice. It is below the system's ephemeral range, so that the system does not
    assign it before it is bound.
    """
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        if port in _given_ports:
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given_ports.add(port)
            return port
    raise OSError("no port is free")
