"""The memory that this process can still allocate, within the limits of its machine, its container and its own."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that can be allocated now."""

    num_bytes: int
    bound: str  # what bounds it, for messages

    @classmethod
    def on(
        cls,
        device: torch.device,
        *,
        meminfo: Path = Path("/proc/meminfo"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        process: Path = Path("/proc/self"),
    ) -> FreeMemory:
        """On a CPU the least left by the machine, every control group of this process, and its own limits."""
        if device.type == "cuda":
            return cls(int(torch.cuda.mem_get_info(device)[0]), f"the memory of {device}")
        bounds = [_machine(meminfo), *_groups(cgroup, process / "cgroup"), *_limits(process / "status")]
        return min(bounds, key=lambda bound: bound.num_bytes)

    def among(self, num_processes: int) -> FreeMemory:
        """Return the share of each of `num` processes."""
        return FreeMemory(self.num_bytes // num_processes, self.bound)


def _machine(meminfo: Path) -> FreeMemory:
    """What Linux calls available; on other systems all the memory."""
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return FreeMemory(int(line.split()[1]) * 1024, "the machine's memory")
    return FreeMemory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory")


def _groups(root: Path, own: Path) -> Iterator[FreeMemory]:
    """Yield what is left below each memory limit (v1 or v2) of the control groups; reclaimable file pages count as
    free. A container sees its own group at the root; outside of one, the process's group lies below it."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    paths = {controllers: path.strip("/") for _, controllers, path in (line for line in lines if len(line) == 3)}
    whole, memory = root, root / "memory"
    yield from _limited(whole, paths.get(""), "memory.max", "memory.current", "inactive_file")
    v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    yield from _limited(memory, v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limited(root: Path, path: str | None, limit: str, usage: str, idle: str) -> Iterator[FreeMemory]:
    here = root / path if path else root
    folders = [here]
    while here != root:
        here = here.parent
        folders.append(here)
    for folder in folders:
        try:
            bound, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            statistics = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue  # no such group here, or one without figures
        if bound.isdecimal():  # else `max`: no limit
            reclaimable = sum(int(line.split()[1]) for line in statistics if line.split()[0] == idle)
            yield FreeMemory(max(0, int(bound) - used + reclaimable), f"the limit in {folder / limit}")


def _limits(status: Path) -> Iterator[FreeMemory]:
    """Yield what is left below `ulimit -v` and `ulimit -d`."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    used = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    for which, field, flag in ((resource.RLIMIT_AS, "VmSize", "-v"), (resource.RLIMIT_DATA, "VmData", "-d")):
        bound, _ = resource.getrlimit(which)
        if bound != resource.RLIM_INFINITY and field in used:
            yield FreeMemory(max(0, bound - used[field]), f"this process's limit (ulimit {flag})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
