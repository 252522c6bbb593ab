"""One gRPC stream to one worker, and how long it may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import grpc
import grpc.aio
from space_common.worker_client import PROTOCOL_MAJOR, SERVE
from space_proto import worker_pb2

FLOOR = 5.0  # minimum seconds of silence: a live worker reports every second
SLOWEST_STEP_FACTOR = 20.0  # a step may take this multiple of the slowest recent step
DECAY = 0.999  # of the slowest step, per step: a long prompt counts for about a thousand steps
MAX_STALL_FACTOR = 10.0  # maximum time without a due step, as a multiple of `most`: kernels may be compiling
MIN_STEPS = 50  # steps before this worker's own step times are used


class Watchdog:
    """Time limits for one worker, in seconds, derived from its start and its steps.

    A worker is declared dead only after being silent for as long as its start took. Waiting for a hung worker costs the
    wait, restarting a healthy one costs a start; so the total is at most twice the optimum.
    """

    def __init__(self, most: float, *, start_seconds: float = 0.0) -> None:
        """`most`: maximum seconds of silence, however long steps and start take; `start_seconds`: of the start."""
        self._most = most
        self._start_seconds = start_seconds
        self._slowest = 0.0
        self._num_steps = 0

    def stepped(self, seconds: float) -> None:
        """Record a step that took `seconds`."""
        self._slowest = max(seconds, DECAY * self._slowest)
        self._num_steps += 1

    @property
    def silence(self) -> float:
        """Limit without any report, as from a process that is stopped or never releases the GIL."""
        return min(self._most, max(FLOOR, SLOWEST_STEP_FACTOR * self._slowest, self._start_seconds))

    @property
    def stall(self) -> float:
        """Limit without a due step: a worker with a hung device may still send its periodic reports."""
        if self._num_steps < MIN_STEPS:
            return MAX_STALL_FACTOR * self._most
        return max(self._most, min(MAX_STALL_FACTOR * self._most, SLOWEST_STEP_FACTOR * self._slowest))


LOOK_SECONDS = 0.5  # between two checks for silence
OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 1024**2),  # prompt logprobs of long prompts are large
    ("grpc.max_send_message_length", 256 * 1024**2),
    ("grpc.use_local_subchannel_pool", 1),  # a restarted worker must not inherit the old channel's backoff
    ("grpc.enable_http_proxy", 0),
)


class LinkLost(Exception):
    """The stream has ended: the worker died, fell silent, or cannot be reached."""


class LinkStalled(LinkLost):
    """The worker reports but does not step."""


class LinkEnded(LinkLost):
    """The worker ends on request, after finishing and reporting all its sequences."""


class LinkRefused(LinkLost):
    """The worker refuses this router: it drains, serves another router, or rejected a command."""


class WorkerMismatch(Exception):
    """The worker does not fit this router (protocol, model, tokenizer); retrying does not help."""


class Link:
    """A bidirectional stream: Hello in, commands out, reports in.

        async with Link("unix:/run/w.sock", watchdog=Watchdog(30.0)) as link:
            link.hello; link.send(commands)
            report = await link.report()

    Commands sent in one iteration of the event loop go in one message. A worker that is silent for longer than the
    watchdog allows is considered dead; a live one reports every second.
    """

    def __init__(
        self,
        address: str,
        *,
        watchdog: Watchdog,
        tokenizer_hash: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address`: unix:PATH or HOST:PORT; `tokenizer_hash`: required of Hello, None or "" accepts any;
        `credentials`: for TLS, None: no TLS.
        """
        self.address = address
        self.hello = worker_pb2.Hello()
        self._watchdog = watchdog
        self._tokenizer_hash = tokenizer_hash
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        serve = self._channel.stream_stream(
            SERVE,
            request_serializer=worker_pb2.RouterMessage.SerializeToString,
            response_deserializer=worker_pb2.WorkerMessage.FromString,
        )
        self._call = serve(self._outgoing())
        self._unsent: list[worker_pb2.Command] = []
        self._has_commands = asyncio.Event()
        self._silence = 0.0  # seconds since the last message, without times when this process was suspended
        self._last_look = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._given_up: str | None = None  # why
        self._closed = False

    async def __aenter__(self) -> Link:
        try:
            self._last_look = asyncio.get_running_loop().time()
            self._check_silence()
            self.hello = _check_hello(await self._read(), self.address, self._tokenizer_hash)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    def send(self, commands: Sequence[worker_pb2.Command]) -> None:
        """Queue commands; all queued in one iteration of the event loop are sent in one message, in order."""
        self._unsent += commands
        self._has_commands.set()

    async def report(self) -> worker_pb2.StepReport:
        """Wait for the worker's next report. Raises LinkLost when the stream has ended."""
        message = await self._read()
        self._silence, self._last_look = 0.0, asyncio.get_running_loop().time()
        if message.HasField("refusal"):
            raise LinkRefused(f"the worker at {self.address} refuses: {message.refusal.reason}")
        if message.report.leaving:
            raise LinkEnded(f"the worker at {self.address} has finished everything")
        return message.report

    def _check_silence(self) -> None:
        """Add to the silence and give up when the limit is reached; runs every `LOOK_SECONDS`.

        If the check itself is late (this process was stopped, or the machine slept), the delay does not count as
        silence, because messages may be unread.
        """
        loop = asyncio.get_running_loop()
        patience = self._watchdog.silence
        pause = min(LOOK_SECONDS, patience / 4)
        self._silence += min(loop.time() - self._last_look, 2 * pause)
        self._last_look = loop.time()
        if self._silence < patience:
            self._watch = loop.call_later(min(pause, patience - self._silence), self._check_silence)
        else:
            self.give_up(f"said nothing for {self._silence:.3g} s")

    def give_up(self, why: str) -> None:
        """Close the stream; a pending `report` raises LinkLost with this reason."""
        self._given_up = why
        self._call.cancel()

    async def _read(self) -> worker_pb2.WorkerMessage:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise LinkLost(f"the worker at {self.address} is gone: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._given_up is not None and not (task is not None and task.cancelling()):
                raise LinkLost(f"the worker at {self.address} {self._given_up}") from None
            raise
        if not isinstance(message, worker_pb2.WorkerMessage):
            raise LinkLost(f"the worker at {self.address} ended the conversation")
        return message

    async def _outgoing(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        while True:
            await self._has_commands.wait()
            if self._closed:
                return
            self._has_commands.clear()
            commands, self._unsent = self._unsent, []
            yield worker_pb2.RouterMessage(commands=commands)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._closed = True
        self._has_commands.set()  # ends `_outgoing`, which would otherwise be garbage-collected while it waits
        self._call.cancel()
        await self._channel.close()


def _check_hello(message: worker_pb2.WorkerMessage, address: str, tokenizer_hash: str | None) -> worker_pb2.Hello:
    """Return the Hello. Raises LinkRefused, or WorkerMismatch if this router cannot use the worker."""
    if message.HasField("refusal"):
        raise LinkRefused(f"the worker at {address} refuses: {message.refusal.reason}")
    if not message.HasField("hello"):
        raise WorkerMismatch(f"The worker at {address} did not say hello first.")
    hello = message.hello
    if hello.protocol_major != PROTOCOL_MAJOR:
        raise WorkerMismatch(
            f"The worker at {address} speaks protocol {hello.protocol_major}.{hello.protocol_minor}, this router "
            f"{PROTOCOL_MAJOR}.x. Install the same version of spaceserve on both."
        )
    if tokenizer_hash and hello.tokenizer_hash and hello.tokenizer_hash != tokenizer_hash:
        raise WorkerMismatch(
            f"The worker at {address} has tokenizer {hello.tokenizer_hash}, this router {tokenizer_hash}. "
            "Give both the same model."
        )
    if not (hello.num_blocks and hello.block_size and hello.window and hello.max_sequences):
        raise WorkerMismatch(
            f"The worker at {address} has {hello.num_blocks} blocks of {hello.block_size} slots, a window of "
            f"{hello.window} and room for {hello.max_sequences} sequences: none may be 0."
        )
    return hello
