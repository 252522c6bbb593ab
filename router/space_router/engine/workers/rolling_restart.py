"""Rolling restart: workers are restarted one after the other while the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum

from space_router.engine.errors import RestartRefused
from space_router.engine.workers.worker_connection import WorkerConnection

logger = logging.getLogger(__name__)

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
        """Wait for the current restart to end."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        """Cancel the restart because the server stops."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, connections: Sequence[WorkerConnection], finish_seconds: float) -> None:
        try:
            for connection in connections:
                await self._all_up(but=connection)
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

    async def _all_up(self, *, but: WorkerConnection) -> None:
        """Wait until all other workers are up, so that at most one is missing."""
        for connection in [connection for connection in self._connections if connection is not but]:
            await self._until_up(connection, since=0)

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
