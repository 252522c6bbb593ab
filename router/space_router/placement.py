"""CPU placement of the workers that this router starts."""

import os
from collections.abc import Set


def processors() -> set[int]:
    """Return the processors this process may run on; empty if unknown."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def for_workers(placement: str, allowed: Set[int]) -> str | None:
    """Return a worker's `--cores` value, or None to leave placement to the system.

    `apart` keeps workers off the last processor, so that the router does not displace a thread that a step waits for;
    `auto` lets the worker decide whether it needs that one. With fewer than two processors the result is None.
    """
    if placement == "shared" or len(allowed) < 2:
        return None
    if placement == "auto":
        return "auto"
    return ",".join(map(str, sorted(allowed)[:-1]))
