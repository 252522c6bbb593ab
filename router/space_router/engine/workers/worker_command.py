"""The command line of a worker process, and the processors that it may use."""

from __future__ import annotations

import os
from collections.abc import Set

from space_common.process import module_command
from space_common.worker_settings import worker_argv

from space_router.config import ServeConfig


def worker_command(config: ServeConfig, address: str, *, module: str = "space_server") -> list[str]:
    """Return the argument list of `python -m MODULE` with this router's settings, listening on `address`."""
    settings = {
        **vars(config),
        "tls_cert": None,  # the router's own, for its clients
        "tls_key": None,
        "listen": address,
        "parent_pid": os.getpid(),  # the worker ends when its router is gone
        "num_workers": config.workers,
        "cores": for_workers(config.placement, processors()),
    }
    return module_command(module, *worker_argv(settings))


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
