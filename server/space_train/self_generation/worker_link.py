"""A blocking client for one worker's bidirectional stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import grpc
from space_proto import worker_pb2 as pb

from space_train.self_generation.worker_process import WorkerLost

PROTOCOL_MAJOR = 1
SERVE = "/spaceserve.v1.Worker/Serve"
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),  # long prompts are admitted many at a time
    ("grpc.use_local_subchannel_pool", 1),  # a restarted worker does not inherit the old one's back-off
    ("grpc.enable_http_proxy", 0),
)


class WorkerLink:
    """A bidirectional stream: Hello in, commands out, reports in. Leaving the block closes it.

    with WorkerLink(address) as link:
        link.start(max_prefill_rows=512)
        link.send(commands)
        report = link.report()
    """

    def __init__(self, address: str, *, silence: float = 120.0) -> None:
        """`address`: unix:PATH or HOST:PORT. `silence`: seconds without a report after which a worker is
        considered dead; it reports every second, but compilation on a device may delay it.
        """
        self.hello = pb.Hello()
        self._silence = silence
        self._outgoing: queue.SimpleQueue[pb.RouterMessage | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[pb.WorkerMessage | str] = queue.SimpleQueue()  # string: why the stream ended
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        serve = self._channel.stream_stream(
            SERVE,
            request_serializer=pb.RouterMessage.SerializeToString,
            response_deserializer=pb.WorkerMessage.FromString,
        )
        self._call = serve(iter(self._outgoing.get, None), wait_for_ready=True)
        self._reader = threading.Thread(target=self._read, name="worker link", daemon=True)

    def __enter__(self) -> WorkerLink:
        self._reader.start()
        try:
            self.hello = self._next().hello
            if self.hello.protocol_major != PROTOCOL_MAJOR:
                raise WorkerLost(
                    f"The worker speaks protocol {self.hello.protocol_major}.{self.hello.protocol_minor}, training "
                    f"{PROTOCOL_MAJOR}.x. Install one version of spaceserve."
                )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def start(self, *, max_prefill_rows: int) -> None:
        """Accept the worker, with as many drafts as it supports. `max_prefill_rows`: prompt rows per step."""
        start = pb.Start(
            protocol_major=PROTOCOL_MAJOR,
            max_prefill_rows=max_prefill_rows,
            max_draft_length=self.hello.max_draft_length,
        )
        self.send([pb.Command(start=start)])

    def send(self, commands: Sequence[pb.Command]) -> None:
        """Send commands immediately, in this order."""
        if commands:
            self._outgoing.put(pb.RouterMessage(commands=commands))

    def report(self) -> pb.StepReport:
        """Return the next step report. Raises WorkerLost once the stream has ended."""
        return self._next().report

    def _next(self) -> pb.WorkerMessage:
        try:
            message = self._incoming.get(timeout=self._silence)
        except queue.Empty:
            raise WorkerLost(f"The worker said nothing for {self._silence:g} s") from None
        if isinstance(message, str):
            self._incoming.put(message)  # so that later calls also raise
            raise WorkerLost(message)
        if message.HasField("refusal"):
            raise WorkerLost(f"The worker refuses: {message.refusal.reason}")
        return message

    def _read(self) -> None:
        try:
            messages: Iterator[pb.WorkerMessage] = self._call
            for message in messages:
                self._incoming.put(message)
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            self._incoming.put(f"The worker is gone ({details})")
        else:
            self._incoming.put("The worker ended the conversation")

    def _close(self) -> None:
        self._call.cancel()
        self._outgoing.put(None)
        self._channel.close()
        self._reader.join()
