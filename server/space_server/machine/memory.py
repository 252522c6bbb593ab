"""How many blocks of keys and values there are to give away."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from space_server.machine.free_memory import FreeMemory

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_CPU_FRACTION = 0.5
"""Most of the free memory of a CPU that is taken unasked: the machine has other work."""
_GPU_FRACTION = 0.9
"""The same of a GPU, which is ours: of what is free once the weights are in memory and the largest step has been taken,
whose activations torch then holds already, less what the largest graph takes. The other tenth is for the further
graphs, for the libraries' own workspaces, and for what does not fit together."""
_DEFAULT_SEQUENCES = 64
"""Sequences of a whole window that the default has room for ..."""
_DEFAULT_BYTES = 1024**3
"""... as far as this goes on a CPU; a sequence seldom fills its window."""


class PageNeed(Protocol):
    """What pages depend on, of a model."""

    @property
    def window(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_bytes_per_token(self) -> int: ...


class NotEnoughMemory(ValueError):
    """The pages asked for cannot be had; the message names the bound and the value."""


def parse_amount(text: str) -> int | float:
    """`512MiB` -> bytes (int); `0.9` -> a fraction of the free memory (float)."""
    digits = text.strip().rstrip("BbKkMmGgIi")
    unit = text.strip()[len(digits) :].upper()
    try:
        amount = float(digits)
    except ValueError:
        amount = -1.0
    if unit not in _UNITS or not 0 < amount < float("inf"):
        raise NotEnoughMemory(f"{text!r} is no amount of memory; write e.g. 1GiB, 800MiB, or a fraction such as 0.9.")
    if not unit and amount <= 1 and "." in digits:
        return amount
    return int(amount * _UNITS[unit])


def free_bytes(
    device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can be taken on the device now; on a CPU within what container and process may use."""
    return FreeMemory.on(device, meminfo=meminfo, cgroup=cgroup).num_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def give_back_unused() -> None:
    """Let the GPU have again what torch keeps for later: whole blocks may fit where pieces did not."""
    torch.cuda.empty_cache()  # nothing where there is no GPU


def check_num_blocks(facts: PageNeed, *, num_blocks: int, block_size: int, available: int) -> int:
    """`num_blocks`, as asked for by number. Raises NotEnoughMemory if they do not fit."""
    needed = num_blocks * block_size * facts.kv_bytes_per_token
    if needed > available:
        raise NotEnoughMemory(
            f"--num-blocks {num_blocks} needs {needed} bytes; {available} are available on {facts.device}."
        )
    return num_blocks


def choose_num_blocks(facts: PageNeed, *, block_size: int, amount: int | float | None, available: int) -> int:
    """Blocks of `block_size` slots that fit in `amount` (bytes, a fraction of `available`, or None: a default).

    The default is room for 64 whole windows, at most 1 GiB and half the free memory on a CPU, but one window where that
    fits; on a GPU 0.9 of what is
    free after the largest step. Raises NotEnoughMemory if a single window does not fit.
    """
    block_bytes = facts.kv_bytes_per_token * block_size
    window_blocks = -(-facts.window // block_size)
    if amount is None and facts.device.type == "cpu":
        wanted = min(_DEFAULT_SEQUENCES * window_blocks * block_bytes, _DEFAULT_BYTES)
        budget = min(wanted, int(available * _CPU_FRACTION))
        if budget < window_blocks * block_bytes <= available:
            budget = window_blocks * block_bytes  # without one there is nothing to serve
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
