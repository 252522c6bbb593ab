"""Memory of a worker: what can be allocated now, how it is kept, and how many KV-cache blocks fit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


# Constants of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8

KEPT, PAD = 1 << 30, 64 << 20
"""Bytes: tensors up to KEPT are taken from the heap, whose free end may be as large; it grows by PAD."""

LARGE = 1 << 20
"""While weights are loaded, tensors from this size on return to the system when freed."""


def use_one_heap() -> bool:
    """Let all threads allocate from one heap, and large tensors outside of it until `keep_freed_memory`. Call before
    any thread starts. Returns whether it took effect: False without glibc.

    While a model loads, each weight exists as read, then packed; freed ones leave holes that no later tensor fits. Seen
    with a model of 125M in float32: 1138 MiB resident after the load, where weights are 592.
    """
    return _told((_ARENA_MAX, 1), (_MMAP_THRESHOLD, LARGE))


def keep_freed_memory() -> bool:
    """Keep memory freed by tensors for later ones from now on, and return what is free now to the system. Returns
    whether it took effect; without glibc nothing changes.

    Each step allocates and frees the same tensors. By default glibc returns large ones at once and faults them in
    again: seen on 2 cores, a plain step of 64 sequences with 400 ids each took 105 ms like that and 67 ms without.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return _told((_ARENA_MAX, 1), (_TRIM_THRESHOLD, KEPT), (_TOP_PAD, PAD), (_MMAP_THRESHOLD, KEPT))


def _told(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(option, value) == 1 for option, value in options)


_CPU_FRACTION = 0.5
"""Largest default share of a CPU's free memory: other programs need the rest."""
_GPU_FRACTION = 0.9
"""Default share of a GPU's free memory, measured after loading the weights, running the largest step, whose activations
torch keeps, and subtracting the largest graph. The rest is for further graphs, library workspaces and fragmentation."""
_DEFAULT_SEQUENCES = 64
"""Sequences of a whole window that the default holds on a CPU ..."""
_DEFAULT_BYTES = 1024**3
"""... within this bound; few sequences fill their window."""


class PageNeed(Protocol):
    """What the size of the KV cache depends on in a model."""

    @property
    def window(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_bytes_per_token(self) -> int: ...


class NotEnoughMemory(ValueError):
    """The KV cache does not fit; the message names the bound and the value."""


def free_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that can be allocated on the device now; on a CPU within container and process limits."""
    return FreeMemory.on(device, meminfo=meminfo, cgroup=cgroup).num_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def give_back_unused() -> None:
    """Release torch's cached GPU memory: whole blocks may fit where fragments did not."""
    torch.cuda.empty_cache()  # does nothing without a GPU


def check_num_blocks(facts: PageNeed, *, num_blocks: int, block_size: int, available: int) -> int:
    """Return `num_blocks` as configured. Raises NotEnoughMemory if they do not fit."""
    needed = num_blocks * block_size * facts.kv_bytes_per_token
    if needed > available:
        raise NotEnoughMemory(
            f"--num-blocks {num_blocks} needs {needed} bytes; {available} are available on {facts.device}."
        )
    return num_blocks


def choose_num_blocks(facts: PageNeed, *, block_size: int, amount: int | float | None, available: int) -> int:
    """Return how many blocks of `block_size` slots fit in `amount`: bytes, a fraction of `available`, or None for a
    default.

    On a CPU the default holds 64 whole windows, within 1 GiB and half the free memory, but at least one window where
    that fits. On a GPU it is 0.9 of what is free after the largest step. Raises NotEnoughMemory if not even one window
    fits.
    """
    block_bytes = facts.kv_bytes_per_token * block_size
    window_blocks = -(-facts.window // block_size)
    if amount is None and facts.device.type == "cpu":
        wanted = min(_DEFAULT_SEQUENCES * window_blocks * block_bytes, _DEFAULT_BYTES)
        budget = min(wanted, int(available * _CPU_FRACTION))
        if budget < window_blocks * block_bytes <= available:
            budget = window_blocks * block_bytes  # at least one window, to serve anything
    elif amount is None:
        budget = int(available * _GPU_FRACTION)
    else:
        budget = int(available * amount) if isinstance(amount, float) else amount
    if budget > available:
        raise NotEnoughMemory(f"--kv-memory asks for {budget} bytes; {available} are available on {facts.device}.")
    if budget < window_blocks * block_bytes:
        raise NotEnoughMemory(
            f"Keys and values of one window of {facts.window} need {window_blocks * block_bytes} bytes; there are "
            f"{budget}. Raise --kv-memory or lower --max-model-len."
        )
    return budget // block_bytes


def is_lost(device: torch.device) -> bool:
    """Whether the device is lost to this process: some GPU errors (failed memory, an address out of bounds) make every
    later step fail, until another process uses the GPU."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
