"""Clients that close their sending side behind a request, and those that close altogether."""

import asyncio
import re
import socket
import struct

import pytest
from doubles.router.whole_router import SOON, serving
from space_router.config import ServeConfig

LATE = b"POST /late HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"
HELD = b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("asked", [LATE, LATE.replace(b"1.1", b"1.0"), HELD], ids=["whole", "1.0", "stream"])
async def test_a_whole_request_is_answered_though_nothing_more_is_sent(asked: bytes) -> None:
    async with serving(ServeConfig()) as server, server.connect(asked) as client:
        client.connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.6)  # long enough for several looks at the socket
        assert not server.gone.is_set()
        server.released.set()
        answer = await client.rest()
        final = answer.removeprefix(b"HTTP/1.1 102 Processing\r\n\r\n")
        assert final.startswith(b"HTTP/1.1 200 ")
        assert (b"hello" if b"late" in asked else b"ended") in final
        assert (final != answer) == (b"late HTTP/1.1" in asked)  # HTTP/1.0 has no interim responses


async def test_pipelined_requests_are_all_answered() -> None:
    async with serving(ServeConfig()) as server, server.connect(LATE + HELD) as client:
        client.connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.1)
        server.released.set()
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_client_that_is_gone_ends_its_request(reset: bool) -> None:
    async with serving(ServeConfig()) as server:
        async with asyncio.timeout(SOON), server.connect(LATE) as client:
            while not server.asked:  # noqa: ASYNC110  a reset before this would take the request along
                await asyncio.sleep(0.01)
            if reset:
                client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(SOON):
            await server.gone.wait()


@pytest.mark.parametrize("asked", [b"", LATE[:-2], LATE[:20]], ids=["nothing", "part of a body", "part of a head"])
async def test_half_a_request_is_not_waited_for(asked: bytes) -> None:
    async with serving(ServeConfig()) as server, server.connect(asked) as client:
        client.connection.shutdown(socket.SHUT_WR)
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "hosts",
    [
        b"",
        b"host: a\r\nhost: a\r\n",
        b"host: a b\r\n",
        b"host: a/b\r\n",
        b"host: a@b\r\n",
        b"host: a:b\r\n",
        b"host: a%2\r\n",
        b"host: a:65536\r\n",
        b"host: [::1]:99999\r\n",
        b"host: a:00000" + b"9" * 5000 + b"\r\n",
    ],
)
async def test_http_1_1_needs_one_host(hosts: bytes) -> None:
    async with serving(ServeConfig()) as server:
        answer = await server.answer(b"GET / HTTP/1.1\r\n" + hosts + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Host header" in answer
        assert server.asked == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n",
        b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nHOST: a.example:8080\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nhost: [::1]:80\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nhost: my_host\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nhost:\ta%20b\t\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nhost: a:\r\nconnection: close\r\n",
        b"GET / HTTP/1.1\r\nhost: a:0000065535\r\nconnection: close\r\n",
    ],
)
async def test_good_hosts_are_taken(head: bytes) -> None:
    async with serving(ServeConfig()) as server:
        assert (await server.answer(head + b"\r\n")).startswith(b"HTTP/1.1 200 ")


CHUNKS = b"\r\n5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"1.1\r\ntransfer-encoding: gzip, chunked\r\n", b"501"),
        (b"1.1\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", b"501"),
        (b"1.1\r\ntransfer-encoding: identity, chunked\r\n", b"501"),
        (b"1.1\r\ntransfer-encoding: chunked;q=1, chunked\r\n", b"501"),
        (b"1.1\r\ntransfer-encoding: chunked, chunked\r\n", b"400"),
        (b"1.1\r\ntransfer-encoding: gzip\r\n", b"[45]0[01]"),
        (b"1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n", b"400"),
        (b"1.0\r\ntransfer-encoding: chunked\r\n", b"400"),
        (b"1.1\r\ntransfer-encoding: chunked\t\r\n", b"400"),
    ],
)
async def test_a_body_in_another_coding_than_chunks_is_refused_unread(head: bytes, status: bytes) -> None:
    async with serving(ServeConfig()) as server:
        answer = await server.answer(b"POST /echo HTTP/" + head.replace(b"\r\n", b"\r\nhost: a\r\n", 1) + CHUNKS)
        assert re.match(b"HTTP/1.1 %b " % status, answer), answer
        assert b'{"error":' in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert server.asked == []


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b" chunked"])
async def test_a_body_in_chunks_is_taken(coding: bytes) -> None:
    async with serving(ServeConfig()) as server:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding:" + coding
        answer = await server.answer(head + b"\r\n" + CHUNKS)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"hello" in answer
