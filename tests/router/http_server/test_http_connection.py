"""What a client may send, how slowly, and what it may leave unread, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from doubles.router.whole_router import SOON, Client, WebTrial, serving
from space_router.config import ServeConfig
from space_router.http_server import http_connection
from space_router.http_server.http_connection import NUM_GUESTS
from space_router.metrics import Metrics

LIMITS = ServeConfig(max_header=2048, receive_timeout=0.3, keep_alive=1.0, slow_reader_timeout=0.3)


def rejected(server: WebTrial, reason: str) -> float | None:
    return server.metrics.value("spaceserve_rejected_total", reason=reason)


async def test_an_ordinary_request_is_answered_and_its_connection_kept() -> None:
    ask = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(replace(LIMITS, keep_alive=SOON)) as server, server.connect(ask) as client:
        assert b"hello" in await client.until(b"0\r\n\r\n")
        await asyncio.sleep(0.5)  # longer than a head may take: the next one has not begun
        await client.send(ask)
        assert b"hello" in await client.until(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\nx-long: " + b"x" * 3000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(400)) + b"\r\n",
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx-unfinished: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
    ],
    ids=["a long header", "many headers", "a long path", "a header without end", "a path without end"],
)
async def test_a_head_beyond_its_bound_is_431_in_json_and_counted(head: bytes) -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(head)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_too_large"
        assert rejected(server, "header_too_large") == 1


async def test_a_body_that_comes_with_its_head_is_no_part_of_it() -> None:
    """All of a request in one read, and the next one on the same connection."""
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 20000\r\n%s\r\n" + b"x" * 20_000
    async with serving(replace(LIMITS, keep_alive=SOON)) as server:
        answer = await server.answer(request % b"", request % b"connection: close\r\n")
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert rejected(server, "header_too_large") == 0


async def test_a_head_that_comes_drop_by_drop_is_408() -> None:
    async with serving(LIMITS) as server:
        begun = time.monotonic()
        answer = await server.answer(*(b"GET / HTTP/1.1\r\nx: " + b"y" * n for n in range(4)), b"z")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - begun < SOON
        assert rejected(server, "slow_request") == 1


async def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async with serving(LIMITS) as server:
        assert await server.answer() == b""


async def test_a_connection_is_kept_without_a_request_for_as_long_as_is_said() -> None:
    ask = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(replace(LIMITS, keep_alive=0.5)) as server:
        begun = time.monotonic()  # before the answer, which its time begins with
        async with server.connect(ask) as client:
            await client.until(b"0\r\n\r\n")
            assert await client.rest() == b""
        assert 0.4 < time.monotonic() - begun < SOON


def test_a_connection_is_kept_for_longer_than_load_balancers_keep_theirs() -> None:
    assert ServeConfig().keep_alive > 60


BAD_CHUNK = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 not http\r\n\r\n", BAD_CHUNK], ids=["no HTTP", "a bad chunk"])
async def test_what_is_no_http_is_400_and_closed(sent: bytes) -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(sent)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("kept", [b"", b"connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
async def test_a_client_that_knows_no_chunks_gets_none_and_the_end_is_the_end_of_the_connection(kept: bytes) -> None:
    async with serving(replace(LIMITS, slow_reader_timeout=SOON)) as server:
        async with server.connect(b"GET /held HTTP/1.0\r\n%s\r\n" % kept) as client:
            head = await client.until(b"begun")  # as soon as it is there
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert head.endswith(b"\r\n\r\nbegun")
            server.released.set()
            assert await client.rest() == b"ended"
        assert (await server.answer(b"GET /long HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n" + b"y" * (4 << 20))


async def test_a_client_that_knows_no_chunks_is_not_told_to_continue_either() -> None:
    """RFC 9110 §10.1.1; and a length that is said is kept to."""
    ask = b"POST /echo HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    async with serving(LIMITS) as server:
        answer = await server.answer(ask, b"hello")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 5\r\n" in answer
        assert answer.endswith(b"\r\n\r\nhello")


async def cut(server: WebTrial) -> None:
    """Until a connection has been cut."""
    async with asyncio.timeout(SOON):
        while server.metrics.value("spaceserve_slow_readers_cut_total") != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_that_nobody_reads_stops_being_made_and_is_cut_and_counted() -> None:
    ask = b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(LIMITS) as server, server.connect(ask, window=4096):
        await asyncio.wait_for(server.gone.wait(), SOON)
        assert server.num_sent < 1 << 20, "what it did not read was never held"
        await cut(server)


async def test_a_whole_answer_that_nobody_reads_is_cut_too() -> None:
    ask = b"GET /long HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    async with serving(LIMITS) as server, server.connect(ask, window=4096):
        await cut(server)


async def test_a_reader_that_reads_slowly_but_reads_gets_everything() -> None:
    ask = b"GET /long HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    async with serving(replace(LIMITS, slow_reader_timeout=SOON)) as server, server.connect(ask) as client:
        size = 0
        while piece := await client.receive():
            size += len(piece)
            await asyncio.sleep(0.005)
        assert size > 4 << 20
        assert server.metrics.value("spaceserve_slow_readers_cut_total") == 0


async def test_a_client_that_resets_leaves_no_timer_behind() -> None:
    ask = b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(LIMITS) as server:
        async with server.connect(ask, window=4096) as client:
            await client.receive()
            client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.wait_for(server.gone.wait(), SOON)
        await asyncio.sleep(0.5)
        assert server.metrics.value("spaceserve_slow_readers_cut_total") == 0


SHORT = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
END = b"0\r\n\r\n"
FEW = replace(LIMITS, max_connections=2)
PROBE = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"


async def test_beyond_the_most_connections_a_client_is_told_to_come_again_and_a_probe_is_answered() -> None:
    ask = b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(replace(FEW, slow_reader_timeout=SOON, receive_timeout=SOON)) as server:
        async with server.connect(ask, window=4096), server.connect(ask, window=4096):
            for request in (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", POST, POST.removesuffix(b"hello")):
                answer = await server.answer(request)
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in head
                assert b"connection: close" in head
                error = json.loads(body)["error"]
                assert (error["code"], error["type"]) == ("too_many_connections", "service_unavailable_error")
                assert "There are 2 connections already, the most (`--max-connections`)" in error["message"]
            assert rejected(server, "too_many_connections") == 3
            answer = await server.answer(PROBE)  # which the server then closes
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
            slow = await server.answer(b"GET / HTTP/1.1\r\n")
            assert slow.startswith(b"HTTP/1.1 503 "), "a guest has not long to say what it wants"
        async with asyncio.timeout(SOON):
            while not (await server.answer(POST)).startswith(b"HTTP/1.1 200 "):
                pass


@asynccontextmanager
async def full() -> AsyncIterator[tuple[WebTrial, Client, Client]]:
    """A server that has as many connections as it takes, both idle, the second one for longer."""
    async with (
        serving(replace(FEW, keep_alive=SOON)) as server,
        server.connect(SHORT) as first,
        server.connect(SHORT) as second,
    ):
        await second.until(END)
        await first.until(END)
        await first.send(SHORT)
        await first.until(END)
        yield server, first, second


async def test_beyond_the_most_connections_the_one_that_is_idle_longest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "FLUSH_SECONDS", 0.0)
    async with full() as (server, first, second), server.connect(SHORT) as third:
        assert (await third.until(END)).startswith(b"HTTP/1.1 200 ")
        assert await second.rest() == b""
        await first.send(SHORT)
        assert (await first.until(END)).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_that_was_just_answered_gives_way_to_nobody() -> None:
    """Of its answer something may still be on its way."""
    async with full() as (server, _, second):
        assert (await server.answer(SHORT)).startswith(b"HTTP/1.1 503 ")
        await second.send(SHORT)
        assert (await second.until(END)).startswith(b"HTTP/1.1 200 ")


async def test_far_beyond_the_most_connections_nobody_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "GUEST_SECONDS", SOON)  # nobody goes meanwhile
    async with serving(replace(FEW, receive_timeout=2 * SOON)) as server, AsyncExitStack() as opened:
        for _ in range(2 + NUM_GUESTS):
            await opened.enter_async_context(server.connect(b""))
        begun = time.monotonic()
        assert (await server.answer(b"")).startswith(b"HTTP/1.1 503 ")
        assert time.monotonic() - begun < SOON, "at once"


async def test_a_guest_who_says_nothing_is_let_go_long_before_others_would_be() -> None:
    async with serving(replace(FEW, receive_timeout=2 * SOON)) as server, AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(server.connect(b"")) for _ in range(3)]
        assert await clients[-1].rest() == b""


HASTY = ServeConfig(max_header=2048, receive_timeout=0.2, keep_alive=1.0)
HELD = b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n"
BEGUN = b"5\r\nbegun\r\n"
ENDED = b"5\r\nended\r\n0\r\n\r\n"


async def test_empty_lines_during_an_answer_are_nothing() -> None:
    async with serving(HASTY) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(b"\r\n\r\n")
        await asyncio.sleep(3 * HASTY.receive_timeout)
        server.released.set()
        assert await client.until(b"\r\n0\r\n\r\n") == ENDED
        await client.send(SHORT)
        assert b"hello" in await client.until(b"0\r\n\r\n")


async def test_a_head_that_begins_during_an_answer_has_its_time_from_the_end_of_that_on() -> None:
    async with serving(HASTY) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(SHORT[:9])
        await asyncio.sleep(3 * HASTY.receive_timeout)
        server.released.set()
        assert await client.until(b"\r\n0\r\n\r\n") == ENDED
        await client.send(SHORT[9:] + SHORT[:9])
        assert b"hello" in await client.until(b"0\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("framing", [b"content-length: 5", b"transfer-encoding: chunked"], ids=["length", "chunks"])
async def test_the_body_behind_a_head_that_came_during_an_answer_is_read(framing: bytes, num_before: int) -> None:
    """Clients that keep a connection send the next head as soon as the last byte is there, and the body apart."""
    head = b"POST /echo HTTP/1.1\r\nhost: a\r\n%s\r\n\r\n" % framing
    body = b"hello" if framing.startswith(b"content") else b"5\r\nhello\r\n0\r\n\r\n"
    async with serving(replace(HASTY, receive_timeout=SOON)) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(num_before * SHORT + head)
        await asyncio.sleep(0.05)
        server.released.set()
        found = b""
        while found.count(b"0\r\n\r\n") <= num_before:
            found += await client.until(b"0\r\n\r\n")
        await client.send(body[:3])
        await asyncio.sleep(0.05)
        await client.send(body[3:])
        assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200 ")
        await client.send(SHORT)
        assert b"hello" in await client.until(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /" + b"x" * 9000, b"431"),
        (b"no request\r\n\r\n", b"400"),
        (b"GET http:///// HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (BAD_CHUNK, b"400"),
    ],
    ids=["too long", "far too long", "no HTTP", "no path", "CONNECT", "a bad chunk"],
)
async def test_what_is_wrong_with_the_last_request_is_said_behind_the_others(wrong: bytes, status: bytes) -> None:
    async with serving(HASTY) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(SHORT + wrong)
        await asyncio.sleep(0.1)
        server.released.set()
        first, second, third = (await client.rest()).split(b"HTTP/1.1 ")
        assert first == ENDED
        assert second.endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        assert third.startswith(status)
        assert server.asked == ["GET /held", "GET /"]
        assert server.metrics.value("spaceserve_rejected_total", reason="header_too_large") == (status == b"431")


async def test_a_body_that_goes_wrong_during_its_answer_is_the_end_behind_it() -> None:
    async with serving(HASTY) as server, server.connect(BAD_CHUNK.replace(b"/echo", b"/held")[:-9]) as client:
        await client.until(BEGUN)
        await client.send(BAD_CHUNK[-9:])
        await asyncio.sleep(0.1)
        server.released.set()
        assert await client.rest() == ENDED


async def test_an_empty_line_does_not_keep_a_connection_nor_end_it() -> None:
    async with serving(replace(HASTY, keep_alive=SOON)) as server, server.connect(SHORT) as client:
        await client.until(b"0\r\n\r\n")
        await client.send(b"\r\n")
        await asyncio.sleep(3 * HASTY.receive_timeout)
        await client.send(SHORT)
        await client.until(b"0\r\n\r\n")
    async with serving(HASTY) as server, server.connect(SHORT) as client:
        await client.until(b"0\r\n\r\n")
        await client.send(b"\r\n")
        assert await client.rest() == b"", "closed without a word when it was idle for too long"


async def test_the_request_that_runs_learns_that_its_client_went_though_another_waits_behind_it() -> None:
    async with serving(HASTY) as server:
        async with server.connect(b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n") as client:
            await client.receive()
            await client.send(SHORT)
            await asyncio.sleep(0.1)  # the server reads it
            client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.wait_for(server.gone.wait(), SOON)


PATIENT = ServeConfig(receive_timeout=SOON)
HTTP2 = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
BODY = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
WITH_LENGTH = b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LAST = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


def post(offer: bytes, rest: bytes) -> bytes:
    return b"POST /echo HTTP/1.1\r\nhost: a\r\n" + offer + rest


def pieces(request: bytes, cut: str) -> list[bytes]:
    head, blank, body = request.partition(b"\r\n\r\n")
    return {
        "whole": [request],
        "head and body": [head + blank, body],
        "after the offer": [head[:90], head[90:] + blank + body],
    }[cut]


@pytest.mark.parametrize("offer", [HTTP2, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("rest", [WITH_LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("cut", ["whole", "head and body", "after the offer"])
async def test_an_offered_protocol_is_passed_over_and_the_body_is_the_body(offer: bytes, rest: bytes, cut: str) -> None:
    async with serving(PATIENT) as server:
        answer = await server.answer(*pieces(post(offer, rest), cut), LAST)
        assert BODY in answer
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert server.asked == ["POST /echo", "GET /"]


@pytest.mark.parametrize("rest", [WITH_LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_an_offer_that_comes_byte_by_byte_is_passed_over(rest: bytes) -> None:
    async with serving(ServeConfig()) as server, server.connect(b"") as client:
        for byte in post(HTTP2, rest) + post(HTTP2, rest) + LAST:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)  # the server reads
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 3
        assert server.asked == ["POST /echo", "POST /echo", "GET /"]


async def test_offers_in_a_row_are_answered_in_a_row() -> None:
    async with serving(PATIENT) as server:
        answer = await server.answer(post(HTTP2, CHUNKED) + post(HTTP2, WITH_LENGTH) + post(WEBSOCKET, CHUNKED) + LAST)
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(BODY) == 3
        assert server.asked == ["POST /echo"] * 3 + ["GET /"]


@pytest.mark.parametrize(
    "last", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"], ids=["1.0", "close"]
)
async def test_an_offer_with_the_last_request_of_a_connection_is_passed_over(last: bytes) -> None:
    async with serving(PATIENT) as server:
        answer = await server.answer(b"POST /echo " + last + HTTP2 + WITH_LENGTH)
        assert BODY in answer
        assert server.asked == ["POST /echo"]


async def test_a_head_with_an_offer_is_bounded_as_any_other() -> None:
    async with serving(PATIENT) as server:
        answer = await server.answer(b"GET / HTTP/1.1\r\n" + HTTP2 + b"x: " + b"y" * 40_000 + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert server.asked == []


@pytest.mark.parametrize("offer", [b"", HTTP2], ids=["plain", "h2c"])
async def test_connect_is_refused_and_nothing_behind_it_is_read(offer: bytes) -> None:
    async with serving(PATIENT) as server:
        answer = await server.answer(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n" + BODY, BODY)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answer
        assert answer.count(b"HTTP/1.1") == 1
        assert server.asked == []


class WrittenTransport(asyncio.Transport):
    """Keeps each piece that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.written.append(b"closed")

    def get_write_buffer_size(self) -> int:
        return 0


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def written_transport(*, is_plain: bool = False) -> tuple[http_connection.ClientTransport, list[bytes]]:
    transport = WrittenTransport()
    connection = http_connection.HttpConnection(LIMITS, Metrics(), set(), {})
    connection._transport = transport
    made = http_connection.ClientTransport(connection, transport)
    made.begin(is_plain=is_plain)
    return made, transport.written


async def test_a_head_is_written_with_the_first_part_of_its_body() -> None:
    client, written = written_transport()
    client.write(HEAD)
    client.write(b"5\r\nhello\r\n")
    client.write(b"0\r\n\r\n")
    assert written == [HEAD + b"5\r\nhello\r\n", b"0\r\n\r\n"]
    await asyncio.sleep(0)
    assert len(written) == 2


async def test_a_head_whose_body_comes_later_is_written_when_the_loop_turns() -> None:
    client, written = written_transport()
    client.write(HEAD)
    assert client.has_begun
    assert not written
    await asyncio.sleep(0)
    assert written == [HEAD]
    client.write(b"5\r\nhello\r\n")
    assert written[1:] == [b"5\r\nhello\r\n"]


async def test_a_head_without_a_body_is_written_before_the_connection_closes() -> None:
    client, written = written_transport()
    client.write(HEAD)
    client.close()
    assert written == [HEAD, b"closed"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_client_that_knows_no_chunks_gets_none_with_its_head(*, is_late: bool) -> None:
    client, written = written_transport(is_plain=True)
    client.write(HEAD)
    if is_late:
        await asyncio.sleep(0)
    client.write(b"5\r\nhello\r\n2\r\n!!\r\n")
    client.write(b"1\r\n?\r\n0\r\n\r\n")
    assert b"".join(written) == b"HTTP/1.1 200 OK\r\n\r\nhello!!?"


async def test_heads_alone_are_answered_in_a_row() -> None:
    ask = b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n"
    async with serving(LIMITS) as server:
        answer = await server.answer(ask * 2, ask + b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(b"hello") == 1
        assert answer.endswith(b"0\r\n\r\n")


async def test_the_head_of_a_stream_comes_before_its_first_event() -> None:
    async with serving(LIMITS) as server, server.connect(b"GET /waits HTTP/1.1\r\nhost: a\r\n\r\n") as client:
        assert b"HTTP/1.1 200 " in await client.until(b"\r\n\r\n")
        server.released.set()
        assert b"ended" in await client.until(b"0\r\n\r\n")
