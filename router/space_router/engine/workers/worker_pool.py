"""Who sits at a router's seats: the workers it was started with, or whoever is at a list of addresses that changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from space_router.engine.errors import WorkerStartFailed
from space_router.engine.workers.remote_worker import RemoteWorker
from space_router.engine.workers.supervisor import Supervisor
from space_router.engine.workers.worker_connection import WorkerConnection, WorkerListener, WorkerSource

logger = logging.getLogger(__name__)


class WorkerPool:
    """A seat for each worker, kept as long as there is hope of one.

        async with Roster(sources, seat_for=..., engaged=engine, hopeless=...) as roster:
            roster.follow(["gpu1:50051", "gpu2:50051"], finish_seconds=30.0)   # only one that began with no sources

    One that follows is never hopeless: the next list may name a worker that serves. A worker that somebody else keeps
    is asked again as long as there is hope of any: whoever put a wrong one there may set it right.
    """

    def __init__(
        self,
        sources: Sequence[WorkerSource],
        *,
        seat_for: Callable[[WorkerSource, int], WorkerConnection],
        engaged: WorkerListener,
        hopeless: Callable[[WorkerStartFailed], None],
    ) -> None:
        """`seat_for`: a seat for a source, with its number; `engaged`: who is told what happens there; `hopeless`: told
        once all of the `sources` have given up.
        """
        self.seats = [seat_for(source, number) for number, source in enumerate(sources)]
        self._seat_for = seat_for
        self._engaged = engaged
        self._hopeless = hopeless
        self._follows = not sources
        self._followed: dict[str, WorkerConnection] = {}  # by address
        self._tasks: dict[WorkerConnection, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> WorkerPool:
        for source in (seat.source for seat in self.seats if isinstance(seat.source, Supervisor)):
            await self._exit.enter_async_context(source)
        for seat in self.seats:
            self._seated(seat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = [*self._tasks.values(), *self._retiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._exit.aclose()

    def follow(self, addresses: Collection[str], *, finish_seconds: float) -> None:
        """Seat whoever is new on the list. Who is not on it any more is taken off duty, and loses the seat once he has
        ended, at the next list.

        `finish_seconds`: what he still runs then goes on elsewhere. Raises ValueError where the workers are fixed.
        """
        if not self._follows:
            raise ValueError("These workers are fixed: only an engine that is started without any follows a list.")
        for address, seat in list(self._followed.items()):
            if address in addresses:
                continue
            if seat.scheduler is None:
                del self._followed[address]
                self._dismiss(seat)
            elif not seat.scheduler.closing:
                retiring = asyncio.create_task(seat.retire(finish_seconds=finish_seconds))
                self._retiring.add(retiring)
                retiring.add_done_callback(self._retiring.discard)
        for address in addresses:
            if address not in self._followed:
                taken = {seat.number for seat in self.seats}
                number = next(number for number in range(len(taken) + 1) if number not in taken)
                seat = self._followed[address] = self._seat_for(RemoteWorker(address), number)
                self.seats.append(seat)
                self._seated(seat)

    def _seated(self, seat: WorkerConnection) -> None:
        self._tasks[seat] = asyncio.create_task(self._keep(seat))

    def _dismiss(self, seat: WorkerConnection) -> None:
        """Nobody is expected there any more."""
        if seat in self.seats:
            self.seats.remove(seat)
            self._tasks.pop(seat).cancel()
            seat.give_up()

    async def _keep(self, seat: WorkerConnection) -> None:
        """Run one seat as long as there is hope of a worker there."""
        while True:
            try:
                await seat.run(self._engaged)
            except WorkerStartFailed as error:
                if isinstance(seat.source, Supervisor) or not self._has_hope:
                    logger.error("%s", error)
                    self.seats.remove(seat)
                    del self._tasks[seat]
                    if not self._has_hope:
                        self._hopeless(error)
                    return
                logger.error("%s It is asked again, in case it is set right.", error)

    @property
    def _has_hope(self) -> bool:
        """A worker is up, or nobody knows better than that one will be."""
        return self._follows or not all(seat.is_given_up for seat in self.seats)
