"""The worker on gRPC: one conversation at a time."""

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
"""The longest silence of a worker that lives."""
UNREAD_SECONDS = 30.0
"""How long a router may leave unread what is said to it, before it is taken for dead."""
DISPLACED_SECONDS = 0.5
"""The same once another router has come."""
FAREWELL_SECONDS = 1.0
"""How long a router that is told the last word may take to hang up: if the worker did, while the router says something,
the router could not read it.
"""
ENERGY_SECONDS = 0.25
"""How often sensors are read while there is something to say: a reading costs microseconds, but steps are many."""
OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # prompts and prompt log-probabilities of long windows are large
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # an address that is taken is an error
)

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves one router after the other: a new one ends the conversation of the one before."""

    def __init__(
        self,
        worker: Worker,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`meter`: what this machine draws, said beside the reports; `tracer`: of spans of sequences."""
        self.incarnation = uuid.uuid4().hex
        self.finished = asyncio.Event()  # drained, or the device is lost: the process is to end
        self.has_lost_device = False
        self._worker = worker
        self._heartbeat_seconds = heartbeat_seconds
        self._meter = meter or Meter([])
        self._tracer = tracer
        self._turn = asyncio.Lock()  # held by the conversation that has the worker
        self._newest: object = None  # the stream that came last
        self._conversation: RouterSession | None = None
        self._writing: asyncio.Timeout | None = None  # what is being said to the router that has the worker
        self._draining = False

    def drain(self) -> None:
        """Let what runs finish, then set `finished`."""
        self._draining = True
        if self._conversation is None:
            self.finished.set()
        else:
            self._conversation.receive([pb.Command(drain=pb.Drain())])

    async def Serve(self, request_iterator: AsyncIterator[pb.RouterMessage], context: _Context) -> None:
        """The conversation: Hello, then reports until the router hangs up, another one comes, or all is drained."""
        stream = self._newest = object()
        if self._conversation is not None:
            self._conversation.refuse("Another router has connected to this worker.")
            if self._writing is not None:  # it may never read that
                self._writing.reschedule(asyncio.get_running_loop().time() + DISPLACED_SECONDS)
        async with self._turn:
            is_ending = self._draining or self.finished.is_set()
            if self._newest is not stream or is_ending:
                reason = "The worker is draining." if is_ending else "Another router has connected to this worker."
                await context.write(pb.WorkerMessage(refusal=pb.Refusal(reason=reason)))
                return
            spans = None if self._tracer is None else SequenceSpans(self._tracer)
            conversation = self._conversation = RouterSession(self._worker, spans)
            conversation.start()
            reader = asyncio.create_task(_read(request_iterator, conversation))
            try:
                await self._say(context, pb.WorkerMessage(hello=self._worker.hello(self.incarnation)))
                await self._speak(conversation, context)
            except Drained:
                self.finished.set()
                await asyncio.wait([reader], timeout=FAREWELL_SECONDS)
            except TimeoutError:
                _log.warning("router lost: it has left unread what was said to it")
            except RouterSessionFailed as error:
                if await asyncio.to_thread(is_lost, self._worker.facts.device):
                    _log.critical("this process cannot use %s any more and ends", self._worker.facts.device)
                    self.has_lost_device = True
                    self.finished.set()
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            finally:
                self._conversation = None
                reader.cancel()
                try:
                    await conversation.stop()
                finally:
                    if self._draining or self._worker.draining:  # what ran is forgotten, and nothing new is taken
                        self.finished.set()

    async def _speak(self, conversation: RouterSession, context: _Context) -> None:
        """Number the reports and send them; a refusal is the last word."""
        report_no = 0
        clock = asyncio.get_running_loop().time
        self._meter.drawn()  # what was drawn for nobody, or for another router
        measured = clock()
        if self._meter.devices:  # known from the first moment on, though nothing is drawn yet
            report_no = 1
            await context.write(pb.WorkerMessage(report=pb.StepReport(report_no=1, energy=self._meter.drawn())))
        try:
            while (message := await conversation.message(self._heartbeat_seconds)) is not None:
                if message.HasField("report"):
                    report_no += 1
                    message.report.report_no = report_no
                    if clock() - measured >= ENERGY_SECONDS:
                        message.report.energy.extend(self._meter.drawn())
                        measured = clock()
                await self._say(context, message)
                if message.HasField("refusal"):
                    _log.warning("router refused: %s", message.refusal.reason)
                    return
                conversation.sent(message)
        except Drained:
            await self._say(context, pb.WorkerMessage(report=pb.StepReport(report_no=report_no + 1, leaving=True)))
            raise

    async def _say(self, context: _Context, message: pb.WorkerMessage) -> None:
        """Raises TimeoutError where the router does not read."""
        displaced = message.HasField("refusal")
        async with asyncio.timeout(DISPLACED_SECONDS if displaced else UNREAD_SECONDS) as writing:
            self._writing = writing
            try:
                await context.write(message)
            finally:
                self._writing = None


async def _read(requests: AsyncIterator[pb.RouterMessage], conversation: RouterSession) -> None:
    """What the router says, as long as it says something."""
    try:
        async for message in requests:
            conversation.receive(message.commands)
    except grpc.aio.BaseError as error:
        _log.info("router lost: %s", error)
    except DecodeError as error:
        conversation.refuse(f"The router sent a message that cannot be read: {error}")
    finally:
        conversation.close()


async def start_server(
    service: WorkerService, address: str, tls: CertificateFiles | None = None
) -> tuple[grpc.aio.Server, str]:
    """Listen on `unix:PATH` (for this user alone) or `HOST:PORT` (port 0: a free one); the server, and where it
    listens.

    Raises OSError if the address cannot be had.
    """
    server = grpc.aio.server(options=OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    before = os.umask(0o177)  # a socket has mode 0600 from its first moment on
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
