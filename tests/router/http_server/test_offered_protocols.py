"""A client that offers to go on in another protocol is served in this one, and its body is never a request."""

from __future__ import annotations

import asyncio

import pytest
from doubles.router.web_trial import SOON, serving
from space_router.config import ServeConfig

LIMITS = ServeConfig(receive_timeout=SOON)
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
    async with serving(LIMITS) as server:
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
    async with serving(LIMITS) as server:
        answer = await server.answer(post(HTTP2, CHUNKED) + post(HTTP2, WITH_LENGTH) + post(WEBSOCKET, CHUNKED) + LAST)
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(BODY) == 3
        assert server.asked == ["POST /echo"] * 3 + ["GET /"]


@pytest.mark.parametrize("last", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nconnection: close\r\n"], ids=["1.0", "close"])
async def test_an_offer_with_the_last_request_of_a_connection_is_passed_over(last: bytes) -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(b"POST /echo " + last + HTTP2 + WITH_LENGTH)
        assert BODY in answer
        assert server.asked == ["POST /echo"]


async def test_a_head_with_an_offer_is_bounded_as_any_other() -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(b"GET / HTTP/1.1\r\n" + HTTP2 + b"x: " + b"y" * 40_000 + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert server.asked == []


@pytest.mark.parametrize("offer", [b"", HTTP2], ids=["plain", "h2c"])
async def test_connect_is_refused_and_nothing_behind_it_is_read(offer: bytes) -> None:
    async with serving(LIMITS) as server:
        answer = await server.answer(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n" + BODY, BODY)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answer
        assert answer.count(b"HTTP/1.1") == 1
        assert server.asked == []
