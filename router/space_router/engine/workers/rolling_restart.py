"""Every worker ended and started again, one after the other, while the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum

from space_router.engine.errors import RestartRefused
from space_router.engine.workers.worker_connection import WorkerConnection

logger = logging.getLogger(__name__)

TRIES = 3
"""Of a worker that is lost before it could be told to end, and comes back as the same process."""

FINISH_SECONDS = 10.0  # most answers end by themselves in that time; handing the others over costs their prefill anew


class RestartState(Enum):
    """How far it is."""

    NONE = "none"  # nobody has asked for one
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # a worker did not come back: those after it were left as they are


class RestartFailed(Exception):
    """The rest of the workers had better stay as they are."""


class RollingRestart:
    """Restarts workers, never two at once, and never one while another is away.

    The streams of a worker finish, or go on elsewhere with what they have: their readers see a pause at most. A router
    with one worker lets them wait for the new one.
    """

    def __init__(self, connections: Sequence[WorkerConnection], *, back_seconds: float) -> None:
        """`connections`: of the engine; `back_seconds`: that a worker may take to come back."""
        self.state = RestartState.NONE
        self.error = ""  # why it failed
        self.num_done = self.num_wanted = 0
        self._connections = connections
        self._back_seconds = back_seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self, *, finish_seconds: float = FINISH_SECONDS, numbers: Sequence[int] | None = None) -> None:
        """`finish_seconds`: that a worker's streams have before they go elsewhere; `numbers`: of the workers, None for
        all. Raises RestartRefused while another restart is under way, and for a number that no worker has.
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
        """Until the restart that was begun last is over."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        """The server stops."""
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
        """Another process sits there."""
        process = connection.incarnation
        for _ in range(TRIES):
            before = connection.num_incarnations
            await connection.retire(finish_seconds=finish_seconds)
            await self._until_up(connection, since=before)
            if connection.incarnation != process:
                return
        raise RestartFailed(
            f"{connection.source.name} was lost {TRIES} times before it could be told to end, and came back as the "
            "same process. Look at the network between, and begin again. Workers that were not restarted yet run on."
        )

    async def _all_up(self, *, but: WorkerConnection) -> None:
        """Nobody else is away: else one more would be missing."""
        for connection in [connection for connection in self._connections if connection is not but]:
            await self._until_up(connection, since=0)

    async def _until_up(self, connection: WorkerConnection, *, since: int) -> None:
        """A worker sits there that came after incarnation `since`."""
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
