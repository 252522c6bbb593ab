"""Detects a GPU that no longer computes for this process."""

from __future__ import annotations

import torch


def is_lost(device: torch.device) -> bool:
    """Whether the device is lost to this process: some GPU errors (failed memory, an address out of bounds) make every
    later step fail, until another process uses the GPU.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
