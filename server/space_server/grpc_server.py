"""The worker's gRPC service, for one router at a time; commands take effect between steps, which run on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from space_common.certificate import CertificateFiles, server_credentials
from space_common.tracing import parent_of
from space_common.worker.secret import NotProven, SecretFile, WorkerSide
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc

from space_server.machine.memory import is_lost
from space_server.machine.sensors import Meter
from space_server.worker import ProtocolError, Worker
from space_server.worker_messages import says_something

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

T = TypeVar("T")


class ReportQueue(Generic[T]):
    """A queue with one consumer. One timer serves many messages: each only moves its deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[T] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # when `take` times out

    def put(self, message: T) -> None:
        """Add a message; call on the event loop."""
        self._waiting.append(message)
        self._wake()

    def put_from_thread(self, message: T) -> None:
        """Add a message; call on any other thread."""
        self._loop.call_soon_threadsafe(self.put, message)

    async def take(self, patience: float) -> T:
        """Return the next message. Raises TimeoutError after `patience` seconds without one."""
        self._deadline = self._loop.time() + patience
        while not self._waiting:
            if self._loop.time() >= self._deadline:
                raise TimeoutError
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer()
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        return self._waiting.popleft()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _set_timer(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:  # the deadline has moved
            self._set_timer()
        else:
            self._wake()


MAX_UNSENT = 32
"""Reports that may be unsent before stepping stops, so that steps do not run ahead of a router that does not read."""

_log = logging.getLogger(__name__)


class Drained(Exception):
    """Every sequence has finished and was reported; the process may exit."""


class RouterSessionFailed(Exception):
    """A step failed outside any sequence: the router must reconnect and re-admit."""


class RouterSession:
    """Commands in, messages out. `stop` ends the stepping thread and drops every sequence.
    Call receive() and message() on the event loop; only the stepping thread touches the worker."""

    def __init__(self, worker: Worker, spans: SequenceSpans | None = None) -> None:
        """`spans`: tracing spans of the sequences; None: no tracing."""
        self._worker = worker
        self._spans = spans
        self._report_queue: ReportQueue[pb.WorkerMessage | Exception | None] = ReportQueue()
        self._news = threading.Condition()
        self._inbox: deque[pb.Command] = deque()  # under _news
        self._num_unsent = 0  # under _news
        self._stopping = False  # under _news
        self._started = False
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        """Start the stepping thread."""
        self._worker.waiting.woken = self._wake
        self._thread.start()

    async def stop(self) -> None:
        """Stop stepping and drop every sequence. A cancellation takes effect when that is done."""
        with self._news:
            self._stopping = True
            self._news.notify()
        joining = asyncio.ensure_future(asyncio.to_thread(self._thread.join))
        cancelled = False
        while not joining.done():
            try:
                await asyncio.wait([joining])
            except asyncio.CancelledError:
                cancelled = True  # the worker is still in a step, so it cannot be handed to another stream yet
        self._worker.reset()
        if self._spans is not None:
            self._spans.close()
        self._report_queue.close()
        if cancelled:
            raise asyncio.CancelledError

    def receive(self, commands: Iterable[pb.Command]) -> None:
        """Queue commands; they take effect before the next step."""
        with self._news:
            self._inbox.extend(commands)
            self._news.notify()

    def _wake(self) -> None:
        """Wake the stepping thread."""
        with self._news:
            self._news.notify()

    def refuse(self, reason: str) -> None:
        """Queue a refusal, the last message of the stream."""
        self._report_queue.put(pb.WorkerMessage(refusal=pb.Refusal(reason=reason)))

    def close(self) -> None:
        """End the messages: the router has closed the stream."""
        self._report_queue.put(None)

    async def message(self, patience: float) -> pb.WorkerMessage | None:
        """Return the next message, a heartbeat after `patience` seconds without one, or None when the router has
        closed. Raises Drained or RouterSessionFailed when no more will come."""
        try:
            message = await self._report_queue.take(patience)
        except TimeoutError:
            return pb.WorkerMessage(report=pb.StepReport())
        if isinstance(message, Exception):
            raise message
        return message

    def sent(self, message: pb.WorkerMessage) -> None:
        """Record that this message was sent."""
        if says_something(message.report):
            with self._news:
                self._num_unsent -= 1
                self._news.notify()

    # ------------------------------------------------------------------------------------------ the stepping thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except ProtocolError as error:
            self._send(pb.WorkerMessage(refusal=pb.Refusal(reason=str(error))))
        except Drained as drained:
            self._send(drained)
        except Exception as error:
            _log.exception("stepping failed")
            self._send(RouterSessionFailed(f"{type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Wait for work and do it; False when the session is over. Without work, capture at most one graph: what comes
        meanwhile waits no longer than that."""
        worker = self._worker
        may_step = may_prepare = False
        with self._news:
            while not (self._stopping or self._inbox or (may_step := self._may_step())):
                if worker.drained:
                    raise Drained
                if may_prepare := worker.may_prepare:
                    break
                self._news.wait()
            if self._stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        if may_prepare:
            worker.prepare()
        for command in commands:
            self._apply(command)
        if self._may_step() if commands else may_step:
            message = pb.WorkerMessage()
            if worker.step(message.report) is not None:
                if self._spans is not None:
                    self._spans.reported(message.report)
                with self._news:
                    self._num_unsent += 1
                self._send(message)
        return True

    def _may_step(self) -> bool:
        return self._num_unsent < MAX_UNSENT and self._worker.has_work

    def _apply(self, command: pb.Command) -> None:
        kind = command.WhichOneof("command")
        if not self._started and kind not in {"start", "drain"}:
            raise ProtocolError(f"The router sent {kind or 'an unknown command'} before Start.")
        self._started = self._started or kind == "start"
        self._worker.apply(command)
        if self._spans is not None:
            self._spans.applied(command)

    def _send(self, message: pb.WorkerMessage | Exception) -> None:
        self._report_queue.put_from_thread(message)


ENDS = {
    pb.FINISH_EOS: "eos",
    pb.FINISH_STOP_ID: "stop_id",
    pb.FINISH_LENGTH: "length",
    pb.FINISH_ERROR: "error",
    pb.FINISH_RETURNED: "returned",
    pb.FINISH_READMIT: "readmit",
}


@dataclass
class _Followed:
    """A running traced sequence and its counts so far."""

    span: Span
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class SequenceSpans:
    """Observes the commands and reports of one session, on the stepping thread. Records no ids or text."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._followed: dict[int, _Followed] = {}

    def applied(self, command: pb.Command) -> None:
        """Record a command that was applied."""
        if command.HasField("admit") and command.admit.traceparent:
            admit = command.admit
            span = self._tracer.start_span(
                "worker",
                parent_of(admit.traceparent),
                attributes={
                    "spaceserve.sequence": admit.seq_id,
                    "gen_ai.usage.input_tokens": len(admit.ids),
                    "spaceserve.cached_tokens": admit.num_cached,
                },
            )
            self._followed[admit.seq_id] = _Followed(span)
        elif command.HasField("release"):
            self._end(command.release.seq_id, "released")

    def reported(self, report: pb.StepReport) -> None:
        """Record a step's report."""
        for part in report.sequences if self._followed else ():
            followed = self._followed.get(part.seq_id)
            if followed is None:
                continue
            if part.tokens and not followed.num_tokens:
                followed.span.add_event("first token")
            if part.paused:
                followed.span.add_event("paused without a page")
            followed.num_tokens += len(part.tokens)
            followed.num_steps += part.decoded
            followed.num_drafted += part.num_drafted
            followed.num_accepted += part.num_accepted
            if part.finish != pb.FINISH_NONE:
                self._end(part.seq_id, ENDS.get(part.finish, "unknown"))

    def close(self) -> None:
        """End every span: the session is over."""
        for seq_id in list(self._followed):
            self._end(seq_id, "router lost")

    def _end(self, seq_id: int, how: str) -> None:
        from opentelemetry.trace import StatusCode

        followed = self._followed.pop(seq_id, None)
        if followed is None:
            return
        followed.span.set_attributes(
            {
                "spaceserve.outcome": how,
                "gen_ai.usage.output_tokens": followed.num_tokens,
                "spaceserve.steps": followed.num_steps,
                "spaceserve.drafted_tokens": followed.num_drafted,
                "spaceserve.accepted_tokens": followed.num_accepted,
            }
        )
        if how == "error":
            followed.span.set_status(StatusCode.ERROR)
        followed.span.end()


HEARTBEAT_SECONDS = 1.0
"""Longest silence of a live worker."""
UNREAD_SECONDS = 30.0
"""Seconds a router may leave a message unread before its stream is closed."""
DISPLACED_SECONDS = 0.5
"""The same, once another router has connected."""
FAREWELL_SECONDS = 1.0
"""Seconds for a router to close the stream after the last message. If the worker closed it while the router sends, the
router could not read that message."""
ENERGY_SECONDS = 0.25
"""Shortest interval between two sensor readings: one costs microseconds, but steps are many."""
OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 1024**2),  # prompts of long windows are large; routers send no more
    ("grpc.max_send_message_length", -1),
    ("grpc.max_connection_idle_ms", 30_000),  # without a call
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # an address that is taken is an error
)

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
        secret: SecretFile | None = None,
    ) -> None:
        """`meter`: energy counters, reported with the steps; `tracer`: creates spans of sequences; `secret`: what
        routers must prove to know, None: nothing."""
        self.incarnation = uuid.uuid4().hex
        self.finished = asyncio.Event()  # drained, or the device is lost: the process may exit
        self.has_lost_device = False
        self._worker = worker
        self._heartbeat_seconds = heartbeat_seconds
        self._meter = meter or Meter([])
        self._tracer = tracer
        self._secret = None if secret is None else WorkerSide(secret)
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
        proof = b""
        if self._secret is not None:
            try:
                proof = self._secret.check(context.invocation_metadata() or (), context.peer())
            except NotProven as error:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DISPLACED_SECONDS):
                        refusal = pb.Refusal(reason=error.reason, challenge=error.challenge)
                        await context.write(pb.WorkerMessage(refusal=refusal))
                return
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
                hello = self._worker.hello(self.incarnation)
                hello.proof = proof
                await self._write(context, pb.WorkerMessage(hello=hello))
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
    address. Raises OSError if it cannot listen on the address."""
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
