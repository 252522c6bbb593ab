"""The workers of a router: a fixed set, or a list of addresses that changes, and their rolling restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from enum import Enum
from functools import partial

from space_router.config import ServeConfig
from space_router.engine.errors import RestartRefused, WorkerStartFailed
from space_router.engine.workers.supervisor import RemoteWorker, Supervisor
from space_router.engine.workers.worker_connection import WorkerConnection, WorkerListener

logger = logging.getLogger(__name__)


class WorkerPool:
    """Runs a connection for each worker as long as any worker may still come up.

        async with WorkerPool(sources, engine, config=config, tokenizer_hash=None) as pool:
            pool.follow(["gpu1:50051", "gpu2:50051"], finish_seconds=30.0)   # only a pool that began with no sources

    A pool that follows a list never fails to start, because the next list may have a usable worker. A remote worker
    that does not fit is retried as long as any other may come up, because its operator may correct it.
    """

    def __init__(
        self,
        sources: Sequence[RemoteWorker | Supervisor],
        listener: WorkerListener,
        *,
        config: ServeConfig,
        tokenizer_hash: str | None,
    ) -> None:
        self._listener = listener
        self._connect = partial(WorkerConnection, config=config, tokenizer_hash=tokenizer_hash)
        self.connections = [self._connect(source, number=number) for number, source in enumerate(sources)]
        self._follows = not sources
        self._config = config
        self._followed: dict[str, WorkerConnection] = {}  # by address
        self._tasks: dict[WorkerConnection, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> WorkerPool:
        for connection in self.connections:
            if isinstance(connection.source, Supervisor):
                await self._exit.enter_async_context(connection.source)
        for connection in self.connections:
            self._start(connection)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks.values(), *self._retiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._exit.aclose()

    def follow(self, addresses: Collection[str], *, finish_seconds: float) -> None:
        """Connect the new addresses of a list and retire the workers that are not on it any more.

        A retired worker's connection is removed by the first later call after it has ended. `finish_seconds`: time for
        its requests to finish before they move. Raises ValueError if the pool's workers are fixed.
        """
        if not self._follows:
            raise ValueError("These workers are fixed: only an engine that is started without any follows a list.")
        for address, connection in list(self._followed.items()):
            if address in addresses:
                continue
            if connection.scheduler is None:
                del self._followed[address]
                self._remove(connection)
            elif not connection.scheduler.closing:
                retiring = asyncio.create_task(connection.retire(finish_seconds=finish_seconds))
                self._retiring.add(retiring)
                retiring.add_done_callback(self._retiring.discard)
        for address in addresses:
            if address not in self._followed:
                taken = {connection.number for connection in self.connections}
                number = next(number for number in range(len(taken) + 1) if number not in taken)
                connection = self._followed[address] = self._connect(self._remote(address), number=number)
                self.connections.append(connection)
                self._start(connection)

    def _remote(self, address: str) -> RemoteWorker:
        return RemoteWorker(address, self._config.worker_certificate(), self._config.worker_secret())

    def _start(self, connection: WorkerConnection) -> None:
        self._tasks[connection] = asyncio.create_task(self._run_connection(connection))

    def _remove(self, connection: WorkerConnection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self._tasks.pop(connection).cancel()
            connection.give_up()

    async def _run_connection(self, connection: WorkerConnection) -> None:
        while True:
            try:
                await connection.run(self._listener)
            except WorkerStartFailed as error:
                if isinstance(connection.source, Supervisor) or not self._can_recover:
                    logger.error("%s", error)
                    self.connections.remove(connection)
                    del self._tasks[connection]
                    if not self._can_recover:
                        self._listener.start_failed(error)
                    return
                logger.error("%s It is asked again, in case it is set right.", error)

    @property
    def _can_recover(self) -> bool:
        """Whether a worker is up or may still come up."""
        return self._follows or not all(connection.is_given_up for connection in self.connections)


TRIES = 3
"""Attempts per worker: its connection may be lost before it is asked to end, so that the same process reconnects."""

FINISH_SECONDS = 10.0  # most requests end in that time; moving the others costs another prefill


class RestartState(Enum):
    """State of the last restart."""

    NONE = "none"  # none was requested
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # a worker did not come back; those after it were not restarted


class RestartFailed(Exception):
    """A worker did not come back; the restart stops."""


class RollingRestart:
    """Restarts workers one at a time, and only while all others are up.

    A worker's requests finish, or continue on other workers with the same text: clients see a pause at most. With a
    single worker they wait for the new process.
    """

    def __init__(self, connections: Sequence[WorkerConnection], *, back_seconds: float) -> None:
        """`connections`: of the engine; `back_seconds`: maximum time for a worker to come back."""
        self.state = RestartState.NONE
        self.error = ""  # why it failed
        self.num_done = self.num_wanted = 0
        self._connections = connections
        self._back_seconds = back_seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self, *, finish_seconds: float = FINISH_SECONDS, numbers: Sequence[int] | None = None) -> None:
        """Start a rolling restart in the background.

        `finish_seconds`: time for a worker's requests to finish before they move; `numbers`: of the workers, None for
        all. Raises RestartRefused while another restart is running, and for an unknown worker number.
        """
        if self.state is RestartState.RUNNING:
            raise RestartRefused(
                f"A restart is under way, with {self.num_done} of {self.num_wanted} workers done. Wait for its end.",
                is_busy=True,
            )
        known = {connection.number: connection for connection in self._connections}
        wanted = sorted(known if numbers is None else set(numbers))
        if unknown := [number for number in wanted if number not in known]:
            raise RestartRefused(
                f"There is no worker {unknown[0]}; there are {', '.join(map(str, sorted(known)))}. See GET /workers."
            )
        self.state, self.error, self.num_done, self.num_wanted = RestartState.RUNNING, "", 0, len(wanted)
        self._task = asyncio.create_task(self._run([known[number] for number in wanted], finish_seconds))

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, connections: Sequence[WorkerConnection], finish_seconds: float) -> None:
        try:
            for connection in connections:
                for other in self._connections:  # so that at most one is missing
                    if other is not connection:
                        await self._until_up(other, since=0)
                await self._restart(connection, finish_seconds)
                self.num_done += 1
                logger.info("%s is back: %d of %d restarted", connection.source.name, self.num_done, self.num_wanted)
        except RestartFailed as failed:
            self.error = str(failed)
            logger.error("the rolling restart has stopped: %s", failed)
        finally:
            self.state = RestartState.DONE if self.num_done == self.num_wanted else RestartState.FAILED

    async def _restart(self, connection: WorkerConnection, finish_seconds: float) -> None:
        """Retire a worker and wait until another process has taken its place. Raises RestartFailed."""
        process = connection.incarnation
        for _ in range(TRIES):
            before = connection.num_incarnations
            await connection.retire(finish_seconds=finish_seconds)
            await self._until_up(connection, since=before)
            if connection.incarnation != process:
                return
        raise RestartFailed(
            f"{connection.source.name} was lost {TRIES} times before it received the request to end, and came back "
            "as the same process. Look at the network between, and begin again. Workers that were not restarted yet "
            "run on."
        )

    async def _until_up(self, connection: WorkerConnection, *, since: int) -> None:
        """Wait for a worker newer than incarnation `since`. Raises RestartFailed after `back_seconds`."""
        try:
            async with asyncio.timeout(self._back_seconds):
                await connection.until(
                    lambda: (
                        connection.is_given_up
                        or (connection.scheduler is not None and connection.num_incarnations > since)
                    )
                )
        except TimeoutError:
            pass
        if connection.scheduler is None:
            trouble = f" ({connection.trouble})" if connection.trouble else ""
            raise RestartFailed(
                f"{connection.source.name} was not up within {self._back_seconds:g} s{trouble}. Workers that were not "
                "restarted yet run on. See the log for its last words; of a worker elsewhere, what keeps it alive must "
                "start it again."
            )
