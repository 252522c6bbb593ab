"""One worker process, kept alive on the machine where Ray has placed it."""

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

STEADY_SECONDS = 10.0  # that a process has to be up for the next one to be started at once
HANDOVER_SECONDS = 5.0  # beyond the drain time, for the router to take back what still runs


class WorkerReplica:
    """Owns the process: starts it, starts it again where it ends, and ends it when the replica is to go.

    Its address stays the same for as long as the replica lives.
    """

    def __init__(
        self, config: ServeConfig, host: str, argv: Callable[[ServeConfig, str], Sequence[str]] = worker_command
    ) -> None:
        """`host`: of this machine, as the router reaches it; `argv`: how a worker is started on an address."""
        self.address = f"{host}:{_free_port(host)}"
        self.num_requests = 0  # that the router has, with all workers
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
        """Of the worker, while it lives."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Over once the worker listens. Raises WorkerDidNotStart with its last words."""
        await self._supervisor.__aenter__()
        try:
            await self._supervisor.start()
        except BaseException:
            await self.stop()
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """The worker finishes what it runs; what the router has not taken back after the drain time is lost to it."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self._supervisor.__aexit__(None, None, None)

    def meet(self, num_requests: int) -> str:
        """The router says what it has to do, and learns where this worker is."""
        self.num_requests = num_requests
        return self.address

    def check_health(self) -> None:
        """Raises WorkerDidNotStart once the worker cannot be had here any more: Ray then makes another replica."""
        if self._trouble:
            raise WorkerDidNotStart(self._trouble)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `scaling.Scaling`."""
        return {FIGURE: float(self.num_requests)}

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await self._supervisor.ended()
            if clock() - begun > STEADY_SECONDS:
                self._supervisor.proved_itself()
            logger.warning("the worker at %s has ended: it is started again", self.address)
            try:
                await self._supervisor.start()
            except WorkerDidNotStart as error:
                self._trouble = str(error)
                return


def _free_port(host: str) -> int:
    """For the worker, which listens later: should somebody take it meanwhile, the replica does not start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
