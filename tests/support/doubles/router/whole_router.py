"""A whole router in this process, a client that reads as slowly as it likes, and certificates."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from fastapi.dependencies import models
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request import ValidRequest
from space_router.http_server.http_connection import uvicorn_config
from space_router.metrics import Metrics
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import ModelText
from space_router.text.tokenizer import Tokenizer
from starlette.types import Receive, Scope, Send

from doubles.router.script import FixedReply, HashLanguage, Script
from doubles.tokenizers import EOS_ID, FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE, tiny_tokenizer


class Certificate(NamedTuple):
    """Files in PEM."""

    cert: Path
    key: Path


def authority(folder: Path, name: str = "authority") -> Certificate:
    made = _place(folder, name)
    _openssl("req", "-x509", *_fresh(name), "-days", "1", "-keyout", made.key, "-out", made.cert)
    return made


def signed(folder: Path, name: str, by: Certificate) -> Certificate:
    """One for localhost."""
    made, asked, names = _place(folder, name), folder / f"{name}.csr", folder / f"{name}.ext"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", "-new", *_fresh(name), "-keyout", made.key, "-out", asked)
    _openssl(
        "x509", "-req", "-in", asked, "-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-days", "1",
        "-extfile", names, "-out", made.cert,
    )  # fmt: skip
    return made


def _place(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.crt", folder / f"{name}.key")


def _fresh(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


TOKENIZER = tiny_tokenizer()
USER = [{"role": "user", "content": "Hi"}]

Start = Callable[..., AbstractAsyncContextManager[Any]]
"""Of the fixture `start`: `async with start("the reply", config=..., chat=...) as router`."""


def script(reply: str | None = None, **changes: Any) -> Script:
    """A worker that always answers `reply`, or speaks a made-up language of printable bytes that ends with EOS."""
    if reply is None:
        language: Any = HashLanguage(range(FIRST_BYTE_ID + 32, FIRST_BYTE_ID + 127), eos_id=EOS_ID, eos_period=50)
    else:
        language = FixedReply(TOKENIZER.encode(reply))
    known = Script(language=language, vocab_size=VOCAB_SIZE, mask_ids=(MASK_ID,), eos_ids=(EOS_ID,), num_blocks=256)
    return replace(known, **changes)


def model_text(chat: str | None, tokenizer: Tokenizer = TOKENIZER) -> ModelText:
    """The text side of the model `tiny`. `chat`: a built-in template's name, or a template."""
    template = None if chat is None else ChatTemplate(BUILT_IN.get(chat, chat), {})
    return ModelText("tiny", tokenizer, template, MappingProxyType({}))


def forget_routes() -> None:
    """Empty FastAPI's caches by function. They hold 4,096 routes, and with them whole routers that tests are done with:
    millions of objects, which each garbage collection reads."""
    for cached in vars(models).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of one of OpenAI's streams; [DONE] must be the last."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Seen(list[ValidRequest]):
    """Every request that has reached an engine."""

    @classmethod
    def by_engines(cls, monkeypatch: pytest.MonkeyPatch) -> Seen:
        requests = cls()
        submit = Engine.submit

        def noted(self: Engine, request: ValidRequest, **others: Any) -> Any:
            requests.append(request)
            return submit(self, request, **others)

        monkeypatch.setattr(Engine, "submit", noted)
        return requests

    def take(self, field: str = "") -> list[ValidRequest]:
        """Those since the last time, without what is drawn anew for each unless `field` is about that."""
        taken = [
            replace(
                request,
                request_id=request.request_id if field == "request_id" else "",
                sampling=request.sampling if field == "seed" else replace(request.sampling, seed=0),
            )
            for request in self
        ]
        self.clear()
        return taken


SOON = 10.0  # seconds: longest wait for what must come


class WebTrial:
    """A server, seen from outside."""

    def __init__(self, address: tuple[str, int], metrics: Metrics) -> None:
        self.address = address
        self.metrics = metrics
        self.num_sent = 0  # bytes that the application has handed over
        self.asked: list[str] = []  # of the application, method and path
        self.released = asyncio.Event()  # what is held may end
        self.gone = asyncio.Event()  # the application has received the disconnect

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/: a short answer. /long: one of 4 MiB. /echo: the body, with its length. /endless: a stream that never ends.
        /held: a stream that ends when it is released; /waits: one that also begins then. /late: the body, when it is
        released, unless the client goes.
        """
        path = scope["path"]
        self.asked.append(f"{scope['method']} {path}")
        body = b"y" * (4 << 20) if path == "/long" else b"hello"
        if path in ("/echo", "/late"):
            body = await self._body(receive)
        if path == "/late":
            watching = asyncio.create_task(self._watch(receive))
            await asyncio.wait(
                [watching, asyncio.create_task(self.released.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if self.gone.is_set():
                return
        length = [(b"content-length", b"%d" % len(body))] if path == "/echo" else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        if path == "/endless":
            await self._endless(receive, send)
        elif path in ("/held", "/waits"):
            if path == "/held":
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.released.wait()
            await send({"type": "http.response.body", "body": b"ended"})
        else:
            await send({"type": "http.response.body", "body": body})

    async def _body(self, receive: Receive) -> bytes:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        return body

    async def _endless(self, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 16384, "more_body": True})
            self.num_sent += 16384
            await asyncio.sleep(0)
        await watching

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    @asynccontextmanager
    async def connect(self, sent: bytes, *, window: int | None = None) -> AsyncIterator[Client]:
        """A client that reads on demand; `window`: its receive buffer in bytes."""
        with socket.socket() as connection:
            if window is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self.address)
            client = Client(connection)
            await client.send(sent)
            yield client

    async def answer(self, *pieces: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        async with self.connect(b"") as client:
            for piece in pieces:
                with suppress(ConnectionError):
                    await client.send(piece)
                await asyncio.sleep(0.05)
            return await client.rest()


class Client:
    """One connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def receive(self) -> bytes:
        """What is there; nothing at the end."""
        async with asyncio.timeout(SOON):
            return await asyncio.get_running_loop().sock_recv(self.connection, 65536)

    async def until(self, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            piece = await self.receive()
            assert piece, f"the server closed after {found!r}"
            found += piece
        return found

    async def rest(self) -> bytes:
        found = b""
        with suppress(ConnectionResetError):  # the server closed with something of ours unread
            while piece := await self.receive():
                found += piece
        return found


@asynccontextmanager
async def serving(limits: ServeConfig) -> AsyncIterator[WebTrial]:
    """Held to the limits until the end of the block."""
    metrics = Metrics()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        listening.bind(("127.0.0.1", 0))
        server = WebTrial(listening.getsockname(), metrics)
        config = uvicorn_config(server.app, limits, metrics)
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve(sockets=[listening]))
        while not running.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield server
        finally:
            running.should_exit = running.force_exit = True
            await task
