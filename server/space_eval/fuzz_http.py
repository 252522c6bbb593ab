"""Hostile HTTP: bodies for every route, and bytes that are no request."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import uvicorn
from space_router.api.chat_fields import ChatBody
from space_router.api.fields import CompletionBody
from space_router.api.generate_fields import GenerateParameters
from space_router.api.http_connection import bounded
from space_router.api.response_fields import ResponseBody
from space_router.app import create_app
from space_router.connection_settings import ConnectionSettings
from space_router.metrics import Metrics
from uvicorn.server import ServerState

from space_eval.fuzz_front import Front
from space_eval.fuzz_target import Finding, short
from space_eval.fuzz_values import any_json, as_json, changed, spoiled

MOST_BYTES_OF_AN_ERROR = 4096
_USER = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BODIES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("/v1/completions", {"prompt": "a b", "max_tokens": 2}, tuple(CompletionBody.model_fields)),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True, "logprobs": 2, "stop": ["x"], "echo": True,
         "logit_bias": {"5": 1.0}, "stream_options": {"include_usage": True}, "temperature": 0.5, "seed": 1},
        tuple(CompletionBody.model_fields),
    ),
    ("/v1/chat/completions", {"messages": [_USER], "max_tokens": 2}, tuple(ChatBody.model_fields)),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "s"}, _USER, {"role": "assistant", "content": "", "tool_calls":
         [_CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}], "tools": [_TOOL], "tool_choice": "none",
         "max_tokens": 2, "stream": True, "logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}},
        tuple(ChatBody.model_fields),
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}, tuple(ResponseBody.model_fields)),
    (
        "/v1/responses",
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
         "max_output_tokens": 2, "stream": True, "text": {"format": {"type": "text"}}},
        tuple(ResponseBody.model_fields),
    ),
    (
        "/generate",
        {"inputs": "a", "parameters": {"max_new_tokens": 2, "details": True, "stop": ["x"], "seed": 3}},
        tuple(GenerateParameters.model_fields),
    ),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 2, "top_n_tokens": 2}}, ()),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 2}, "stream": False}, ()),
    ("/invocations", {"prompt": "a", "max_tokens": 2}, ()),
    ("/tokenize", {"inputs": "a b"}, ("prompt", "parameters", "add_special_tokens")),
    ("/chat_tokenize", {"messages": [_USER]}, tuple(ChatBody.model_fields)),
    ("/detokenize", {"tokens": [5, 6, 7]}, ("skip_special_tokens",)),
)  # fmt: skip


class HttpBodies:
    """Every route that takes a body: JSON that is almost right, and JSON that is none."""

    name = "http bodies"

    def __init__(self) -> None:
        self._front = Front()

    async def __aenter__(self) -> HttpBodies:
        await self._front.open()
        self._app = create_app(self._front.service)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._front.close()

    async def settle(self) -> None:
        await self._front.settle()

    async def try_one(self, dice: Random) -> str:
        path, body, names = dice.choice(BODIES)
        value: Any = body
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
            value = changed(dice, value, names)
        content = as_json(value)
        if dice.random() < 0.15:
            content = spoiled(dice, content)
        headers = [(b"content-type", dice.choice((b"application/json",) * 9 + (b"text/plain", b"\xff")))]
        if dice.random() < 0.05:
            headers.append((b"content-length", dice.choice((b"0", b"-1", b"9" * 40, b"x", b"4194305"))))
        if dice.random() < 0.05:
            headers.append((b"authorization", dice.choice((b"Bearer", b"Bearer \xff", b"Basic \x00"))))
        method = dice.choice(("POST",) * 30 + ("GET", "DELETE", "PUT"))
        goes = dice.random() < 0.05
        status, answered = await self._ask(
            method, path, headers, content, leaves_after=dice.randint(0, 3) if goes else 99
        )
        if status >= 500 or b'"server_error"' in answered or b"internal_error" in answered:
            raise Finding(f"{method} {path}: {status} {short(answered.decode(errors='replace'))} for {content[:600]!r}")
        if goes:
            return "left"
        if status >= 400 and len(answered) > MOST_BYTES_OF_AN_ERROR:
            raise Finding(f"{method} {path}: an error of {len(answered)} bytes for {content[:600]!r}")
        if status >= 400 and "error" not in json.loads(answered):
            raise Finding(f"{method} {path}: {status} without an error")
        return str(status)

    async def _ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], content: bytes, *, leaves_after: int
    ) -> tuple[int, bytes]:
        """Status and body; `leaves_after`: messages after which the client has gone."""
        status, pieces, num_sent = 0, [], 0
        gone = asyncio.Event()
        sent = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, num_sent
            num_sent += 1
            if num_sent > leaves_after:
                gone.set()
                await asyncio.sleep(0)
            elif message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "headers": headers, "server": ("a", 1),
            "client": ("b", 2), "asgi": {"version": "3.0"}, "state": {},
        }  # fmt: skip
        await self._app(scope, receive, send)
        return status, b"".join(pieces)


HEADS = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n3;x=y\r\nabc\r\n0\r\nt: u\r\n\r\n",
    b"GET /a%20b?x=%ff#y HTTP/1.0\r\n\r\n",
    b"PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
)


class _Wire(asyncio.Transport):
    """Where a connection writes to."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class HttpBytes:
    """What comes over a connection before it is a request."""

    name = "http bytes"

    async def __aenter__(self) -> HttpBytes:
        self._state = ServerState()
        self._connection = bounded(ConnectionSettings(max_header=32 * 1024), Metrics())
        self._config = uvicorn.Config(_echo, interface="asgi3", lifespan="off", log_config=None, access_log=False)
        self._config.load()
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def settle(self) -> None:
        await asyncio.sleep(0)
        if self._state.connections or self._state.tasks:
            raise Finding(f"{len(self._state.connections)} connections and {len(self._state.tasks)} tasks are left")

    async def try_one(self, dice: Random) -> str:
        content = spoiled(dice, dice.choice(HEADS)) if dice.random() < 0.9 else dice.randbytes(dice.randint(1, 400))
        if dice.random() < 0.02:
            content = content.replace(b"host: a", b"host: " + b"a" * dice.choice((30_000, 70_000)))
        wire = _Wire()
        connection = self._connection(config=self._config, server_state=self._state, app_state={})
        connection.connection_made(wire)
        place = 0
        while place < len(content) and not wire.closed:
            size = dice.choice((1, 7, 100, 70_000))
            connection.data_received(content[place : place + size])
            place += size
            if dice.random() < 0.2:
                await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        if wire.written and not wire.written.startswith(b"HTTP/1.1 "):
            raise Finding(f"{content!r} was answered {wire.written[:200]!r}")
        if b"HTTP/1.1 5" in wire.written:
            raise Finding(f"{content!r} was answered {wire.written[:200]!r}")
        return wire.written[9:12].decode() or "nothing"


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, says how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(any_json(Random(size), 0)).encode("utf-8", "replace")})
