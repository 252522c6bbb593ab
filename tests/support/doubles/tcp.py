"""TCP servers and connections on loopback that are closed at the end of their `async with` block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(handle: Handler) -> AsyncIterator[str]:
    """Yield the HOST:PORT of a server that calls `handle` for each connection.

    At the end handlers are cancelled and connections broken. Raises what a handler raised, but for broken connections.
    """
    connections: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.ensure_future(handle(reader, writer))] = writer

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        ended = await asyncio.gather(*connections, return_exceptions=True)
        for writer in connections.values():  # of a handler that was cancelled before it began, too
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close in the loop's next turn
    for error in ended:
        if isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)):
            raise error


@asynccontextmanager
async def tcp_connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a HOST:PORT; break the connection at the end. Raises OSError."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
