"""The worker sources that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from space_router.config import ServeConfig
from space_router.engine.workers.remote_worker import RemoteWorker
from space_router.engine.workers.supervisor import Supervisor


def worker_sources(
    config: ServeConfig, worker_argv: Callable[[ServeConfig, str], Sequence[str]]
) -> list[RemoteWorker | Supervisor]:
    """Return remote workers for the config's addresses, else a supervised process for each of its `workers`."""
    if config.worker_address:
        certificate = config.worker_certificate()
        return [RemoteWorker(address, certificate) for address in config.worker_address]
    return [
        Supervisor(
            lambda address: worker_argv(config, address),
            name=f"worker {number}",
            start_timeout=config.worker_start_timeout,
        )
        for number in range(config.workers)
    ]
