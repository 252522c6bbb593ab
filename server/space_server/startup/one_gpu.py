"""One GPU for one process.

Kernels, events and graphs go to a thread's current device, and that is the first one in every thread until somebody
says otherwise. So a process that computes on another one sees that one alone, as its first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import replace

import torch
from space_model.model_error import InvalidSetting

from space_server.config import WorkerConfig
from space_server.tensor_parallel.rank_place import RankPlace

VISIBLE = "CUDA_VISIBLE_DEVICES"

_log = logging.getLogger(__name__)


def on_first_gpu(
    config: WorkerConfig,
    place: RankPlace | None,
    environment: MutableMapping[str, str],
    count: Callable[[], int] | None = None,
) -> tuple[WorkerConfig, RankPlace | None]:
    """Both as they are where the GPU that `--device` names, or this rank's, is the only one that is seen.

    Before anything asks torch for GPUs: it reads the variable once. `count`: of those that are seen then. Raises
    InvalidSetting where the variable leaves no such GPU, or nobody reads it any more.
    """
    if place is None:
        number = config.device.removeprefix("cuda:") if config.device.startswith("cuda:") else ""
        if number.isdecimal() and int(number):
            _see(int(number), environment, count or torch.cuda.device_count)
            return replace(config, device="cuda:0"), None
    elif place.local_rank and config.device in ("auto", "cuda"):
        _see(place.local_rank, environment, count or torch.cuda.device_count)
        return config, replace(place, local_rank=0)
    return config, place


def _see(number: int, environment: MutableMapping[str, str], count: Callable[[], int]) -> None:
    """Of the GPUs that are seen, this one alone."""
    seen = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    if VISIBLE in environment and number >= len(seen):
        raise InvalidSetting(
            f"GPU {number} is asked for; {VISIBLE}={environment[VISIBLE]} leaves {len(seen)}, counted from 0."
        )
    environment[VISIBLE] = seen[number] if seen else str(number)
    found = count()
    if found > 1:
        raise InvalidSetting(
            f"GPU {number} cannot be made the only one of this process: torch sees {found}. Start it with "
            f"{VISIBLE}={environment[VISIBLE]}."
        )
    if found:
        _log.info("this process sees GPU %d alone, as cuda:0", number)
