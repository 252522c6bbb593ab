"""Limits on one client's HTTP connection that uvicorn does not have: header size, slow senders and slow readers."""

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

from space_router.config import ServeConfig
from space_router.http_server.paths import OPEN_PATHS
from space_router.metrics import Metrics

log = logging.getLogger(__name__)

NUM_GUESTS = 32
"""Connections beyond `max_connections` whose request is read, to answer probes; further ones are refused unread."""

GUEST_SECONDS = 1.0
"""How long such a connection has to send its headers."""

FLUSH_SECONDS = 5.0
"""How long the last bytes of a finished answer may take to be sent."""

PARTING_SECONDS = 1.0
"""How long an idle client has to close its side, which TLS waits for."""

_PATHS_OF_PROBES = frozenset(path.encode() for path in OPEN_PATHS)


class HeaderTooLarge(Exception):
    """First line and headers exceed `--max-header`."""


class Reading(enum.Enum):
    """Which part of a request is being received."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class HttpConnection(HttpToolsProtocol):
    """Refuses headers that are too large or too slow, and closes the connection of a client that does not read.

    A new connection must send its first byte within `receive_timeout`. The head (first line and headers) must be
    complete within the same time from its first byte. For a pipelined head the time starts when the earlier response
    ends, and an error in it is reported then.

    The transport calls `pause_writing` when its send buffer is full. The stream then waits, its request gets no more
    pages, and after `slow_reader_timeout` the connection is closed.

    A connection beyond `max_connections` replaces the one that has been idle longest. If none is idle, the connection
    is a guest: one probe request is answered, any other request gets 503.

    Protocol upgrades (`Upgrade: h2c`, `websocket`) are ignored, as RFC 9110 §7.8 allows.
    """

    def __init__(
        self,
        *args: Any,
        limits: ServeConfig,
        metrics: Metrics,
        idle: dict[HttpConnection, None],
        **kwargs: Any,
    ) -> None:
        """`idle`: all idle connections, the longest idle first."""
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._limits, self._metrics = limits, metrics
        self.timeout_keep_alive = limits.keep_alive  # type: ignore[assignment]  # uvicorn declares int; floats work
        self._reading = Reading.NOTHING
        self._had_whole_head = False  # the last data completed a head
        self._head_size = 0  # bytes so far, a lower bound
        self._head_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._parting_timer: asyncio.TimerHandle | None = None
        self._answered_at = -FLUSH_SECONDS  # end of the last response, in loop time
        self._running: RequestResponseCycle | None = None  # the current or last request
        self._refused = False
        self._last_word = b""  # the response to a refused request
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
        if self._running is not None:  # uvicorn notifies only the last pipelined request
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
        among_it = was_in_body or self._had_whole_head  # `data` may include body bytes
        if self._reading is Reading.HEAD and not among_it and not self._refused:
            self._head_size += len(data)  # the parser does not report an unfinished header
            if self._head_size > 2 * self._limits.max_header:
                self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, ignoring protocol upgrades. Raises HttpParserError.

        The parser assumes that an offered upgrade is accepted, so it would not parse the body. It stops after the head;
        the head is then parsed again without the `Upgrade` header.
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
                self.parser = _parser(self)  # after `connection: close` the old one accepts no more data
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
            return  # called again without the upgrade
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
        """Close the connection after the current response. uvicorn calls this when the server stops."""
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
        """Refuse an invalid request. uvicorn also calls this after HeaderTooLarge, which is already answered."""
        if not self._refused:
            self._say(400, "invalid_request", msg)

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the head. Raises HeaderTooLarge, which the parser reports as an invalid request."""
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
        """Start the timer for the rest of a head. Empty lines before a head do not start one: RFC 9112 §2.2."""
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
            self.transport.close()  # no request was begun
            return
        if self._is_guest:
            self._refuse_guest()
            return
        self._metrics.rejected_total.labels(reason="slow_request").inc()
        seconds = self._limits.receive_timeout
        self._say(408, "slow_request", f"The headers did not come within {seconds:g} s (`--receive-timeout`).")

    def _say(self, status: int, code: str, message: str, *, kind: str = "invalid_request_error") -> None:
        """Answer a refused request and close the connection, after the responses to earlier requests."""
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
        if self._reading is Reading.BODY:  # the error is in the body of a request that was accepted
            if self.pipeline:
                self.pipeline.popleft()  # still queued behind another request
            elif self.cycle.response_started:
                self._last_word = b""  # its response has already started
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
        """Close the longest idle connection to make room, and return whether there was one.

        It must be idle for FLUSH_SECONDS, so that its last response has been delivered.
        """
        longest = next(iter(self._idle), None)
        if longest is None or self.loop.time() - longest._answered_at < FLUSH_SECONDS:
            return False
        self.connections.discard(longest)
        longest._part()
        return True

    def _part(self) -> None:
        """Close an idle connection; abort it if the client does not close its side in time."""
        self._idle.pop(self, None)
        self.transport.close()
        self._mind_leftovers()
        if self._slow_timer is None and self._parting_timer is None:
            when = max(self._answered_at + FLUSH_SECONDS, self.loop.time() + PARTING_SECONDS)
            self._parting_timer = self.loop.call_at(when, self.transport.abort)

    def _mind_leftovers(self) -> None:
        """Limit how long a closing connection waits for the client to read its last bytes."""
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


def bounded(limits: ServeConfig, metrics: Metrics) -> Callable[..., HttpConnection]:
    """Return the protocol factory for uvicorn; its connections share one table of idle connections."""

    idle: dict[HttpConnection, None] = {}

    def connection(*args: Any, **kwargs: Any) -> HttpConnection:
        return HttpConnection(*args, limits=limits, metrics=metrics, idle=idle, **kwargs)

    return connection


def _parser(connection: HttpConnection) -> httptools.HttpRequestParser:
    """Create a parser with the same settings as uvicorn's."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _ended_by_closing(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap the application for HTTP/1.0, which has no chunked encoding: closing the connection ends the response."""

    async def ended_by_closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn raises on a mismatch
            await send(message)

        await app(scope, receive, send_all)

    return ended_by_closing


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer and return None."""
    if timer is not None:
        timer.cancel()
    return None
