"""One worker: its gRPC stream, how long it may be silent, and its connection over restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio
from space_common.worker.client import PROTOCOL_MAJOR, SERVE
from space_common.worker.secret import CURE, RouterProof, SecretFile
from space_proto import worker_pb2

from space_router.config import ServeConfig
from space_router.engine.errors import ProtocolViolation, WorkerStartFailed
from space_router.engine.queueing.admission import step_seconds
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.engine.workers.supervisor import ExitCause, RemoteWorker, Supervisor, WorkerDidNotStart

logger = logging.getLogger(__name__)

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
        secret: SecretFile | None = None,
    ) -> None:
        """`address`: unix:PATH or HOST:PORT; `tokenizer_hash`: required of Hello, None or "" accepts any;
        `credentials`: for TLS, None: no TLS; `secret`: what both sides must prove to know, None: nothing.
        """
        self.address = address
        self.hello = worker_pb2.Hello()
        self._watchdog = watchdog
        self._tokenizer_hash = tokenizer_hash
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        self._encrypted = credentials is not None
        self._secret = secret
        self._serve = self._channel.stream_stream(
            SERVE,
            request_serializer=worker_pb2.RouterMessage.SerializeToString,
            response_deserializer=worker_pb2.WorkerMessage.FromString,
        )
        self._unsent: list[worker_pb2.Command] = []
        self._has_commands = asyncio.Event()
        self._silence = 0.0  # seconds since the last message, without times when this process was suspended
        self._last_look = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._given_up: str | None = None  # why
        self._closed = False
        self._call = self._serve() if secret is not None else self._serve(self._outgoing())

    async def __aenter__(self) -> Link:
        try:
            self._last_look = asyncio.get_running_loop().time()
            self._check_silence()
            first = await (self._read() if self._secret is None else self._prove(self._secret))
            self.hello = _check_hello(first, self.address, self._tokenizer_hash)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _prove(self, secret: SecretFile) -> worker_pb2.WorkerMessage:
        """Answer the worker's challenge in a second call, and return its Hello or refusal. Raises LinkRefused unless
        the worker has proven the secret, too."""
        message = await self._read()
        if message.HasField("refusal") and not message.refusal.challenge:
            return message
        try:
            proof = RouterProof.of(secret.latest(), message.refusal.challenge)
        except ValueError:
            reason = "has not asked for the secret of --worker-secret-file, so it may be anyone"
            raise LinkRefused(f"the worker at {self.address} {reason}: {CURE}") from None
        self._call.cancel()
        self._call = self._serve(self._outgoing(), metadata=proof.metadata)
        message = await self._read()
        if message.HasField("hello") and not proof.is_answered_by(message.hello.proof):
            raise LinkRefused(f"the worker at {self.address} has not proven that it knows the secret: {CURE}")
        return message

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
            if self._encrypted and "WRONG_VERSION_NUMBER" in (error.details() or ""):
                cure = "Give it --tls-cert, --tls-key and --tls-client-ca, or leave --worker-tls-ca out here"
                raise LinkLost(f"the worker at {self.address} speaks no TLS, and this router does. {cure}") from error
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


FIRST_GAP = 60.0  # seconds until what goes on is logged again
LAST_GAP = 3600.0


class RepeatedNotice:
    """Chooses which of many messages about one lasting trouble are logged: the first of each kind, the next a minute
    later, then with gaps that double up to an hour."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, float]] = {}  # by kind: when the next is due, and the gap after it

    def is_due(self, kind: str, now: float) -> bool:
        """Whether a message is logged now, in seconds of any clock."""
        due, gap = self._due.get(kind, (now, FIRST_GAP))
        if now < due:
            return False
        self._due[kind] = (now + gap, min(LAST_GAP, 2 * gap))
        return True

    def ends(self) -> bool:
        """Forget everything; return whether anything was logged."""
        was_logged = bool(self._due)
        self._due.clear()
        return was_logged


MAX_FAILED_STARTS = 10  # consecutive failed starts after which a worker that was up before is given up
STEADY_SECONDS = 10.0  # seconds up after which a worker counts as healthy
MAX_CRASHES = 3  # consecutive crashes within `STEADY_SECONDS` after which the router is not ready until one is healthy
ENDING_SECONDS = 10.0  # seconds that an idle worker may take to end after Drain
GRAMMAR_SECONDS = 20.0  # seconds that a worker may compile a grammar before it gives up and reports so


class WorkerListener(Protocol):
    """Receives the events of connections."""

    def start_failed(self, error: WorkerStartFailed) -> None:
        """No worker can be started any more."""

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
        self, source: RemoteWorker | Supervisor, config: ServeConfig, tokenizer_hash: str | None, number: int
    ) -> None:
        self.number = number  # worker number, unique in its router
        self.source = source
        self.trouble = ""  # why the last worker was lost or could not be started
        self.scheduler: Scheduler | None = None  # None: no worker is up
        self.num_incarnations = 0
        self.num_crashes = 0  # consecutive crashes without a healthy worker in between
        self._config, self._tokenizer_hash = config, tokenizer_hash
        self._link: Link | None = None
        self._notice = RepeatedNotice()
        self._away_since: float | None = None  # time of the loop; None: a worker is up, or never was
        self._changed = asyncio.Event()  # wakes `until`

    incarnation: str | None = None  # of the current or last process
    retired: str | None = None  # incarnation that `retire` has ended; None again once another is up
    left: str | None = None  # incarnation that was asked to end from outside and had finished its work
    is_given_up = False  # no worker is expected any more; False again once one is up
    is_refused = False  # the worker that was met last cannot be used, and no other was since

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
        return self.scheduler is not None and self.num_crashes < MAX_CRASHES

    def why_not_expected(self, seconds: float) -> str:
        """Return in words why no worker is to be expected here soon; "" if one is up, or was within `seconds`."""
        if self.scheduler is not None:
            return ""
        if self.is_refused:
            return f"is refused ({self.trouble})"
        trouble = f" ({self.trouble})" if self.trouble else ""
        if self._away_since is None:
            return f"has not been up yet{trouble}"
        if self.is_given_up:
            return f"has been given up{trouble}"
        away = asyncio.get_running_loop().time() - self._away_since
        return f"has been away for {away:.0f} s{trouble}" if away > seconds else ""

    def is_news(self, error: Exception) -> bool:
        """Whether a failure to connect is to be logged: of a process of this machine always, of another one seldom."""
        now = asyncio.get_running_loop().time()
        return isinstance(self.source, Supervisor) or self._notice.is_due(type(error).__name__, now)

    def flush(self) -> None:
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
        text. Cancelled before the worker is asked to end, it goes on and admits again.
        """
        scheduler, link = self.scheduler, self._link
        if scheduler is None or link is None:
            return
        logger.info("%s is taken off duty: what it runs has %g s to finish", self.source.name, finish_seconds)
        scheduler.closing = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(finish_seconds):
                    await self.until(lambda: self._link is not link or not scheduler.sequences)
            for sequence in scheduler.running:
                scheduler.recall(sequence.live)
            self.flush()
            await self.until(lambda: self._link is not link or not scheduler.sequences)
        except asyncio.CancelledError:
            scheduler.closing = False
            raise
        if self._link is not link:
            return
        self.retired = link.hello.incarnation
        link.send([worker_pb2.Command(drain=worker_pb2.Drain())])
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                await self.until(lambda: self._link is not link)
        except asyncio.CancelledError:
            link.give_up("was asked to end")  # it runs nothing, and nothing else sees to it that it ends
            raise
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
            num_before = self.num_incarnations
            try:
                begun = asyncio.get_running_loop().time()
                address = await self.source.start()
                watchdog = Watchdog(
                    self._config.worker_timeout, start_seconds=asyncio.get_running_loop().time() - begun
                )
                await self._run_link(address, listener, watchdog)
            except (WorkerDidNotStart, WorkerMismatch) as error:
                self.trouble = str(error)
                self.is_refused = isinstance(error, WorkerMismatch)
                num_failed_starts += 1
                self.num_crashes += 1
                self._changed.set()  # waiters run after `is_given_up` is set below
                if not self.num_incarnations or num_failed_starts >= MAX_FAILED_STARTS:
                    self.is_given_up = True
                    summary = error.summary if isinstance(error, WorkerDidNotStart) else None
                    raise WorkerStartFailed(str(error), summary) from error
                if self.is_news(error):
                    logger.error("%s", error)
            except (LinkLost, ProtocolViolation) as error:
                num_failed_starts = 0
                self.trouble = str(error)
                was_up = self.num_incarnations > num_before
                if self.retired is not None or isinstance(error, LinkEnded):
                    logger.info("%s ends as requested: %s", self.source.name, error)
                elif was_up:
                    logger.warning("%s is lost: %s", self.source.name, error)
                elif self.is_news(error):
                    logger.warning("%s is away: %s. It is asked again every few seconds.", self.source.name, error)
            except Exception as error:  # a new worker and the requests' recorded ids recover from any error
                self.trouble = f"{type(error).__name__} in the router"
                logger.exception("%s is started again after an error of the router", self.source.name)

    async def _run_link(self, address: str, listener: WorkerListener, watchdog: Watchdog) -> None:
        async with Link(
            address,
            watchdog=watchdog,
            tokenizer_hash=self._tokenizer_hash,
            credentials=self.source.credentials,
            secret=self.source.secret,
        ) as link:
            if link.hello.incarnation == self.retired:
                raise LinkLost(f"the worker at {address} has not ended yet")
            facts = WorkerModelFacts.from_hello(link.hello)
            listener.check_compatible(facts)
            rows = self._config.max_prefill_rows
            scheduler = Scheduler(facts, max_prefill_rows=rows, max_draft_length=self._config.max_draft_length)
            drafts = scheduler.max_draft_length
            start = worker_pb2.Start(
                protocol_major=PROTOCOL_MAJOR, max_prefill_rows=rows, max_draft_length=drafts, readmits=True
            )
            link.send([worker_pb2.Command(start=start)])
            self.scheduler, self._link = scheduler, link
            self.num_incarnations += 1
            self.incarnation = link.hello.incarnation
            cause = ExitCause.EXTERNAL
            try:
                listener.worker_up(self)
                self.retired, self.left, self.is_given_up, self.is_refused = None, None, False, False
                self._away_since = None
                if self._notice.ends():
                    logger.info("%s is up", self.source.name)
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
                self._away_since = asyncio.get_running_loop().time()
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
            is_progress = report.stepped or report.released or report.encoded
            if is_progress or not scheduler.is_step_due:
                last_step = now
            if is_progress or not (scheduler.is_step_due or scheduler.awaits_grammar):
                last_grammar = now
            if now - last_step > watchdog.stall or now - last_grammar > watchdog.stall + GRAMMAR_SECONDS:
                raise LinkStalled(f"no step for {now - last_grammar:.3g} s, though one is due")

    def _mark_healthy(self) -> None:
        """Reset crash count and backoff, so that a lost worker is replaced at once."""
        self.num_crashes = 0
        self.source.backoff.worked()
