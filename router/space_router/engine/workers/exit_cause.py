"""The cause of a worker's loss: whether a request can have crashed it."""

from __future__ import annotations

import signal
from enum import Enum
from pathlib import Path

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the process was asked to end


class ExitCause(Enum):
    """Why a worker was lost, as far as the system tells."""

    EXTERNAL = "external"  # killed or stopped from outside: no request caused it
    CRASHED = "crashed"  # it crashed, hung, ran out of memory or violated the protocol
    UNKNOWN = "unknown"  # it is remote: its machine may be off, or it may have crashed


def cause_of_end(code: int, *, num_oom_kills: tuple[int | None, int | None]) -> ExitCause:
    """Return the cause for a process that ended with exit code `code` (negative: by that signal).

    SIGKILL comes from another process, or from the kernel when memory runs out; the kernel counts the latter.
    `num_oom_kills`: its count when the process began and now; None if unavailable.
    """
    if -code in TERMINATION_SIGNALS:
        return ExitCause.EXTERNAL
    before, now = num_oom_kills
    is_killed = code == -signal.SIGKILL and before is not None and before == now
    return ExitCause.EXTERNAL if is_killed else ExitCause.CRASHED


def cause_of_silence(pid: int, processes: Path = Path("/proc")) -> ExitCause:
    """Return the cause for a process that is alive but silent: EXTERNAL if it was stopped by a signal."""
    try:
        state = (processes / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ExitCause.CRASHED
    return ExitCause.EXTERNAL if state[:1] in (["T"], ["t"]) else ExitCause.CRASHED


def count_oom_kills(statistics: Path = Path("/proc/vmstat")) -> int | None:
    """Return the kernel's count of out-of-memory kills since boot; None if unavailable."""
    try:
        for line in statistics.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
