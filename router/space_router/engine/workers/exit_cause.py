"""Why a worker was lost: whether what it ran can have had a part in it."""

from __future__ import annotations

import signal
from enum import Enum
from pathlib import Path

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # somebody told the process to end


class ExitCause(Enum):
    """Who ended a worker, as far as the system tells."""

    OUTSIDE = "outside"  # somebody killed or stopped the process: no request did it
    ITSELF = "itself"  # it crashed, hung, ran out of memory or contradicted the contract
    UNKNOWN = "unknown"  # it runs where this router cannot look: its machine may be off, or it may have crashed


def cause_of_end(code: int, *, num_oom_kills: tuple[int | None, int | None]) -> ExitCause:
    """Of a process that ended with `code` (negative: by that signal).

    SIGKILL comes from somebody else or from the kernel, out of memory; the kernel counts how often it did that.
    `num_oom_kills`: its count when the process began, and now; None where there is none.
    """
    if -code in ASKED:
        return ExitCause.OUTSIDE
    before, now = num_oom_kills
    is_killed = code == -signal.SIGKILL and before is not None and before == now
    return ExitCause.OUTSIDE if is_killed else ExitCause.ITSELF


def cause_of_silence(pid: int, processes: Path = Path("/proc")) -> ExitCause:
    """Of a process that lives and is lost all the same: whether somebody has stopped it."""
    try:
        state = (processes / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ExitCause.ITSELF
    return ExitCause.OUTSIDE if state[:1] in (["T"], ["t"]) else ExitCause.ITSELF


def count_oom_kills(statistics: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes the kernel has killed for want of memory since it began; None where it does not say."""
    try:
        for line in statistics.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
