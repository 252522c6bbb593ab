"""One router's stream: commands take effect between steps, which run on a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from space_proto import worker_pb2 as pb

from space_server.grpc_server.sequence_spans import SequenceSpans
from space_server.worker import ProtocolError, Worker

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

    Call receive() and message() on the event loop; only the stepping thread touches the worker.
    """

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
        closed.

        Raises Drained or RouterSessionFailed when no more will come.
        """
        try:
            message = await self._report_queue.take(patience)
        except TimeoutError:
            return pb.WorkerMessage(report=pb.StepReport())
        if isinstance(message, Exception):
            raise message
        return message

    def sent(self, message: pb.WorkerMessage) -> None:
        """Record that this message was sent."""
        if message.report.stepped or message.report.sequences or message.report.released:
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
        """Wait for work and do it; False when the session is over."""
        worker = self._worker
        with self._news:
            while not (self._stopping or self._inbox or self._may_step()):
                if worker.drained:
                    raise Drained
                self._news.wait()
            if self._stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            self._apply(command)
        if self._may_step():
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
