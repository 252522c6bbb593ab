"""Limits on one client's HTTP connection that uvicorn does not have: header size, slow senders and slow readers.

HttpConnection stands between the socket and uvicorn's protocol and uses public interfaces only: asyncio's Protocol and
Transport, httptools' parser, and ASGI. It parses what the client sends and hands whole, valid heads on to uvicorn, one
request at a time; it learns from the ASGI application when a request has been answered.
"""

from __future__ import annotations

import asyncio
import enum
import http
import logging
import re
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from space_router.config import ServeConfig
from space_router.http_server.responses import OPEN_PATHS
from space_router.metrics import Metrics

log = logging.getLogger(__name__)

NUM_GUESTS = 32
"""Connections beyond `max_connections` whose request is read, to answer probes; further ones are refused unread."""

GUEST_SECONDS = 1.0  # how long such a connection has to send its headers
FLUSH_SECONDS = 5.0  # how long the last bytes of a finished answer may take to be sent
RESET_SECONDS = 0.25  # between two looks at a client that has closed its sending side
PARTING_SECONDS = 1.0  # how long an idle client has to close its side, which TLS waits for

_NEVER = 10**8  # seconds: the keep-alive of uvicorn's own, as a slow head must not end by it

_PATHS_OF_PROBES = frozenset(path.encode() for path in OPEN_PATHS)


def uvicorn_config(app: ASGIApp, limits: ServeConfig, metrics: Metrics, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application whose connections have these limits."""
    open_connections: set[HttpConnection] = set()
    idle: dict[HttpConnection, None] = {}

    def connection(app_state: dict[str, Any], **rest: Any) -> HttpConnection:
        made = HttpConnection(limits, metrics, open_connections, idle)
        made.uvicorn = HttpToolsProtocol(app_state={**app_state, "connection": made}, **rest)
        return made

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            answered: HttpConnection = scope["state"]["connection"]
            answered.request_answered()

    return uvicorn.Config(
        answering,
        http=connection,  # type: ignore[arg-type]  # called as a class is
        timeout_keep_alive=_NEVER,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        **options,
    )


class HeaderTooLarge(Exception):
    """First line and headers exceed `--max-header`."""


class Reading(enum.Enum):
    """Which part of a request is being received."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class HttpConnection(asyncio.Protocol):
    """Refuses headers that are too large or too slow, and closes the connection of a client that does not read.

    A new connection must send its first byte within `receive_timeout`. The head (first line and headers) must be
    complete within the same time from its first byte. For a pipelined head the time starts when the earlier response
    ends, and an error in it is reported then. Between requests a connection is kept for `keep_alive`.

    The transport calls `pause_writing` when its send buffer is full. The stream then waits, its request gets no more
    pages, and after `slow_reader_timeout` the connection is closed.

    A connection beyond `max_connections` replaces the one that has been idle longest. If none is idle, the connection
    is a guest: one probe request is answered, any other request gets 503.

    Protocol upgrades (`Upgrade: h2c`, `websocket`) are ignored, as RFC 9110 §7.8 allows.
    """

    uvicorn: HttpToolsProtocol

    def __init__(
        self,
        limits: ServeConfig,
        metrics: Metrics,
        open_connections: set[HttpConnection],
        idle: dict[HttpConnection, None],
    ) -> None:
        """`idle`: all idle connections of the server, the longest idle first."""
        self._limits, self._metrics = limits, metrics
        self._open, self._idle = open_connections, idle
        self._loop = asyncio.get_running_loop()
        self._parser = _parser(self)
        self._reading = Reading.NOTHING
        self._had_whole_head = False  # the last data completed a head
        self._head_size = 0  # bytes so far, a lower bound
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_chunked = False  # the body being received
        self._is_answering = False  # uvicorn has a request that is not answered yet
        self._later: deque[list[bytes]] = deque()  # requests behind it, in pieces; the last one may be incomplete
        self._timer: asyncio.TimerHandle | None = None  # for the first byte, a head, or the next request
        self._slow_timer: asyncio.TimerHandle | None = None
        self._parting_timer: asyncio.TimerHandle | None = None
        self._answered_at = -FLUSH_SECONDS  # end of the last response, in loop time
        self._refused = False
        self._last_word = b""  # the response to a refused request
        self._is_guest = False
        self._is_sender_closed = False  # and it may still read
        self._reset_timer: asyncio.TimerHandle | None = None

    # Events of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._to_client = ClientTransport(self, transport)
        self.uvicorn.connection_made(self._to_client)  # type: ignore[arg-type]  # it has what uvicorn uses
        self._open.add(self)
        num_beyond = len(self._open) - self._limits.max_connections
        if num_beyond > 0 and self._has_taken_a_place():
            num_beyond -= 1
        self._is_guest = num_beyond > 0
        if num_beyond > NUM_GUESTS:
            self._refuse_guest()
            return
        seconds = self._limits.receive_timeout
        self._set_timer(min(GUEST_SECONDS, seconds) if self._is_guest else seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self.uvicorn.connection_lost(exc)
        self._idle.pop(self, None)
        for timer in (self._timer, self._slow_timer, self._parting_timer, self._reset_timer):
            if timer is not None:
                timer.cancel()
        del self.uvicorn, self._parser, self._to_client  # ends reference cycles: garbage is collected seldom

    def pause_writing(self) -> None:
        self.uvicorn.pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self.uvicorn.resume_writing()
        if self._slow_timer is not None and not self._transport.is_closing():
            self._slow_timer.cancel()
            self._slow_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refused or self._transport.is_closing():
            return
        was_in_body, self._had_whole_head = self._reading is Reading.BODY, False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "invalid_request", "This is no valid HTTP request.")
        if self._reading is Reading.HEAD and self._timer is None and not self._refused:
            self._await_head()
        among_it = was_in_body or self._had_whole_head  # `data` may include body bytes
        if self._reading is Reading.HEAD and not among_it and not self._refused:
            self._head_size += len(data)  # the parser does not report an unfinished header
            if self._head_size > 2 * self._limits.max_header:
                self._refuse_head()

    def eof_received(self) -> bool:
        """The client sends nothing more. If it may still read, what it asked for in full is answered.

        Returns whether the transport stays open. A client that has closed its socket altogether looks the same until
        something is sent to it: an interim response is, unless the answer has begun, which brings its reset.
        """
        is_asked = self._is_answering and self._reading is Reading.NOTHING and not self._refused
        if not is_asked or self._transport.get_extra_info("ssl_object") is not None:  # TLS has no half-closed state
            return False
        if not self._is_sender_closed:
            self._is_sender_closed = True
            if not self._to_client.has_begun and not self._to_client.is_plain:
                self._transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self._watch_reader()
        return True

    def _watch_reader(self) -> None:
        """Look now and then whether a client that sends nothing more has reset the connection."""
        if _is_reset(self._transport.get_extra_info("socket")):
            self._transport.abort()
            return
        self._reset_timer = self._loop.call_later(RESET_SECONDS, self._watch_reader)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, ignoring protocol upgrades. Raises HttpParserError.

        The parser assumes that an offered upgrade is accepted, so it would not parse the body. It stops after the head;
        the head is then parsed again without the `Upgrade` header.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._refused:
                    return
                rest = rest[offer.args[0] :]
                self._headers = [header for header in self._headers if header[0].lower() != b"upgrade"]
                head = self._head()
                self._parser = _parser(self)  # after `connection: close` the old one accepts no more data
                self._parser.feed_data(head)

    # Events of the parser.

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._reading, self._head_size = Reading.HEAD, 0
        self._url, self._headers, self._is_chunked = b"", [], False
        self._idle.pop(self, None)
        if not self._is_guest and not self._is_answering:
            self._set_timer(None)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._reading is Reading.HEAD:  # a trailer changes nothing
            self._headers.append((name, value))
            self._is_chunked |= name.lower() == b"transfer-encoding"

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self._parser.get_method() == b"CONNECT":
            self._refuse(400, "invalid_request", "CONNECT is for proxies, and this server is none.")
            return
        if self._parser.should_upgrade():
            return  # called again without the upgrade
        if (fault := self._host_fault()) is not None:
            self._refuse(400, "invalid_request", fault)
            return
        if self._is_chunked and (refusal := self._coding_fault()) is not None:
            self._refuse(refusal[0], "invalid_request", refusal[1])
            return
        httptools.parse_url(self._url).path.decode("ascii")  # raises as uvicorn would
        self._had_whole_head = True
        if not self._is_answering:
            self._set_timer(None)
        if self._is_guest:
            if self._url.partition(b"?")[0] not in _PATHS_OF_PROBES:
                self._refuse_guest()
                return
            self._headers = [header for header in self._headers if header[0].lower() != b"connection"]
            self._headers.append((b"connection", b"close"))
        if self._parser.get_http_version() in ("0.9", "1.0"):  # RFC 9110 §10.1.1
            self._headers = [header for header in self._headers if header[0].lower() != b"expect"]
        self._reading = Reading.BODY
        if self._is_answering:
            self._later.append([self._head()])
            self._transport.pause_reading()
        else:
            self._begin([self._head()])

    def _host_fault(self) -> str | None:
        """Return what is wrong with the head's Host (RFC 9112 §3.2), or None."""
        hosts = [value for name, value in self._headers if name.lower() == b"host"]
        if not hosts:
            is_old = self._parser.get_http_version() in ("0.9", "1.0")
            return None if is_old else "The request has no Host header, which HTTP/1.1 requires."
        if len(hosts) > 1:
            return "The request has more than one Host header."
        host = hosts[0].strip(b" \t")
        if (found := _HOST.fullmatch(host)) is None:
            return "The Host header is no host, nor a host and a port."
        port = (found["port"] or b"").lstrip(b"0")
        if len(port) > 5 or int(port or b"0") > _LAST_PORT:
            return f"The Host header's port is above {_LAST_PORT}."
        return None

    def _coding_fault(self) -> tuple[int, str] | None:
        """Return status and message for a body that is not simply in chunks (RFC 9112 §6.1, §7), or None.

        A proxy in front that reads such a body otherwise would see other requests on this connection.
        """
        values = b",".join(value for name, value in self._headers if name.lower() == b"transfer-encoding")
        codings = [coding.strip(b" \t").lower() for coding in values.split(b",")]
        if self._parser.get_http_version() in ("0.9", "1.0"):
            return 400, "Transfer-Encoding is for HTTP/1.1."
        if set(codings) != {b"chunked"}:
            return 501, "The only Transfer-Encoding that this server takes is chunked. Send the body as it is."
        if values.endswith(b"\t"):  # the parser would not find the end of the body
            return 400, "Transfer-Encoding has a tab behind chunked."
        return None if len(codings) == 1 else (400, "Transfer-Encoding names chunked more than once.")

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._pass_on(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    def on_message_complete(self) -> None:
        if self._refused or self._parser.should_upgrade():
            return
        if self._is_chunked:
            self._pass_on(b"0\r\n\r\n")
        self._reading = Reading.NOTHING
        if not self._is_answering:  # the response came before the end of the body
            self._await_request()

    def _head(self) -> bytes:
        version = self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, max(version, "1.0").encode())]
        lines += [b"%b: %b" % header for header in self._headers]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the head. Raises HeaderTooLarge, which the parser reports as an invalid request."""
        self._head_size += num_bytes
        if self._head_size > self._limits.max_header:
            self._refuse_head()
            raise HeaderTooLarge

    # Requests, one at a time.

    def _begin(self, pieces: list[bytes]) -> None:
        """Give uvicorn the next request, or as much of it as there is."""
        self._is_answering = True
        self._to_client.begin(is_plain=pieces[0].partition(b"\r\n")[0].endswith(b" HTTP/1.0"))
        for piece in pieces:
            self.uvicorn.data_received(piece)

    def _pass_on(self, piece: bytes) -> None:
        if self._later:
            self._later[-1].append(piece)
        else:
            self.uvicorn.data_received(piece)

    def request_answered(self) -> None:
        """Go on after a response: with the next request, or by waiting for one."""
        self._is_answering = False
        self._answered_at = self._loop.time()
        if self._transport.is_closing() or self not in self._open:
            return
        self._to_client.flush()
        if self._later:
            self._begin(self._later.popleft())
            if not self._later and self._reading is Reading.BODY:
                self._transport.resume_reading()  # the rest of its body
        elif self._refused:
            self._leave()
        elif self._is_sender_closed:
            self.close()
        else:
            self._transport.resume_reading()
            if self._reading is Reading.HEAD:
                self._await_head()
            else:
                self._await_request()

    def _await_request(self) -> None:
        self._set_timer(self._limits.keep_alive)
        if self._reading is Reading.NOTHING:
            self._idle[self] = None

    def _await_head(self) -> None:
        """Limit the time for the rest of a head. Empty lines before a head do not start it: RFC 9112 §2.2."""
        if not self._is_answering and not self._is_guest:
            self._set_timer(self._limits.receive_timeout)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        if self._reading is not Reading.HEAD:
            self.close()  # no request was begun
        elif self._is_guest:
            self._refuse_guest()
        else:
            self._metrics.rejected_total.labels(reason="slow_request").inc()
            seconds = self._limits.receive_timeout
            self._refuse(408, "slow_request", f"The headers did not come within {seconds:g} s (`--receive-timeout`).")

    # Refusals.

    def _refuse_head(self) -> None:
        self._metrics.rejected_total.labels(reason="header_too_large").inc()
        most = self._limits.max_header
        self._refuse(431, "header_too_large", f"The headers exceed {most} bytes. Send less, or raise `--max-header`.")

    def _refuse_guest(self) -> None:
        self._metrics.rejected_total.labels(reason="too_many_connections").inc()
        message = (
            f"There are {self._limits.max_connections} connections already, the most (`--max-connections`). Close "
            "some, or come again later."
        )
        self._refuse(503, "too_many_connections", message, kind="service_unavailable_error")

    def _refuse(self, status: int, code: str, message: str, *, kind: str = "invalid_request_error") -> None:
        """Answer a refused request and close the connection, after the responses to earlier requests."""
        self._refused = True
        body = b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}' % (
            message.encode(),
            kind.encode(),
            code.encode(),
        )
        self._last_word = (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
        ) % (
            status,
            http.HTTPStatus(status).phrase.encode(),
            len(body),
            b"retry-after: 1\r\n" * (status == 503),
            body,
        )
        if self._reading is Reading.BODY:  # the error is in the body of a request that was accepted
            if self._later:
                self._later.pop()
            elif self._to_client.has_begun:
                self._last_word = b""  # its response has already started
            else:
                self._leave()
        if not self._is_answering:
            self._leave()

    def _leave(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._last_word)
            self.close()

    # Closing.

    def close(self) -> None:
        """Close the connection; abort it if the client does not read the rest or close its side in time."""
        self._idle.pop(self, None)
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._await_reader()
        elif self._slow_timer is None and self._parting_timer is None:
            when = max(self._answered_at + FLUSH_SECONDS, self._loop.time() + PARTING_SECONDS)
            self._parting_timer = self._loop.call_at(when, self._transport.abort)

    def _has_taken_a_place(self) -> bool:
        """Close the longest idle connection to make room, and return whether there was one.

        It must be idle for FLUSH_SECONDS, so that its last response has been delivered.
        """
        longest = next(iter(self._idle), None)
        if longest is None or self._loop.time() - longest._answered_at < FLUSH_SECONDS:
            return False
        self._open.discard(longest)
        longest.close()
        return True

    def _await_reader(self) -> None:
        """Limit how long the client may leave unread what was sent."""
        if self._slow_timer is None:
            self._slow_timer = self._loop.call_later(self._limits.slow_reader_timeout, self._cut)

    def _cut(self) -> None:
        self._slow_timer = None
        self._metrics.slow_readers_cut_total.inc()
        log.info("a client read nothing for %g s: its connection is cut", self._limits.slow_reader_timeout)
        self._transport.abort()


class ClientTransport:
    """The transport as uvicorn sees it: `close` takes bounded time, and HTTP/1.0 clients are sent no chunks.

    uvicorn writes a response's head by itself. It is sent together with the first part of the body, or when the loop
    turns: a call of the system less, and a packet, for each response that is not a stream.
    """

    def __init__(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._close = connection.close
        self._loop = asyncio.get_running_loop()
        self.write: Callable[[bytes], None] = transport.write
        self.has_begun = False  # the current response
        self.is_plain = False  # to HTTP/1.0
        self._head = b""  # that is not sent yet
        self._is_chunked = False  # as uvicorn writes the body of a response to HTTP/1.0
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self.flush()
        self._close()

    def begin(self, *, is_plain: bool) -> None:
        """Prepare for a response. `is_plain`: to HTTP/1.0, where closing the connection ends a body without length."""
        self.has_begun, self.is_plain = False, is_plain
        self.write = self._write_head

    def flush(self) -> None:
        """Send a head that waits for its body."""
        if self._head:
            self._write_first(b"")

    def _write_head(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 100 "):
            self._transport.write(data)
            return
        self.has_begun = True
        self._is_chunked = self.is_plain and _CHUNKED in data
        self._head = data.replace(_CHUNKED, b"", 1) if self._is_chunked else data
        self.write = self._write_first
        self._flushing = self._loop.call_soon(self.flush)

    def _write_first(self, data: bytes) -> None:
        """Send the head and what follows it."""
        if self._flushing is not None:
            self._flushing.cancel()
        self.write = self._write_content if self._is_chunked else self._transport.write
        head, self._head, self._flushing = self._head, b"", None
        self._transport.write(head + (_content(data) if self._is_chunked else data))

    def _write_content(self, chunks: bytes) -> None:
        self._transport.write(_content(chunks))


def _content(chunks: bytes) -> bytes:
    """Return what is in whole chunks."""
    pieces = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        chunks = rest[int(size, 16) + 2 :]
    return b"".join(pieces)


_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::(?P<port>[0-9]*))?")
_LAST_PORT = 65535
_TCP_CLOSED = 7  # in Linux's tcp_states.h
_CHUNKED = b"transfer-encoding: chunked\r\n"


def _is_reset(connection: Any) -> bool:
    """Return whether the other end of a TCP socket has reset it; False where the system does not say."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not hasattr(socket, "TCP_INFO"):
        return False
    state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == _TCP_CLOSED


def _parser(connection: HttpConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
