"""The workers of a router: a fixed set, or a list of addresses that changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial

from space_router.config import ServeConfig
from space_router.engine.errors import WorkerStartFailed
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
                    logger.error("%s", error.summary)
                    self.connections.remove(connection)
                    del self._tasks[connection]
                    if not self._can_recover:
                        self._listener.start_failed(error)
                    return
                if connection.is_news(error):
                    logger.error("%s It is asked again, in case it is set right.", error)

    @property
    def _can_recover(self) -> bool:
        """Whether a worker is up or may still come up."""
        return self._follows or not all(connection.is_given_up for connection in self.connections)
