"""Restricts a process to one GPU.

Kernels, events and graphs use a thread's current device, which is GPU 0 in every new thread. So a process that computes
on another GPU makes it the only visible one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import replace

import torch
from space_common.worker_settings import WorkerSettings
from space_model.model_error import InvalidSetting

from space_server.tensor_parallel.rank_place import RankPlace

VISIBLE = "CUDA_VISIBLE_DEVICES"

_log = logging.getLogger(__name__)


def on_first_gpu(
    config: WorkerSettings,
    place: RankPlace | None,
    environment: MutableMapping[str, str],
    count: Callable[[], int] | None = None,
) -> tuple[WorkerSettings, RankPlace | None]:
    """Make the GPU of `--device`, or of this rank, the only visible one, and return both arguments adapted to it.

    Must run before torch initializes CUDA, which reads the variable once. `count`: returns the number of GPUs visible
    afterwards. Raises InvalidSetting if the variable leaves no such GPU, or was read already.
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
    """Make only this one of the visible GPUs visible."""
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
