"""A place for a worker: whoever sits there now, and what the router holds of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation, WorkerStartFailed
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.queueing.throughput_estimator import step_seconds
from space_router.engine.scheduling.scheduler import Scheduler
from space_router.engine.workers.exit_cause import ExitCause
from space_router.engine.workers.supervisor import WorkerDidNotStart
from space_router.engine.workers.watchdog import Watchdog
from space_router.engine.workers.worker_link import (
    PROTOCOL_MAJOR,
    Link,
    LinkEnded,
    LinkLost,
    LinkRefused,
    LinkStalled,
    WorkerMismatch,
)

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 10  # in a row, of a worker that was up before: it does not start, or comes back as another
STEADY_SECONDS = 10.0  # that a worker has to be up before it counts as one that works
MAX_CRASHES = 3  # in a row, of workers that were not up for so long: then the next has to prove itself first
ENDING_SECONDS = 10.0  # that a worker which runs nothing may take to end, once it is told to
GRAMMAR_SECONDS = 20.0  # that a worker may compile a grammar, before it gives up on it and says so


class WorkerSource(Protocol):
    """Where a worker comes from: a process that is kept alive, or an address where somebody else keeps one."""

    name: str

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """For TLS, as they are now."""

    async def start(self) -> str:
        """A fresh worker's address, after a back-off where the last one failed."""

    def proved_itself(self) -> None:
        """The worker works: no back-off if it is lost now."""

    async def inquest(self) -> ExitCause:
        """Why the worker that has just been lost was."""


class WorkerListener(Protocol):
    """Who is told what happens on the seat."""

    def expect(self, facts: WorkerModelFacts) -> None:
        """Raise WorkerMismatch unless this worker gives the same text as those before and beside it."""

    def worker_up(self, connection: WorkerConnection) -> None: ...

    def worker_report(self, connection: WorkerConnection, report: worker_pb2.StepReport) -> None: ...

    def worker_away(self, connection: WorkerConnection) -> None:
        """The worker is lost; why is yet to be found out."""

    def worker_lost(self, connection: WorkerConnection, lost: Scheduler, cause: ExitCause) -> None: ...


class WorkerConnection:
    """Keeps one worker connected, incarnation after incarnation.

    Each incarnation has a scheduler of its own: with the worker, its pages and prefix cache are gone.
    """

    def __init__(
        self,
        source: WorkerSource,
        *,
        schedule: Callable[[WorkerModelFacts], Scheduler],
        tokenizer_hash: str | None,
        worker_timeout: float,
        max_prefill_rows: int,
        number: int = 0,
    ) -> None:
        self.number = number  # among the seats of its router
        self.source = source
        self.trouble = ""  # why the last worker was lost, or none could be had
        self.scheduler: Scheduler | None = None  # None: nobody is up
        self.num_incarnations = 0
        self.num_crashes = 0  # in a row: no worker was up for long in between
        self._schedule = schedule
        self._tokenizer_hash = tokenizer_hash
        self._worker_timeout = worker_timeout
        self._max_prefill_rows = max_prefill_rows
        self._link: Link | None = None
        self._news = asyncio.Event()  # something has changed here

    incarnation: str | None = None  # of the process that is connected, or was last
    retired: str | None = None  # incarnation that was taken off duty: nothing has gone wrong; until another is up
    left: str | None = None  # incarnation that was told to end, not by us, and had finished everything
    is_given_up = False  # no worker will come any more, unless somebody puts another there; until one is up

    @property
    def address(self) -> str | None:
        """Where its worker listens; None: nobody is up."""
        return None if self._link is None else self._link.address

    @property
    def was_lost(self) -> bool:
        """Whoever sits here takes the place of a worker that was lost, and neither taken off duty nor left in peace."""
        return self.num_incarnations > 1 and self.retired is None and self.left in (None, self.incarnation)

    @property
    def steady(self) -> bool:
        """A worker is up, and not one of a row that crash as soon as they have begun."""
        return self.scheduler is not None and self.num_crashes < MAX_CRASHES

    def flush(self) -> None:
        """Say what the scheduler has to say."""
        if self._link is not None and self.scheduler is not None and (commands := self.scheduler.take_commands()):
            self._link.send(commands)

    def give_up(self) -> None:
        """No worker is awaited here any more: whoever waits for one hears of it."""
        self.is_given_up = True
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that comes true by what happens here: a worker comes, reports, or is lost."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    async def retire(self, *, finish_seconds: float) -> None:
        """Take the worker off duty and end it; what it still runs after so many seconds goes on elsewhere, with the
        same text. Over once the worker has ended, or is lost.
        """
        scheduler, link = self.scheduler, self._link
        if scheduler is None or link is None:
            return
        logger.info("%s is taken off duty: what it runs has %g s to finish", self.source.name, finish_seconds)
        scheduler.closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(finish_seconds):
                await self.until(lambda: self._link is not link or not scheduler.sequences)
        for sequence in scheduler.running:
            scheduler.recall(sequence.live)
        self.flush()
        await self.until(lambda: self._link is not link or not scheduler.sequences)
        if self._link is not link:
            return
        self.retired = link.hello.incarnation
        link.send([worker_pb2.Command(drain=worker_pb2.Drain())])
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                await self.until(lambda: self._link is not link)
        except TimeoutError:
            link.give_up(f"did not end within {ENDING_SECONDS:g} s of being told to")
            await self.until(lambda: self._link is not link)

    async def run(self, engaged: WorkerListener) -> None:
        """For ever; raises WorkerStartFailed once there is no hope of a worker here. May be run again then."""
        num_failed_starts = 0
        task = asyncio.current_task()
        while True:
            if task is not None and task.cancelling():
                # grpc.aio raises its own error for a call that ends in the moment its task is cancelled.
                raise asyncio.CancelledError
            try:
                begun = asyncio.get_running_loop().time()
                address = await self.source.start()
                watchdog = Watchdog(self._worker_timeout, start_seconds=asyncio.get_running_loop().time() - begun)
                await self._converse(address, engaged, watchdog)
            except (WorkerDidNotStart, WorkerMismatch) as error:
                self.trouble = str(error)
                num_failed_starts += 1
                self.num_crashes += 1
                self._news.set()  # heard once this moment is over
                if not self.num_incarnations or num_failed_starts >= MAX_FAILED_STARTS:
                    self.is_given_up = True
                    raise WorkerStartFailed(str(error)) from error
                logger.error("%s", error)
            except (LinkLost, ProtocolViolation) as error:
                num_failed_starts = 0
                self.trouble = str(error)
                if self.retired is not None or isinstance(error, LinkEnded):
                    logger.info("%s ends as it was told to: %s", self.source.name, error)
                else:
                    logger.warning("%s is lost: %s", self.source.name, error)
            except Exception as error:  # whatever it was, a fresh worker and the requests' own ids set it right
                self.trouble = f"{type(error).__name__} in the router"
                logger.exception("%s is started again after an error of the router", self.source.name)

    async def _converse(self, address: str, engaged: WorkerListener, watchdog: Watchdog) -> None:
        async with Link(
            address, watchdog=watchdog, tokenizer_hash=self._tokenizer_hash, credentials=self.source.credentials
        ) as link:
            if link.hello.incarnation == self.retired:
                raise LinkLost(f"the worker at {address} has not ended yet")
            facts = WorkerModelFacts.from_hello(link.hello)
            engaged.expect(facts)
            scheduler = self._schedule(facts)
            start = worker_pb2.Start(
                protocol_major=PROTOCOL_MAJOR,
                max_prefill_rows=self._max_prefill_rows,
                max_draft_length=scheduler.max_draft_length,
            )
            link.send([worker_pb2.Command(start=start)])
            self.scheduler, self._link = scheduler, link
            self.num_incarnations += 1
            self.incarnation = link.hello.incarnation
            cause = ExitCause.OUTSIDE
            try:
                engaged.worker_up(self)
                self.retired, self.left, self.is_given_up = None, None, False
                self._news.set()
                await self._listen(link, scheduler, engaged, watchdog)
            except LinkRefused:
                self.num_crashes += 1  # where two routers want one worker neither is called ready
                raise
            except (LinkLost, ProtocolViolation) as error:
                self.scheduler = self._link = None  # its requests wait for the verdict, and nobody joins them
                engaged.worker_away(self)
                if isinstance(error, LinkEnded):
                    self.left = link.hello.incarnation
                if isinstance(error, LinkStalled | ProtocolViolation):
                    cause = ExitCause.ITSELF
                else:
                    cause = await self.source.inquest()  # gives one that was told to end the time for it, too
                if self.retired is not None or self.left is not None:
                    cause = ExitCause.OUTSIDE
                if cause is ExitCause.OUTSIDE:
                    self._works()
                else:
                    self.num_crashes += 1
                raise
            finally:
                self.scheduler = self._link = None
                engaged.worker_lost(self, scheduler, cause)
                self._news.set()

    async def _listen(self, link: Link, scheduler: Scheduler, engaged: WorkerListener, watchdog: Watchdog) -> None:
        """Pass on what the worker says, until it is lost."""
        clock = asyncio.get_running_loop().time
        begun = last_step = last_grammar = clock()  # seconds; of the latter two, when nothing was due, too
        while True:
            report = await link.report()
            engaged.worker_report(self, report)
            self._news.set()
            now = clock()
            if now - begun > STEADY_SECONDS:
                self._works()
            if report.stepped:
                watchdog.stepped(step_seconds(report.stats))
            if report.stepped or report.released or not scheduler.awaits:
                last_step = now
            if report.stepped or report.released or not (scheduler.awaits or scheduler.awaits_grammar):
                last_grammar = now
            if now - last_step > watchdog.stall or now - last_grammar > watchdog.stall + GRAMMAR_SECONDS:
                raise LinkStalled(f"no step for {now - last_grammar:.3g} s, though one is due")

    def _works(self) -> None:
        """If the worker is lost now, another is started at once."""
        self.num_crashes = 0
        self.source.proved_itself()
