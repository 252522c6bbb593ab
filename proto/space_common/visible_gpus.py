"""The GPUs that CUDA shows a process, and how several workers share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from space_common.nvml import Nvml, NvmlError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(
    environment: Mapping[str, str], *, open_nvml: Callable[[], Nvml | None] = Nvml.open, torch: str | None = None
) -> tuple[str, ...]:
    """Return the GPUs that a process with this environment may use, each as CUDA_VISIBLE_DEVICES names it.

    These are the variable's own words up to the first that names no GPU, as CUDA reads it, or the UUID of each GPU of
    the driver. Empty without a driver that answers, and where torch is a build for CPUs. `torch`: the version of it;
    None: of the installed one.
    """
    if (torch or _torch_version()).endswith("+cpu"):
        return ()
    try:
        nvml = open_nvml()
        present = [] if nvml is None else nvml.gpus
    except NvmlError:
        present = []
    if VISIBLE not in environment or not present:
        return tuple(gpu.uuid for gpu in present)
    named = []
    for word in environment[VISIBLE].split(","):
        name = word.strip()
        is_index = name.isdecimal() and int(name) < len(present)
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break
        named.append(name)
    return tuple(named)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "+cpu"


def num_workers_for(gpus: Sequence[str], per_worker: int) -> int:
    """Return how many workers of `per_worker` GPUs each these are enough for; 1 without any."""
    return max(len(gpus) // per_worker, 1)


def gpus_of(number: int, gpus: Sequence[str], num_workers: int, per_worker: int) -> tuple[str, ...]:
    """Return the GPUs of worker `number`: its own where they are enough for all, else one that it shares.

    Raises ValueError if they are not enough and a worker needs several: its ranks cannot share one.
    """
    if not gpus or num_workers * per_worker <= len(gpus):
        return tuple(gpus[number * per_worker : (number + 1) * per_worker])
    if per_worker > 1:
        needed = num_workers * per_worker
        raise ValueError(f"{num_workers} workers of {per_worker} GPUs need {needed}; {VISIBLE} leaves {len(gpus)}")
    return (gpus[number % len(gpus)],)
