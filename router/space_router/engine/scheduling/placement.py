"""Where a request would stand on a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """How a request would stand on this worker."""

    shared: list[int]  # known blocks of its prefix
    num_fresh: int  # blocks it needs besides
