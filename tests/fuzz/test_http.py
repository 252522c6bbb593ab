"""Hostile HTTP: bodies for every route, requests that the OpenAPI document forbids, and bytes that are no request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from space_router.api.anthropic.fields import MessagesBody
from space_router.api.openai.fields import ChatBody, CompletionBody
from space_router.api.openai.response_fields import ResponseBody
from space_router.api.tgi.generate import GenerateParameters
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.http_server.http_connection import uvicorn_config
from space_router.metrics import Metrics
from uvicorn.server import ServerState

from fuzz.harness import Fuzzer, as_json, mutated, often, rarely, serving, sometimes, spoiled

Draw = Callable[[SearchStrategy[Any]], Any]

LONGEST_ERROR = 4096
_USER = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TALK = [
    {"role": "system", "content": "s"}, _USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]  # fmt: skip
_INPUT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "a b", "max_tokens": 2}),
    ("/v1/completions", {
        "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True, "logprobs": 2, "stop": ["x"], "echo": True,
        "logit_bias": {"5": 1.0}, "stream_options": {"include_usage": True}, "temperature": 0.5, "seed": 1}),
    ("/v1/chat/completions", {"messages": [_USER], "max_tokens": 2}),
    ("/v1/chat/completions", {
        "messages": _TALK, "tools": [_TOOL], "tool_choice": "none", "max_tokens": 2, "stream": True, "logprobs": True,
        "top_logprobs": 2, "response_format": {"type": "text"}}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/responses", {
        "input": [_INPUT], "max_output_tokens": 2, "stream": True, "text": {"format": {"type": "text"}}}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2, "details": True, "stop": ["x"], "seed": 3}}),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 2, "top_n_tokens": 2}}),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 2}, "stream": False}),
    ("/invocations", {"prompt": "a", "max_tokens": 2}),
    ("/tokenize", {"inputs": "a b"}),
    ("/chat_tokenize", {"messages": [_USER]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)  # fmt: skip
NAMES = sorted({name for body in (CompletionBody, ChatBody, ResponseBody, MessagesBody, GenerateParameters)
                for name in body.model_fields})  # fmt: skip


class Sent(NamedTuple):
    """A request as the application gets it."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    leaves_after: int  # messages of the answer after which the client has gone


@st.composite
def mutated_bodies(draw: Draw) -> Sent:
    """Bodies that were right once, at times under wrong headers, or of a client that leaves."""
    path, body = draw(st.sampled_from(BODIES))
    content = draw(often(mutated(body, NAMES, most=3).map(as_json), spoiled, 7))
    headers = [(b"content-type", draw(st.sampled_from((b"application/json",) * 9 + (b"text/plain", b"\xff"))))]
    if draw(sometimes(20)):
        headers.append((b"content-length", draw(st.sampled_from((b"0", b"-1", b"9" * 40, b"x", b"4194305")))))
    if draw(sometimes(20)):
        headers.append((b"authorization", draw(st.sampled_from((b"Bearer", b"Bearer \xff", b"Basic \x00")))))
    method = draw(rarely(st.sampled_from(("GET", "DELETE", "PUT")), st.just("POST"), 10))
    return Sent(method, path, b"", headers, content, draw(rarely(st.integers(0, 3), st.just(99), 20)))


def _sent(case: Case[Any]) -> Sent:
    made = requests.Request(**case.as_transport_kwargs(base_url="http://a")).prepare()
    path, _, query = (made.path_url or "/").partition("?")
    headers = [(name.lower().encode(), str(value).encode("latin-1", "replace")) for name, value in made.headers.items()]
    body = made.body.encode() if isinstance(made.body, str) else made.body if isinstance(made.body, bytes) else b""
    return Sent(made.method or "GET", path, query.encode(), headers, body, leaves_after=99)


def test_hostile_requests_get_an_answer_or_an_error_and_leave_nothing_behind(fuzzer: Fuzzer) -> None:
    context = serving()
    router = fuzzer.wait(context.__aenter__())
    app = create_app(router.service)
    forbidden = schemathesis.openapi.from_dict(app.openapi()).as_strategy(generation_mode=GenerationMode.NEGATIVE)

    def attempt(sent: Sent) -> str:
        status, answered = fuzzer.wait(_ask(app, sent))
        shown = f"{status} {answered[:400]!r}"
        assert status < 500, shown
        assert b'"server_error"' not in answered, shown
        assert b"internal_error" not in answered, shown
        if sent.leaves_after < 99:
            return "left"
        if status >= 400 and sent.method != "HEAD":
            assert len(answered) <= LONGEST_ERROR, shown
            assert "error" in json.loads(answered), shown
        return str(status)

    try:
        requests_made = rarely(forbidden.map(_sent), mutated_bodies(), 10)
        fuzzer.run(requests_made, attempt, few=120, settle=lambda: fuzzer.wait(router.settle()))
    finally:
        fuzzer.wait(context.__aexit__(None, None, None))


async def _ask(app: Any, sent: Sent) -> tuple[int, bytes]:
    status, pieces, num_answered = 0, [], 0
    gone = asyncio.Event()
    requested = [{"type": "http.request", "body": sent.body, "more_body": False}]

    async def receive() -> Any:
        if requested:
            return requested.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, num_answered
        num_answered += 1
        if num_answered > sent.leaves_after:
            gone.set()
            await asyncio.sleep(0)
        elif message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http", "http_version": "1.1", "method": sent.method, "path": sent.path, "raw_path": sent.path.encode(),
        "query_string": sent.query, "root_path": "", "scheme": "http", "headers": sent.headers, "server": ("a", 1),
        "client": ("b", 2), "asgi": {"version": "3.0"}, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(pieces)


# ------------------------------------------------------------------------------------------------ bytes

HEADS = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n3;x=y\r\nabc\r\n0\r\nt: u\r\n\r\n",
    b"GET /a%20b?x=%ff#y HTTP/1.0\r\n\r\n",
    b"PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
)


@st.composite
def byte_streams(draw: Draw) -> list[bytes]:
    """What comes over a connection, in pieces."""
    head = draw(st.sampled_from(HEADS))
    if draw(sometimes(50)):
        head = head.replace(b"host: a", b"host: " + b"a" * draw(st.sampled_from((30_000, 70_000))))
    content = draw(rarely(st.binary(min_size=1, max_size=400), spoiled(head), 10))
    size = draw(st.sampled_from((1, 7, 100, 70_000)))
    return [content[place : place + size] for place in range(0, len(content), size)]


async def _length_of_body(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def test_hostile_bytes_on_a_connection_get_an_http_answer_or_none(fuzzer: Fuzzer) -> None:
    state = ServerState()
    config = uvicorn_config(_length_of_body, ServeConfig(max_header=32 * 1024), Metrics(), access_log=False)
    config.load()
    connection_for: Any = config.http_protocol_class

    async def exchange(pieces: list[bytes]) -> bytes:
        transport = Mock(spec=asyncio.Transport)
        transport.get_extra_info.side_effect = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get
        transport.is_closing.side_effect = lambda: transport.close.called or transport.abort.called
        transport.get_write_buffer_size.return_value = 0
        connection = connection_for(config=config, server_state=state, app_state={})
        connection.connection_made(transport)
        for number, piece in enumerate(pieces):
            if transport.is_closing():
                break
            connection.data_received(piece)
            if number % 5 == 4:
                await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        return b"".join(call.args[0] for call in transport.write.call_args_list)

    def attempt(pieces: list[bytes]) -> str:
        written = fuzzer.wait(exchange(pieces))
        assert not written or written.startswith(b"HTTP/1.1 "), written[:200]
        failed = written.replace(b"HTTP/1.1 501 ", b"")  # 501: a Transfer-Encoding that is not known
        assert b"HTTP/1.1 5" not in failed, written[:200]
        return written[9:12].decode() or "nothing"

    def settle() -> None:
        fuzzer.wait(asyncio.sleep(0))
        assert not state.connections
        assert not state.tasks

    fuzzer.run(byte_streams(), attempt, few=150, settle=settle)
