"""The worker's gRPC service, for one router at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from space_common.certificate import CertificateFiles, server_credentials
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc

from space_server.grpc_server.router_session import Drained, RouterSession, RouterSessionFailed
from space_server.grpc_server.sequence_spans import SequenceSpans
from space_server.machine.device_health import is_lost
from space_server.machine.energy import Meter
from space_server.worker import Worker

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

HEARTBEAT_SECONDS = 1.0
"""Longest silence of a live worker."""
UNREAD_SECONDS = 30.0
"""Seconds a router may leave a message unread before its stream is closed."""
DISPLACED_SECONDS = 0.5
"""The same, once another router has connected."""
FAREWELL_SECONDS = 1.0
"""Seconds for a router to close the stream after the last message. If the worker closed it while the router sends, the
router could not read that message.
"""
ENERGY_SECONDS = 0.25
"""Shortest interval between two sensor readings: one costs microseconds, but steps are many."""
OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # prompts and prompt log-probabilities of long windows are large
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # an address that is taken is an error
)

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves one router at a time: a new one ends the session of the one before."""

    def __init__(
        self,
        worker: Worker,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`meter`: energy counters, reported with the steps; `tracer`: creates spans of sequences."""
        self.incarnation = uuid.uuid4().hex
        self.finished = asyncio.Event()  # drained, or the device is lost: the process may exit
        self.has_lost_device = False
        self._worker = worker
        self._heartbeat_seconds = heartbeat_seconds
        self._meter = meter or Meter([])
        self._tracer = tracer
        self._session_lock = asyncio.Lock()  # held by the session that uses the worker
        self._newest: object = None  # the stream that connected last
        self._session: RouterSession | None = None
        self._writing: asyncio.Timeout | None = None  # the write in progress to the current router
        self._draining = False

    def drain(self) -> None:
        """Let running sequences finish, then set `finished`."""
        self._draining = True
        if self._session is None:
            self.finished.set()
        else:
            self._session.receive([pb.Command(drain=pb.Drain())])

    async def Serve(self, request_iterator: AsyncIterator[pb.RouterMessage], context: _Context) -> None:
        """Send Hello, then reports, until the router closes, another one connects, or the worker is drained."""
        stream = self._newest = object()
        if self._session is not None:
            self._session.refuse("Another router has connected to this worker.")
            if self._writing is not None:  # the router may never read the refusal
                self._writing.reschedule(asyncio.get_running_loop().time() + DISPLACED_SECONDS)
        async with self._session_lock:
            is_ending = self._draining or self.finished.is_set()
            if self._newest is not stream or is_ending:
                reason = "The worker is draining." if is_ending else "Another router has connected to this worker."
                await context.write(pb.WorkerMessage(refusal=pb.Refusal(reason=reason)))
                return
            spans = None if self._tracer is None else SequenceSpans(self._tracer)
            session = self._session = RouterSession(self._worker, spans)
            session.start()
            reader = asyncio.create_task(_read(request_iterator, session))
            try:
                await self._write(context, pb.WorkerMessage(hello=self._worker.hello(self.incarnation)))
                await self._send_messages(session, context)
            except Drained:
                self.finished.set()
                await asyncio.wait([reader], timeout=FAREWELL_SECONDS)
            except TimeoutError:
                _log.warning("router lost: it did not read a message within %g s", UNREAD_SECONDS)
            except RouterSessionFailed as error:
                if await asyncio.to_thread(is_lost, self._worker.facts.device):
                    _log.critical("the device %s is lost; this process exits", self._worker.facts.device)
                    self.has_lost_device = True
                    self.finished.set()
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            finally:
                self._session = None
                reader.cancel()
                try:
                    await session.stop()
                finally:
                    if self._draining or self._worker.draining:  # sequences were dropped, and no new ones are admitted
                        self.finished.set()

    async def _send_messages(self, session: RouterSession, context: _Context) -> None:
        """Number the reports and send them; a refusal is the last message."""
        report_no = 0
        clock = asyncio.get_running_loop().time
        self._meter.drawn()  # discard energy drawn before this session
        measured = clock()
        if self._meter.devices:  # announce the devices at once, with nothing drawn yet
            report_no = 1
            await context.write(pb.WorkerMessage(report=pb.StepReport(report_no=1, energy=self._meter.drawn())))
        try:
            while (message := await session.message(self._heartbeat_seconds)) is not None:
                if message.HasField("report"):
                    report_no += 1
                    message.report.report_no = report_no
                    if clock() - measured >= ENERGY_SECONDS:
                        message.report.energy.extend(self._meter.drawn())
                        measured = clock()
                await self._write(context, message)
                if message.HasField("refusal"):
                    _log.warning("router refused: %s", message.refusal.reason)
                    return
                session.sent(message)
        except Drained:
            await self._write(context, pb.WorkerMessage(report=pb.StepReport(report_no=report_no + 1, leaving=True)))
            raise

    async def _write(self, context: _Context, message: pb.WorkerMessage) -> None:
        """Write one message. Raises TimeoutError if the router does not read it."""
        displaced = message.HasField("refusal")
        async with asyncio.timeout(DISPLACED_SECONDS if displaced else UNREAD_SECONDS) as writing:
            self._writing = writing
            try:
                await context.write(message)
            finally:
                self._writing = None


async def _read(requests: AsyncIterator[pb.RouterMessage], session: RouterSession) -> None:
    """Pass the router's commands to the session until the stream ends."""
    try:
        async for message in requests:
            session.receive(message.commands)
    except grpc.aio.BaseError as error:
        _log.info("router lost: %s", error)
    except DecodeError as error:
        session.refuse(f"The router sent a message that cannot be read: {error}")
    finally:
        session.close()


async def start_server(
    service: WorkerService, address: str, tls: CertificateFiles | None = None
) -> tuple[grpc.aio.Server, str]:
    """Listen on `unix:PATH` (for this user only) or `HOST:PORT` (port 0: a free one). Returns the server and its
    address.

    Raises OSError if it cannot listen on the address.
    """
    server = grpc.aio.server(options=OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    before = os.umask(0o177)  # the socket has mode 0600 from the start
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        raise OSError(f"Cannot listen on {address}: {error}") from error
    finally:
        os.umask(before)
    await server.start()
    return server, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
