"""The load generator's client against answers written out byte by byte."""

import asyncio
import json

import pytest
from space_eval.load_client import Endpoint, Exchange, LoadError, get_json, stream_completion

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, ids: list[int], **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "token_ids": ids}], **more}).encode() + b"\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


async def answered(*pieces: bytes) -> tuple[Exchange | LoadError, bytes]:
    """What the client makes of an answer that comes in these pieces, and what it asked."""
    asked = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        try:
            return await stream_completion(Endpoint.parse(f"http://127.0.0.1:{port}/v1", "k"), {"prompt": "x"}), asked
        except LoadError as error:
            return error, asked


def test_events_are_read_whatever_the_chunks() -> None:
    body = event("a", [1]) + event("", []) + event("bc", [2, 3], spaceserve={"steps": 1}) + b"data: [DONE]\n\n"
    for size in (1, 7, 30, len(body)):
        chunks = [chunk(body[start : start + size]) for start in range(0, len(body), size)]
        made, asked = asyncio.run(answered(HEAD, *chunks, b"0\r\n\r\n"))
        assert isinstance(made, Exchange)
        assert (made.text, made.token_ids, made.statistics) == ("abc", (1, 2, 3), {"steps": 1})
        assert len(made.pieces) == 2
        assert b"\r\nAuthorization: Bearer k\r\n" in asked
        assert asked.startswith(b"POST /v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"], "answered with 429: full"),
        ([HEAD, chunk(event("a", [1]))], "broke off its answer"),
        ([HEAD, chunk(event("a", [1])), b"0\r\n\r\n"], "ended without its last event"),
        ([HEAD, chunk(b'data: {"error": {"message": "worker lost"}}\n\n'), b"0\r\n\r\n"], "worker lost"),
        ([b"220 mail\r\n\r\n"], "no HTTP/1.x answer"),
        ([b""], "no HTTP/1.x answer"),
    ],
)
def test_whatever_is_not_a_whole_answer_is_an_error_with_the_servers_words(pieces: list[bytes], words: str) -> None:
    made, _ = asyncio.run(answered(*pieces))
    assert isinstance(made, LoadError)
    assert words in str(made)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(LoadError, match=r"No connection to 127\.0\.0\.1:9"):
        asyncio.run(get_json(Endpoint("127.0.0.1", 9), "/info"))


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", "http://x:y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(LoadError, match="is no server address"):
        Endpoint.parse(url)
