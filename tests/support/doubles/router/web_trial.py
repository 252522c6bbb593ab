"""An HTTP server over real sockets with an application of three lines, and a client that says when it reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from space_router.config import ServeConfig
from space_router.http_server.http_connection import uvicorn_config
from space_router.metrics import Metrics
from starlette.types import Receive, Scope, Send

SOON = 10.0
"""Seconds: longest wait for what must come."""


class WebTrial:
    """A server, seen from outside."""

    def __init__(self, address: tuple[str, int], metrics: Metrics) -> None:
        self.address = address
        self.metrics = metrics
        self.num_sent = 0  # bytes that the application has handed over
        self.asked: list[str] = []  # of the application, method and path
        self.released = asyncio.Event()  # what is held may end
        self.gone = asyncio.Event()  # the application has been told that its client went

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/: a short answer. /long: one of 4 MiB. /echo: the body, with its length. /endless: a stream that never ends.
        /held: a stream that ends when it is released.
        """
        path = scope["path"]
        self.asked.append(f"{scope['method']} {path}")
        body = await self._body(receive) if path == "/echo" else b"y" * (4 << 20) if path == "/long" else b"hello"
        length = [(b"content-length", b"%d" % len(body))] if path == "/echo" else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        if path == "/endless":
            await self._endless(receive, send)
        elif path == "/held":
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
        """A client that reads when it is told to; `window`: bytes that its system takes for it meanwhile."""
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
