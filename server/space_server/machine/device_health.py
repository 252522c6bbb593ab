"""Whether a GPU still computes for this process."""

from __future__ import annotations

import torch


def is_lost(device: torch.device) -> bool:
    """Some errors of a GPU (memory that has failed, an address out of bounds) stay with the process that met them:
    every step of it fails from then on, and only another process computes there again.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
