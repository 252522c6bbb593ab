"""Restarting the workers one after the other without losing a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
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
    CANCELLED = "cancelled"  # it was ended on request; those after the last one were not restarted


class RestartFailed(Exception):
    """A worker did not come back; the restart stops."""


class RollingRestart:
    """Restarts workers one at a time, and only while all others are up that can be expected to be.

    A worker's requests finish, or continue on other workers with the same text: clients see a pause at most. With a
    single worker they wait for the new process. A worker that never was up, is refused, or has been away for as long as
    a start may take is left out, and no other worker waits for it.
    """

    def __init__(self, connections: Sequence[WorkerConnection], *, back_seconds: float) -> None:
        """`connections`: of the engine; `back_seconds`: maximum time for a worker to come back."""
        self.state = RestartState.NONE
        self.error = ""  # why it failed
        self.num_done = self.num_wanted = 0
        self.waits_for = ""  # in words, what the restart waits for now
        self.left_out: tuple[str, ...] = ()  # workers that are not restarted, each with the reason
        self._connections = connections
        self._back_seconds = back_seconds
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # wakes `progress`

    def begin(self, *, finish_seconds: float = FINISH_SECONDS, numbers: Sequence[int] | None = None) -> None:
        """Start a rolling restart in the background.

        `finish_seconds`: time for a worker's requests to finish before they move; `numbers`: of the workers, None for
        all. Raises RestartRefused while another restart is running, for an unknown worker number, for one that is not
        expected to be up, and if no worker is.
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
        absent = {number: reason for number in wanted if (reason := known[number].why_not_expected(self._back_seconds))}
        if absent and (numbers is not None or len(absent) == len(wanted)):
            number, reason = next(iter(absent.items()))
            raise RestartRefused(f"Worker {number} cannot be restarted: {known[number].source.name} {reason}.")
        self.left_out = tuple(f"{known[number].source.name} {reason}" for number, reason in absent.items())
        restarted = [known[number] for number in wanted if number not in absent]
        self.state, self.error, self.num_done, self.num_wanted = RestartState.RUNNING, "", 0, len(restarted)
        self._task = asyncio.create_task(self._run(restarted, finish_seconds))
        self._task.add_done_callback(self._ended)

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        """End the restart: a worker that was not asked to end yet takes requests again, no further one is asked."""
        if self._task is not None:
            self._task.cancel()

    async def progress(self) -> AsyncGenerator[None]:
        """Yield at once, whenever a figure of the restart has changed, and a last time once it has ended."""
        while self.state is RestartState.RUNNING:
            self._changed.clear()
            yield
            await self._changed.wait()
        yield

    async def _run(self, connections: Sequence[WorkerConnection], finish_seconds: float) -> None:
        try:
            for connection in connections:
                for other in self._connections:  # so that at most one is missing
                    if other is not connection and not other.why_not_expected(self._back_seconds):
                        await self._until_up(other, since=0)
                await self._restart(connection, finish_seconds)
                self.num_done += 1
                logger.info("%s is back: %d of %d restarted", connection.source.name, self.num_done, self.num_wanted)
            self.state = RestartState.DONE
        except RestartFailed as failed:
            self.state, self.error = RestartState.FAILED, str(failed)
            logger.error("the rolling restart has stopped: %s", failed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before its first step
            self.state = RestartState.CANCELLED
            counts = f"{self.num_done} of {self.num_wanted} workers restarted"
            self.error = f"The restart was ended on request, with {counts}. The others run on."
            logger.warning("%s", self.error)
        elif (error := task.exception()) is not None:
            self.state, self.error = RestartState.FAILED, f"{type(error).__name__} in the router"
            logger.error("the rolling restart has stopped", exc_info=error)
        self._changed.set()

    async def _restart(self, connection: WorkerConnection, finish_seconds: float) -> None:
        """Retire a worker and wait until another process has taken its place. Raises RestartFailed."""
        process = connection.incarnation
        for _ in range(TRIES):
            before = connection.num_incarnations
            with self._waiting(f"{connection.source.name} to end: what it runs has {finish_seconds:g} s to finish"):
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
        """Wait for a worker newer than incarnation `since`. Raises RestartFailed after `back_seconds`, and at once if
        the worker that came back is refused."""

        def is_up() -> bool:
            return connection.scheduler is not None and connection.num_incarnations > since

        if is_up():
            return
        with self._waiting(f"{connection.source.name} to be up"):
            try:
                async with asyncio.timeout(self._back_seconds):
                    await connection.until(lambda: connection.is_given_up or connection.is_refused or is_up())
            except TimeoutError:
                pass
        if connection.scheduler is None:
            trouble = f" ({connection.trouble})" if connection.trouble else ""
            refused = connection.is_refused
            what = "came back as one that is refused" if refused else f"was not up within {self._back_seconds:g} s"
            raise RestartFailed(
                f"{connection.source.name} {what}{trouble}. Workers that were not "
                "restarted yet run on. See the log for its last words; of a worker elsewhere, what keeps it alive must "
                "start it again."
            )

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Say in `waits_for` what the block waits for."""
        self.waits_for = what
        self._changed.set()
        try:
            yield
        finally:
            self.waits_for = ""
            self._changed.set()
