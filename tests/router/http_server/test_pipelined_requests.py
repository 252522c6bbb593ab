"""What a client sends while it is answered: the answer stays whole, and what comes next is its own."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

import pytest
from doubles.router.web_trial import SOON, serving
from space_router.config import ServeConfig

LIMITS = ServeConfig(max_header=2048, receive_timeout=0.2, keep_alive=1.0)
HELD = b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n"
SHORT = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
BEGUN = b"5\r\nbegun\r\n"
ENDED = b"5\r\nended\r\n0\r\n\r\n"
BAD_CHUNK = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"


async def test_empty_lines_during_an_answer_are_nothing() -> None:
    async with serving(LIMITS) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(b"\r\n\r\n")
        await asyncio.sleep(3 * LIMITS.receive_timeout)
        server.released.set()
        assert await client.until(b"\r\n0\r\n\r\n") == ENDED
        await client.send(SHORT)
        assert b"hello" in await client.until(b"0\r\n\r\n")


async def test_a_head_that_begins_during_an_answer_has_its_time_from_the_end_of_that_on() -> None:
    async with serving(LIMITS) as server, server.connect(HELD) as client:
        await client.until(BEGUN)
        await client.send(SHORT[:9])
        await asyncio.sleep(3 * LIMITS.receive_timeout)
        server.released.set()
        assert await client.until(b"\r\n0\r\n\r\n") == ENDED
        await client.send(SHORT[9:] + SHORT[:9])
        assert b"hello" in await client.until(b"0\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /" + b"x" * 9000, b"431"),
        (b"no request\r\n\r\n", b"400"),
        (b"GET http:///// HTTP/1.1\r\n\r\n", b"400"),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (BAD_CHUNK, b"400"),
    ],
    ids=["too long", "far too long", "no HTTP", "no path", "CONNECT", "a bad chunk"],
)
async def test_what_is_wrong_with_the_last_request_is_said_behind_the_others(wrong: bytes, status: bytes) -> None:
    async with serving(LIMITS) as server, server.connect(HELD) as client:
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


async def test_a_body_that_goes_wrong_before_its_answer_is_400_at_once() -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(BAD_CHUNK)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


async def test_a_body_that_goes_wrong_during_its_answer_is_the_end_behind_it() -> None:
    async with serving(LIMITS) as server, server.connect(BAD_CHUNK.replace(b"/echo", b"/held")[:-9]) as client:
        await client.until(BEGUN)
        await client.send(BAD_CHUNK[-9:])
        await asyncio.sleep(0.1)
        server.released.set()
        assert await client.rest() == ENDED


async def test_an_empty_line_does_not_keep_a_connection_nor_end_it() -> None:
    async with serving(replace(LIMITS, keep_alive=SOON)) as server, server.connect(SHORT) as client:
        await client.until(b"0\r\n\r\n")
        await client.send(b"\r\n")
        await asyncio.sleep(3 * LIMITS.receive_timeout)
        await client.send(SHORT)
        await client.until(b"0\r\n\r\n")
    async with serving(LIMITS) as server, server.connect(SHORT) as client:
        await client.until(b"0\r\n\r\n")
        await client.send(b"\r\n")
        assert await client.rest() == b"", "closed without a word when it was idle for too long"


async def test_the_request_that_runs_learns_that_its_client_went_though_another_waits_behind_it() -> None:
    async with serving(LIMITS) as server:
        async with server.connect(b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n") as client:
            await client.receive()
            await client.send(SHORT)
            await asyncio.sleep(0.1)  # the server reads it
            client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.wait_for(server.gone.wait(), SOON)
