"""Which processors the workers that this router starts may run on."""

import os
from collections.abc import Set


def processors() -> set[int]:
    """Those this process may run on; none where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def for_workers(placement: str, allowed: Set[int]) -> str | None:
    """What a worker's `--cores` is; None: wherever the system puts them.

    `apart` leaves the last processor to whoever is not a worker, so that no step waits for a thread that the router has
    displaced; `auto` leaves it to the worker to see whether it needs that one. There must be two at least: with one
    there is nothing to part.
    """
    if placement == "shared" or len(allowed) < 2:
        return None
    if placement == "auto":
        return "auto"
    return ",".join(map(str, sorted(allowed)[:-1]))
