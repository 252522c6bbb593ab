"""Memory of a worker: how freed memory is kept, and how many KV-cache blocks fit."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Protocol

import torch
from space_model.free_memory import FreeMemory

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
