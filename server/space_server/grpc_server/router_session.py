"""One router's stream: its commands take effect between steps, which a thread of its own takes one after the other."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable

from space_proto import worker_pb2 as pb

from space_server.grpc_server.report_queue import ReportQueue
from space_server.grpc_server.sequence_spans import SequenceSpans
from space_server.worker import ProtocolError, Worker

MAX_UNSENT = 32
"""Reports that may wait for the router before stepping stops: a router that does not read is not run ahead of."""

_log = logging.getLogger(__name__)


class Drained(Exception):
    """Everything has been finished and said; the process is to end."""


class RouterSessionFailed(Exception):
    """A step failed outside any sequence: the router has to begin again."""


class RouterSession:
    """Commands in, messages out. `with` it: the stepping thread ends with the block, and the worker forgets.

    receive() and message() are called on the event loop; the worker is touched by the thread alone.
    """

    def __init__(self, worker: Worker, spans: SequenceSpans | None = None) -> None:
        """`spans`: of its sequences, None where nobody wants any."""
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
        """Begin to step."""
        self._worker.waiting.woken = self._wake
        self._thread.start()

    async def stop(self) -> None:
        """Step no more, and forget every sequence. A cancellation takes effect when that is done."""
        with self._news:
            self._stopping = True
            self._news.notify()
        joining = asyncio.ensure_future(asyncio.to_thread(self._thread.join))
        cancelled = False
        while not joining.done():
            try:
                await asyncio.wait([joining])
            except asyncio.CancelledError:
                cancelled = True  # the stream has gone, but the step it began has not: nobody may have the worker yet
        self._worker.reset()
        if self._spans is not None:
            self._spans.close()
        self._report_queue.close()
        if cancelled:
            raise asyncio.CancelledError

    def receive(self, commands: Iterable[pb.Command]) -> None:
        """These take effect before the next step."""
        with self._news:
            self._inbox.extend(commands)
            self._news.notify()

    def _wake(self) -> None:
        """The worker has something to do again."""
        with self._news:
            self._news.notify()

    def refuse(self, reason: str) -> None:
        """Say this last."""
        self._report_queue.put(pb.WorkerMessage(refusal=pb.Refusal(reason=reason)))

    def close(self) -> None:
        """The router has hung up: nothing is left to say."""
        self._report_queue.put(None)

    async def message(self, patience: float) -> pb.WorkerMessage | None:
        """The next thing to say, a heartbeat after `patience` seconds of silence, None when the router has hung up.

        Raises Drained or RouterSessionFailed when there will be no more.
        """
        try:
            said = await self._report_queue.take(patience)
        except TimeoutError:
            return pb.WorkerMessage(report=pb.StepReport())
        if isinstance(said, Exception):
            raise said
        return said

    def sent(self, message: pb.WorkerMessage) -> None:
        """This message is on its way."""
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
            self._say(pb.WorkerMessage(refusal=pb.Refusal(reason=str(error))))
        except Drained as drained:
            self._say(drained)
        except Exception as error:
            _log.exception("stepping failed")
            self._say(RouterSessionFailed(f"{type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Wait for something to do, and do it; False when the conversation is over."""
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
                self._say(message)
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

    def _say(self, said: pb.WorkerMessage | Exception) -> None:
        self._report_queue.put_from_thread(said)
