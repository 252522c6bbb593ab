"""One worker process in a Ray replica."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from space_router.config import ServeConfig
from space_router.engine.workers.supervisor import Supervisor, WorkerDidNotStart
from space_router.engine.workers.worker_command import worker_command
from space_router.ray_cluster.scaling import FIGURE

logger = logging.getLogger(__name__)

STEADY_SECONDS = 10.0  # seconds up after which the next process starts without backoff
HANDOVER_SECONDS = 5.0  # seconds beyond the drain time for the router to take back running requests


class WorkerReplica:
    """Starts the process, restarts it when it ends, and ends it with the replica. Its address never changes."""

    def __init__(
        self, config: ServeConfig, host: str, argv: Callable[[ServeConfig, str], Sequence[str]] = worker_command
    ) -> None:
        """`host`: this machine, as the router reaches it; `argv`: returns a worker's argument list for an address."""
        self.address = f"{host}:{_free_port(host)}"
        self.num_requests = 0  # all requests of the router
        self._supervisor = Supervisor(
            lambda _: argv(config, self.address),
            name=f"worker at {self.address}",
            start_timeout=config.worker_start_timeout,
            grace=config.drain_timeout + HANDOVER_SECONDS,
        )
        self._keeping: asyncio.Task[None] | None = None
        self._trouble = ""

    @property
    def pid(self) -> int | None:
        """Process id of the worker while it runs."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Start the worker and wait until it listens. Raises WorkerDidNotStart with the end of its stderr."""
        await self._supervisor.__aenter__()
        try:
            await self._supervisor.start()
        except BaseException:
            await self.stop()
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the worker after the drain time and `HANDOVER_SECONDS` at most."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self._supervisor.__aexit__(None, None, None)

    def meet(self, num_requests: int) -> str:
        """Store the router's number of requests and return this worker's address."""
        self.num_requests = num_requests
        return self.address

    def check_health(self) -> None:
        """Raise WorkerDidNotStart if the worker could not be restarted; Ray then replaces the replica."""
        if self._trouble:
            raise WorkerDidNotStart(self._trouble)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric that `scaling.Scaling` uses."""
        return {FIGURE: float(self.num_requests)}

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await self._supervisor.ended()
            if clock() - begun > STEADY_SECONDS:
                self._supervisor.reset_backoff()
            logger.warning("the worker at %s has ended: it is started again", self.address)
            try:
                await self._supervisor.start()
            except WorkerDidNotStart as error:
                self._trouble = str(error)
                return


def _free_port(host: str) -> int:
    """Return a free port. If another process takes it before the worker listens, the replica fails to start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
