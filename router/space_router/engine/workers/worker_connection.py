"""The connection to one worker, over restarts of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
from space_common.worker_client import PROTOCOL_MAJOR
from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation, WorkerStartFailed
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.queueing.throughput_estimator import step_seconds
from space_router.engine.scheduler import Scheduler
from space_router.engine.workers.supervisor import ExitCause, WorkerDidNotStart
from space_router.engine.workers.worker_link import (
    Link,
    LinkEnded,
    LinkLost,
    LinkRefused,
    LinkStalled,
    Watchdog,
    WorkerMismatch,
)

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 10  # consecutive failed starts after which a worker that was up before is given up
STEADY_SECONDS = 10.0  # seconds up after which a worker counts as healthy
MAX_CRASHES = 3  # consecutive crashes within `STEADY_SECONDS` after which the router is not ready until one is healthy
ENDING_SECONDS = 10.0  # seconds that an idle worker may take to end after Drain
GRAMMAR_SECONDS = 20.0  # seconds that a worker may compile a grammar before it gives up and reports so


class WorkerSource(Protocol):
    """Provides a worker: a supervised process, or the address of a remote one."""

    name: str

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Current TLS credentials; None: no TLS."""

    async def start(self) -> str:
        """Return the address of a new worker, after a backoff if the last one failed."""

    def reset_backoff(self) -> None:
        """Start the next worker without delay, because this one has worked."""

    async def find_exit_cause(self) -> ExitCause:
        """Return why the last worker was lost."""


class WorkerListener(Protocol):
    """Receives the events of a connection."""

    def check_compatible(self, facts: WorkerModelFacts) -> None:
        """Raise WorkerMismatch unless this worker gives the same text as the others."""

    def worker_up(self, connection: WorkerConnection) -> None: ...

    def worker_report(self, connection: WorkerConnection, report: worker_pb2.StepReport) -> None: ...

    def worker_disconnected(self, connection: WorkerConnection) -> None:
        """The worker is lost; `worker_lost` follows once the cause is known."""

    def worker_lost(self, connection: WorkerConnection, lost: Scheduler, cause: ExitCause) -> None: ...


class WorkerConnection:
    """Keeps one worker connected over its restarts.

    Each incarnation has its own scheduler, because pages and prefix cache are lost with the process.
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
        self.number = number  # worker number, unique in its router
        self.source = source
        self.trouble = ""  # why the last worker was lost or could not be started
        self.scheduler: Scheduler | None = None  # None: no worker is up
        self.num_incarnations = 0
        self.num_crashes = 0  # consecutive crashes without a healthy worker in between
        self._schedule = schedule
        self._tokenizer_hash = tokenizer_hash
        self._worker_timeout = worker_timeout
        self._max_prefill_rows = max_prefill_rows
        self._link: Link | None = None
        self._changed = asyncio.Event()  # wakes `until`

    incarnation: str | None = None  # of the current or last process
    retired: str | None = None  # incarnation that `retire` has ended; None again once another is up
    left: str | None = None  # incarnation that was asked to end from outside and had finished its work
    is_given_up = False  # no worker is expected any more; False again once one is up

    @property
    def address(self) -> str | None:
        """Where the worker listens; None: no worker is up."""
        return None if self._link is None else self._link.address

    @property
    def was_lost(self) -> bool:
        """Whether the current worker replaces one that was lost, and not one that was retired or ended on request."""
        return self.num_incarnations > 1 and self.retired is None and self.left in (None, self.incarnation)

    @property
    def is_steady(self) -> bool:
        """Whether a worker is up and is not in a crash loop."""
        return self.scheduler is not None and self.num_crashes < MAX_CRASHES

    def flush(self) -> None:
        """Send the scheduler's collected commands."""
        if self._link is not None and self.scheduler is not None and (commands := self.scheduler.take_commands()):
            self._link.send(commands)

    def give_up(self) -> None:
        """Mark that no worker is expected any more, and wake the tasks that wait for one."""
        self.is_given_up = True
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()` is true; it is checked when a worker connects, reports or is lost."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def retire(self, *, finish_seconds: float) -> None:
        """End the worker gracefully; return once it has ended or is lost.

        It admits nothing more. Requests still running after `finish_seconds` continue on other workers with the same
        text.
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
            link.give_up(f"did not end within {ENDING_SECONDS:g} s of the request to end")
            await self.until(lambda: self._link is not link)

    async def run(self, listener: WorkerListener) -> None:
        """Connect and reconnect for ever. Raises WorkerStartFailed once starts keep failing; may be called again."""
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
                await self._run_link(address, listener, watchdog)
            except (WorkerDidNotStart, WorkerMismatch) as error:
                self.trouble = str(error)
                num_failed_starts += 1
                self.num_crashes += 1
                self._changed.set()  # waiters run after `is_given_up` is set below
                if not self.num_incarnations or num_failed_starts >= MAX_FAILED_STARTS:
                    self.is_given_up = True
                    raise WorkerStartFailed(str(error)) from error
                logger.error("%s", error)
            except (LinkLost, ProtocolViolation) as error:
                num_failed_starts = 0
                self.trouble = str(error)
                if self.retired is not None or isinstance(error, LinkEnded):
                    logger.info("%s ends as requested: %s", self.source.name, error)
                else:
                    logger.warning("%s is lost: %s", self.source.name, error)
            except Exception as error:  # a new worker and the requests' recorded ids recover from any error
                self.trouble = f"{type(error).__name__} in the router"
                logger.exception("%s is started again after an error of the router", self.source.name)

    async def _run_link(self, address: str, listener: WorkerListener, watchdog: Watchdog) -> None:
        async with Link(
            address, watchdog=watchdog, tokenizer_hash=self._tokenizer_hash, credentials=self.source.credentials
        ) as link:
            if link.hello.incarnation == self.retired:
                raise LinkLost(f"the worker at {address} has not ended yet")
            facts = WorkerModelFacts.from_hello(link.hello)
            listener.check_compatible(facts)
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
            cause = ExitCause.EXTERNAL
            try:
                listener.worker_up(self)
                self.retired, self.left, self.is_given_up = None, None, False
                self._changed.set()
                await self._listen(link, scheduler, listener, watchdog)
            except LinkRefused:
                self.num_crashes += 1  # if two routers share a worker, neither becomes ready
                raise
            except (LinkLost, ProtocolViolation) as error:
                self.scheduler = self._link = None  # nothing is admitted while the cause is determined
                listener.worker_disconnected(self)
                if isinstance(error, LinkEnded):
                    self.left = link.hello.incarnation
                if isinstance(error, LinkStalled | ProtocolViolation):
                    cause = ExitCause.CRASHED
                else:
                    cause = await self.source.find_exit_cause()  # also waits for the end of a process that was asked to
                if self.retired is not None or self.left is not None:
                    cause = ExitCause.EXTERNAL
                if cause is ExitCause.EXTERNAL:
                    self._mark_healthy()
                else:
                    self.num_crashes += 1
                raise
            finally:
                self.scheduler = self._link = None
                listener.worker_lost(self, scheduler, cause)
                self._changed.set()

    async def _listen(self, link: Link, scheduler: Scheduler, listener: WorkerListener, watchdog: Watchdog) -> None:
        """Pass on the worker's reports until it is lost. Raises LinkLost or ProtocolViolation."""
        clock = asyncio.get_running_loop().time
        begun = last_step = last_grammar = clock()  # last_*: last time that a step was made or none was due
        while True:
            report = await link.report()
            listener.worker_report(self, report)
            self._changed.set()
            now = clock()
            if now - begun > STEADY_SECONDS:
                self._mark_healthy()
            if report.stepped:
                watchdog.stepped(step_seconds(report.stats))
            if report.stepped or report.released or not scheduler.is_step_due:
                last_step = now
            if report.stepped or report.released or not (scheduler.is_step_due or scheduler.awaits_grammar):
                last_grammar = now
            if now - last_step > watchdog.stall or now - last_grammar > watchdog.stall + GRAMMAR_SECONDS:
                raise LinkStalled(f"no step for {now - last_grammar:.3g} s, though one is due")

    def _mark_healthy(self) -> None:
        """Reset crash count and backoff, so that a lost worker is replaced at once."""
        self.num_crashes = 0
        self.source.reset_backoff()
