"""One client's HTTP connection, bounded in both directions: what it may send, how slowly, and what it may leave unread.

uvicorn holds the connection; what it leaves unbounded is bounded here.
"""

from __future__ import annotations

import asyncio
import enum
import http
import logging
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from space_router.http_server.paths import OPEN_PATHS
from space_router.metrics import Metrics
from space_router.settings.connection_settings import ConnectionSettings

log = logging.getLogger(__name__)

NUM_GUESTS = 32
"""Connections beyond `max_connections` that may say whether they come from a probe; more are refused unheard."""

GUEST_SECONDS = 1.0
"""That they have for it."""

FLUSH_SECONDS = 5.0
"""How long the last bytes of a finished answer may take to be sent."""

PARTING_SECONDS = 1.0
"""That an idle client has to say goodbye as well, which TLS waits for."""

_PATHS_OF_PROBES = frozenset(path.encode() for path in OPEN_PATHS)


class HeaderTooLarge(Exception):
    """First line and headers exceed `--max-header`."""


class Reading(enum.Enum):
    """What a client is in the middle of."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class HttpConnection(HttpToolsProtocol):
    """Refuses what is too long or too slow before it is a request, and cuts a client that does not read.

    A head (first line and headers) has `receive_timeout` from its first byte on, and a new connection so long for its
    first byte. A head that comes while an earlier request is answered has it from the end of that answer on, and what
    is wrong with it is said then.

    The transport says when more than it holds waits to be read (`pause_writing`): the stream behind waits from then on,
    its request gets no more pages, and after `slow_reader_timeout` the connection is cut.

    A connection beyond `max_connections` takes the place of the one that is idle longest. Where none is idle it is a
    guest: one request of a probe is answered, any other is told to go.

    A client's offer of another protocol (`Upgrade: h2c`, `websocket`) is not taken up, as RFC 9110 §7.8 allows.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionSettings,
        metrics: Metrics,
        idle: dict[HttpConnection, None],
        **kwargs: Any,
    ) -> None:
        """`idle`: all connections that are, the longest first."""
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._limits, self._metrics = limits, metrics
        self.timeout_keep_alive = limits.keep_alive  # type: ignore[assignment]  # uvicorn says int, any number does
        self._reading = Reading.NOTHING
        self._had_whole_head = False  # the data that came last
        self._head_size = 0  # bytes of it, at least
        self._head_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._parting_timer: asyncio.TimerHandle | None = None
        self._answered_at = -FLUSH_SECONDS  # last, by the loop's clock
        self._running: RequestResponseCycle | None = None  # the request that is answered, or was last
        self._refused = False
        self._last_word = b""  # where refused
        self._is_guest = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_beyond = len(self.connections) - self._limits.max_connections
        if num_beyond > 0 and self._has_taken_a_place():
            num_beyond -= 1
        self._is_guest = num_beyond > 0
        if num_beyond > NUM_GUESTS:
            self._refuse_guest()
            return
        seconds = min(GUEST_SECONDS, self._limits.receive_timeout) if self._is_guest else self._limits.receive_timeout
        self._head_timer = self.loop.call_later(seconds, self._head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stop(self._head_timer)
        self._slow_timer = _stop(self._slow_timer)
        self._parting_timer = _stop(self._parting_timer)
        self._idle.pop(self, None)
        if self._running is not None:  # uvicorn tells the last request alone, which may wait behind this one
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        was_in_body, self._had_whole_head = self._reading is Reading.BODY, False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("This is no valid HTTP request.")
        among_it = was_in_body or self._had_whole_head  # a body, maybe
        if self._reading is Reading.HEAD and not among_it and not self._refused:
            self._head_size += len(data)  # an unfinished header is known to the parser alone
            if self._head_size > 2 * self._limits.max_header:
                self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """The parser takes an offered protocol for accepted: the body would be the first words in it. So it stops
        behind the head, and reads it again without the offer. Raises HttpParserError.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._refused:
                    return
                rest = rest[offer.args[0] :]
                head = self._head_without_offer()
                self.parser = _parser(self)  # the old one is at its end if the client wants no further request
                self.parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._head_size = Reading.HEAD, 0
        self._idle.pop(self, None)
        self._await_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self.parser.get_method() == b"CONNECT":
            self._say(400, "invalid_request", "CONNECT is for proxies, and this server is none.")
            return
        if self.parser.should_upgrade():
            return  # it comes again without the offer
        self._had_whole_head = True
        self._head_timer = _stop(self._head_timer)
        if self._is_guest and self.url.partition(b"?")[0] not in _PATHS_OF_PROBES:
            self._refuse_guest()
            return
        super().on_headers_complete()
        self._reading = Reading.BODY
        if self._is_guest and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused or self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._reading = Reading.NOTHING

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] in ("0.9", "1.0"):
            cycle.keep_alive = cycle.waiting_for_100_continue = False
            app = _ended_by_closing(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._answered_at = self.loop.time()
        super().on_response_complete()
        self._mind_leftovers()
        if self._is_answering or self.transport.is_closing():
            return
        if self._refused:
            self._leave()
        elif self._reading is Reading.HEAD:
            self._await_head()
        elif self._reading is Reading.NOTHING:
            self._idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        self._part()

    def shutdown(self) -> None:
        """What uvicorn calls at the end of the server."""
        if self._is_answering:
            super().shutdown()
        else:
            self._part()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._slow_timer = _stop(self._slow_timer)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to a request that is none: here too to one whose head is too large."""
        if not self._refused:
            self._say(400, "invalid_request", msg)

    def _count(self, num_bytes: int) -> None:
        """Raises HeaderTooLarge, which the parser takes for an error in the request."""
        self._head_size += num_bytes
        if self._head_size > self._limits.max_header:
            self._refuse_head()
            raise HeaderTooLarge

    def _refuse_head(self) -> None:
        self._metrics.rejected_total.labels(reason="header_too_large").inc()
        most = self._limits.max_header
        self._say(431, "header_too_large", f"The headers exceed {most} bytes. Send less, or raise `--max-header`.")

    def _refuse_guest(self) -> None:
        self._metrics.rejected_total.labels(reason="too_many_connections").inc()
        self._say(
            503,
            "too_many_connections",
            f"There are {self._limits.max_connections} connections already, the most (`--max-connections`). Close "
            "some, or come again later.",
            kind="service_unavailable_error",
        )

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _await_head(self) -> None:
        """The rest of a head that has begun. Empty lines before it begin nothing: RFC 9112 §2.2."""
        if self._is_answering:
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.receive_timeout, self._head_overdue)

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._reading is Reading.NOTHING:
            self.transport.close()  # nothing was ever asked
            return
        if self._is_guest:
            self._refuse_guest()
            return
        self._metrics.rejected_total.labels(reason="slow_request").inc()
        seconds = self._limits.receive_timeout
        self._say(408, "slow_request", f"The headers did not come within {seconds:g} s (`--receive-timeout`).")

    def _say(self, status: int, code: str, message: str, *, kind: str = "invalid_request_error") -> None:
        """The last word on this connection, to a request that never became one; earlier ones are answered first."""
        self._refused = True
        body = (
            b'{"error":{"message":"%s","type":"%s","param":null,"code":"%s"}}'
            % (message.encode(), kind.encode(), code.encode())
        )  # fmt: skip
        later = b"retry-after: 1\r\n" if status == 503 else b""
        self._last_word = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
            % (status, http.HTTPStatus(status).phrase.encode(), len(body), later)
            + body
        )
        if self._reading is Reading.BODY:  # what began as a request goes wrong in its body
            if self.pipeline:
                self.pipeline.popleft()  # it waits behind another: nobody has begun with it
            elif self.cycle.response_started:
                self._last_word = b""  # it has its answer
            else:
                self._leave()
                return
        if not self._is_answering:
            self._leave()

    def _leave(self) -> None:
        self.transport.write(self._last_word)
        self.transport.close()
        self._mind_leftovers()

    def _has_taken_a_place(self) -> bool:
        """Of a connection that has been idle for so long that nothing can be on its way to its client any more."""
        longest = next(iter(self._idle), None)
        if longest is None or self.loop.time() - longest._answered_at < FLUSH_SECONDS:
            return False
        self.connections.discard(longest)
        longest._part()
        return True

    def _part(self) -> None:
        """End of an idle connection."""
        self._idle.pop(self, None)
        self.transport.close()
        self._mind_leftovers()
        if self._slow_timer is None and self._parting_timer is None:
            when = max(self._answered_at + FLUSH_SECONDS, self.loop.time() + PARTING_SECONDS)
            self._parting_timer = self.loop.call_at(when, self.transport.abort)

    def _mind_leftovers(self) -> None:
        """A connection closes once everything is read, which must not be never."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_reader()

    def _await_reader(self) -> None:
        if self._slow_timer is None:
            self._slow_timer = self.loop.call_later(self._limits.slow_reader_timeout, self._cut)

    def _cut(self) -> None:
        self._slow_timer = None
        self._metrics.slow_readers_cut_total.inc()
        log.info("a client read nothing for %g s: its connection is cut", self._limits.slow_reader_timeout)
        self.transport.abort()


def bounded(limits: ConnectionSettings, metrics: Metrics) -> Callable[..., HttpConnection]:
    """What uvicorn is to make of each connection."""

    idle: dict[HttpConnection, None] = {}

    def connection(*args: Any, **kwargs: Any) -> HttpConnection:
        return HttpConnection(*args, limits=limits, metrics=metrics, idle=idle, **kwargs)

    return connection


def _parser(connection: HttpConnection) -> httptools.HttpRequestParser:
    """As uvicorn makes it."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _ended_by_closing(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application for a client that knows no chunks: its answer ends where its connection does."""

    async def ended_by_closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))  # else uvicorn takes it for a mistake
            await send(message)

        await app(scope, receive, send_all)

    return ended_by_closing


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """What is left of a timer: nothing."""
    if timer is not None:
        timer.cancel()
    return None
