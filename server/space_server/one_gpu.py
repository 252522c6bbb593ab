"""One GPU for one process.

Kernels, events and graphs go to a thread's current device, and that is the first one in every thread until somebody
says otherwise. So a process that computes on another one sees that one alone, as its first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping

import torch
from space_model.model_error import InvalidSetting

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOCAL_RANK = "LOCAL_RANK"

_log = logging.getLogger(__name__)


def see_one_gpu(
    device: str, environment: MutableMapping[str, str], *, num_ranks: int = 1, count: Callable[[], int] | None = None
) -> str:
    """What `--device` says from now on, where the GPU that it names, or this rank's, is the only one that is seen.

    Before anything asks torch for GPUs: it reads the variable once. `count`: of those that are seen then. Raises
    InvalidSetting where the variable leaves no such GPU, or nobody reads it any more.
    """
    number = _wanted(device, environment, num_ranks)
    if not number:
        return device
    seen = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    if VISIBLE in environment and number >= len(seen):
        raise InvalidSetting(
            f"GPU {number} is asked for; {VISIBLE}={environment[VISIBLE]} leaves {len(seen)}, counted from 0."
        )
    environment[VISIBLE] = seen[number] if seen else str(number)
    if num_ranks > 1:
        environment[LOCAL_RANK] = "0"
    found = (count or torch.cuda.device_count)()
    if found > 1:
        raise InvalidSetting(
            f"GPU {number} cannot be made the only one of this process: torch sees {found}. Start it with "
            f"{VISIBLE}={environment[VISIBLE]}."
        )
    if found:
        _log.info("this process sees GPU %d alone, as cuda:0", number)
    return "cuda:0" if device.startswith("cuda:") else device


def _wanted(device: str, environment: MutableMapping[str, str], num_ranks: int) -> int:
    """The number of the GPU to compute on, of those that are seen; 0 also where it is none."""
    if num_ranks > 1:
        name = environment.get(LOCAL_RANK, environment.get("RANK", "0")) if device in ("auto", "cuda") else ""
    else:
        name = device.removeprefix("cuda:") if device.startswith("cuda:") else ""
    return int(name) if name.isdecimal() else 0
