"""Memory of a worker: how much is free, and how many KV-cache blocks fit."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from space_model.free_memory import FreeMemory

_CPU_FRACTION = 0.5
"""Largest default share of a CPU's free memory: other programs need the rest."""
_GPU_FRACTION = 0.9
"""Default share of a GPU's free memory, measured after loading the weights, running the largest step, whose activations
torch keeps, and subtracting the largest graph. The rest is for further graphs, library workspaces and fragmentation."""
_DEFAULT_SEQUENCES = 64
"""Sequences that run at once by default on a CPU, and the least on a GPU. On a CPU the default pages hold as many whole
windows, within `_DEFAULT_BYTES`."""
_DEFAULT_BYTES = 1024**3
"""Most bytes of the default pages on a CPU; few sequences fill their window."""
_GPU_SEQUENCES = (256, 128)
"""A GPU runs the first of these numbers of sequences by default for which its pages have room."""
_TOKENS_OF_EACH = 1024
"""Tokens of a sequence for which a page must be there; longer sequences wait for pages or are preempted."""


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


def choose_max_sequences(
    facts: PageNeed,
    *,
    asked: int | None,
    amount: int | float | None,
    available: int,
    num_blocks: int | None = None,
    block_size: int = 1,
) -> int:
    """Return how many sequences run at once: `asked`; None: 64, or on a GPU 256 or 128 where keys and values of as many
    sequences of 1024 tokens fit in `num_blocks` of `block_size` slots, or in `amount` of what is `available`."""
    if asked is not None:
        return asked
    if facts.device.type == "cpu":
        return _DEFAULT_SEQUENCES
    if num_blocks is not None:
        num_bytes = num_blocks * block_size * facts.kv_bytes_per_token
    elif isinstance(amount, int):
        num_bytes = amount
    else:
        num_bytes = int(available * (_GPU_FRACTION if amount is None else amount))
    each = min(facts.window, _TOKENS_OF_EACH) * facts.kv_bytes_per_token
    return next((most for most in _GPU_SEQUENCES if most * each <= num_bytes), _DEFAULT_SEQUENCES)


def choose_num_sequences(facts: PageNeed, *, asked: int, state_bytes: int, available: int) -> int:
    """Return how many sequences run at once: `asked`, or as many as have room where recurrent layers remember
    `state_bytes` of each. States take half of what is available at most, or those of one sequence beside one window.
    Raises NotEnoughMemory if that does not fit."""
    if not state_bytes:
        return asked
    window = facts.window * facts.kv_bytes_per_token
    if state_bytes + window > available:
        raise NotEnoughMemory(
            f"The recurrent states of a sequence need {state_bytes} bytes, and keys and values of one window of "
            f"{facts.window} need {window}; {available} are available on {facts.device}. Lower --max-model-len or "
            "--speculation."
        )
    return min(asked, max(1, available // 2 // state_bytes))


def choose_num_kept(asked: int | None, *, num_sequences: int, kept_bytes: int, available: int) -> int:
    """Return how many recurrent states of `kept_bytes` are kept for sequences to come: as many as fit in `asked` bytes;
    None: two for each of the sequences that run at once, in an eighth of what is `available`. Raises
    NotEnoughMemory."""
    if not kept_bytes:
        return 0
    if asked is None:
        return max(0, min(2 * num_sequences, available // 8 // kept_bytes))
    if asked > available:
        raise NotEnoughMemory(f"--state-cache asks for {asked} bytes; {available} are available.")
    return asked // kept_bytes


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

    Blocks without keys and values (a model that is recurrent throughout) take no memory: there are 64 whole windows.
    On a CPU the default holds 64 whole windows, within 1 GiB and half the free memory, but at least one window where
    that fits. On a GPU it is 0.9 of what is free after the largest step. Raises NotEnoughMemory if not even one window
    fits.
    """
    block_bytes = facts.kv_bytes_per_token * block_size
    window_blocks = -(-facts.window // block_size)
    if not block_bytes:
        return _DEFAULT_SEQUENCES * window_blocks
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
