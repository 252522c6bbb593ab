"""A load generator's HTTP client: one request per connection, server-sent events read as they come.

Nothing but asyncio: the client shares the machine with the server it measures, and a general client costs more per
event than the server does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MAX_LINE = 1 << 20  # bytes of one header or chunk-size line


class LoadError(RuntimeError):
    """A request that was refused or broken off; the message has the server's words."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server is, and the key it wants."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every path
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """Raises LoadError for anything but http://HOST[:PORT][/PREFIX] and https://…"""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"{url!r} is no server address; give one such as http://127.0.0.1:8080.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)


@dataclass(frozen=True)
class Piece:
    """One event that carried tokens."""

    seconds: float  # since the request was sent
    token_ids: tuple[int, ...]


@dataclass
class Exchange:
    """One streamed completion, as its client saw it."""

    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)  # the `spaceserve` object
    seconds: float = 0.0  # from sending to the end of the stream

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for piece in self.pieces for id_ in piece.token_ids)

    @property
    def first_token_seconds(self) -> float:
        return self.pieces[0].seconds

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: an event's gap, once for each of its tokens, shared among them."""
        gaps: list[float] = []
        for before, after in zip(self.pieces, self.pieces[1:], strict=False):
            count = len(after.token_ids)
            gaps += [(after.seconds - before.seconds) / count] * count
        return gaps


async def stream_completion(endpoint: Endpoint, body: Mapping[str, Any]) -> Exchange:
    """`POST /v1/completions` with `body`, streamed to its end. Raises LoadError."""
    exchange = Exchange()
    asked = {**body, "stream": True, "return_token_ids": True}
    begun = time.perf_counter()
    complete = False
    async with _request(endpoint, "POST", "/v1/completions", asked) as pieces:
        async for event in _events(pieces):
            now = time.perf_counter() - begun
            if event == b"[DONE]":
                complete = True
                continue
            value = json.loads(event)
            if "error" in value:
                raise LoadError(f"The stream ended with an error: {value['error'].get('message')}")
            for choice in value["choices"]:
                exchange.text += choice["text"]
                if choice["token_ids"]:
                    exchange.pieces.append(Piece(now, tuple(choice["token_ids"])))
            exchange.statistics = value.get("spaceserve") or exchange.statistics
    exchange.seconds = time.perf_counter() - begun
    if not complete or not exchange.pieces:
        raise LoadError("The stream ended without its last event.")
    return exchange


async def get_json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """The JSON object at `path`. Raises LoadError."""
    async with _request(endpoint, "GET", path, None) as pieces:
        value = json.loads(b"".join([piece async for piece in pieces]))
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object.")
    return value


@asynccontextmanager
async def _request(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The pieces of the answer's body; LoadError for any status but 200."""
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.host}:{endpoint.port}", "Connection: close"]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if endpoint.api_key is not None:
        head.append(f"Authorization: Bearer {endpoint.api_key}")
    context = ssl.create_default_context() if endpoint.tls else None
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MAX_LINE)
    except OSError as error:
        raise LoadError(f"No connection to {endpoint.host}:{endpoint.port}: {error.strerror or error}.") from error
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        pieces = _body(reader, headers)
        if status != 200:
            said = b"".join([piece async for piece in pieces])[:500].decode(errors="replace")
            raise LoadError(f"{method} {path} was answered with {status}: {said}")
        yield pieces
    except (OSError, EOFError, ValueError) as error:
        raise LoadError(f"{method} {path}: the server broke off its answer: {error or type(error).__name__}") from error
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case)."""
    status = await reader.readline()
    words = status.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError(f"no HTTP/1.x answer: {status[:60]!r}")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(words[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body's pieces: chunked, of a known length, or up to the end of the connection."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each server-sent event."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()
