"""One conversation with one worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import grpc
import grpc.aio
from space_proto import worker_pb2

from space_router.engine.workers.watchdog import Watchdog

PROTOCOL_MAJOR = 1
LOOK_SECONDS = 0.5  # between two looks at whether the worker still speaks
SERVE = "/spaceserve.v1.Worker/Serve"
OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 1024**2),  # prompt logprobs of long prompts are large
    ("grpc.max_send_message_length", 256 * 1024**2),
    ("grpc.use_local_subchannel_pool", 1),  # a worker started again is not met with the old one's back-off
    ("grpc.enable_http_proxy", 0),
)


class LinkLost(Exception):
    """The conversation has ended: the worker died, fell silent, or cannot be reached."""


class LinkStalled(LinkLost):
    """The worker speaks, and does not step."""


class LinkEnded(LinkLost):
    """The worker leaves: told to end, it has finished what ran and said all of it."""


class LinkRefused(LinkLost):
    """The worker is well, and will not serve this router: it drains, or serves another, or was told nonsense."""


class WorkerMismatch(Exception):
    """The worker is not the one that this router expects; trying again will not help."""


class Link:
    """A bidirectional stream: Hello in, commands out, reports in.

        async with Link("unix:/run/w.sock", watchdog=Watchdog(30.0)) as link:
            link.hello; link.send(commands)
            report = await link.report()

    Commands that are sent in one moment go in one message. A worker that says nothing for longer than the watchdog
    allows (it owes a report every second) is taken for dead.
    """

    def __init__(
        self,
        address: str,
        *,
        watchdog: Watchdog,
        tokenizer_hash: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address`: unix:PATH or HOST:PORT; `tokenizer_hash`: what Hello must say, None or "" to take any;
        `credentials`: for TLS, None without.
        """
        self.address = address
        self.hello = worker_pb2.Hello()
        self._patience = watchdog
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
        self._news = asyncio.Event()
        self._silence = 0.0  # seconds since the last word, in which this process ran itself
        self._last_look = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._given_up: str | None = None  # why
        self._closed = False

    async def __aenter__(self) -> Link:
        try:
            self._last_look = asyncio.get_running_loop().time()
            self._look()
            self.hello = _checked(await self._read(), self.address, self._tokenizer_hash)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    def send(self, commands: Sequence[worker_pb2.Command]) -> None:
        """Say this, soon: what is sent before the loop turns goes together, in order."""
        self._unsent += commands
        self._news.set()

    async def report(self) -> worker_pb2.StepReport:
        """The next thing the worker did. Raises LinkLost once there will be no more."""
        message = await self._read()
        self._silence, self._last_look = 0.0, asyncio.get_running_loop().time()
        if message.HasField("refusal"):
            raise LinkRefused(f"the worker at {self.address} refuses: {message.refusal.reason}")
        if message.report.leaving:
            raise LinkEnded(f"the worker at {self.address} has finished everything")
        return message.report

    def _look(self) -> None:
        """Look at the worker now and then. A look that comes late itself (this process was stopped, or the machine
        slept) says nothing of the worker, whose words may lie unread.
        """
        loop = asyncio.get_running_loop()
        patience = self._patience.silence
        pause = min(LOOK_SECONDS, patience / 4)
        self._silence += min(loop.time() - self._last_look, 2 * pause)
        self._last_look = loop.time()
        if self._silence < patience:
            self._watch = loop.call_later(min(pause, patience - self._silence), self._look)
        else:
            self.give_up(f"said nothing for {self._silence:.3g} s")

    def give_up(self, why: str) -> None:
        """Hang up: whoever waits for a report hears LinkLost, with this reason."""
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
            await self._news.wait()
            if self._closed:
                return
            self._news.clear()
            commands, self._unsent = self._unsent, []
            yield worker_pb2.RouterMessage(commands=commands)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._closed = True
        self._news.set()  # ends `_outgoing`: left waiting, it would be collected in the middle of its step
        self._call.cancel()
        await self._channel.close()


def _checked(message: worker_pb2.WorkerMessage, address: str, tokenizer_hash: str | None) -> worker_pb2.Hello:
    """The Hello, if this router can work with it."""
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
