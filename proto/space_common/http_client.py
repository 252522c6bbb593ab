"""Requests to a server whose tokens are timed as they arrive: HTTP/1.1, and server-sent events, one connection each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from space_common.server_tls import client_context, tls_trouble

MAX_LINE = 1 << 20  # bytes of one header or chunk-size line


class HttpError(RuntimeError):
    """A request failed or its stream broke; the message has the server's text."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status  # HTTP status of an error; None if the connection or the stream failed
        self.retry_after = retry_after  # seconds, of a refusal that names them


@dataclass(frozen=True)
class Endpoint:
    """Address of a server, and its API key."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of every path
    api_key: str | None = field(default=None, repr=False)
    cacert: Path | None = None  # certificates of further authorities, for https

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, cacert: Path | None = None) -> Endpoint:
        """Raises HttpError for anything but http://HOST[:PORT][/PREFIX] and https://…"""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is no server address; give one such as http://127.0.0.1:8080.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key, cacert)


async def stream_events(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes]]:
    """`POST` `body` and yield the data of events that arrive together, including `[DONE]`. Raises HttpError.

    Use it in `aclosing`, which closes its connection.
    """
    async with _request(endpoint, "POST", path, body) as pieces:
        async for events in _events(pieces):
            yield events


async def get_text(endpoint: Endpoint, path: str) -> str:
    """Return the text at `path`. Raises HttpError."""
    async with _request(endpoint, "GET", path, None) as pieces:
        return b"".join([piece async for piece in pieces]).decode(errors="replace")


async def get_json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Return the JSON object at `path`. Raises HttpError."""
    async with _request(endpoint, "GET", path, None) as pieces:
        value = json.loads(b"".join([piece async for piece in pieces]))
    if not isinstance(value, dict):
        raise HttpError(f"{path} is not a JSON object.")
    return value


async def post_json(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Any:
    """POST `body` to `path` and return the JSON response. Raises HttpError."""
    async with _request(endpoint, "POST", path, body) as pieces:
        return json.loads(b"".join([piece async for piece in pieces]))


@asynccontextmanager
async def _request(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield an iterator over the chunks of the response body. Raises HttpError for any status except 200."""
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.host}:{endpoint.port}", "Connection: close"]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if endpoint.api_key is not None:
        head.append(f"Authorization: Bearer {endpoint.api_key}")
    try:
        context = client_context(endpoint.cacert) if endpoint.tls else None
    except OSError:
        raise HttpError(f"--cacert {endpoint.cacert}: there is no certificate in it.") from None
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MAX_LINE)
    except OSError as error:
        if trouble := tls_trouble(error):
            raise HttpError(f"{endpoint.host}:{endpoint.port} answers, but {trouble}") from error
        raise HttpError(f"No connection to {endpoint.host}:{endpoint.port}: {error.strerror or error}.") from error
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        pieces = _body(reader, headers)
        if status != 200:
            refusal = b"".join([piece async for piece in pieces])[:500].decode(errors="replace")
            seconds = headers.get("retry-after", "")
            retry_after = float(seconds) if seconds.isdecimal() else None
            raise HttpError(f"{method} {path} was answered with {status}: {refusal}", status, retry_after)
        yield pieces
    except (OSError, EOFError, ValueError) as error:
        raise HttpError(f"{method} {path}: the server broke off its answer: {error or type(error).__name__}") from error
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status and headers (names in lower case)."""
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
    """Yield the body's chunks: chunked, of a known length, or until the connection closes."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield the `data` of server-sent events, grouped by chunk; comments and other fields are skipped."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")  # one data line per event: these servers never write more
        if events := _data(lines):
            yield events
    if events := _data([rest]):  # for a stream that ends without an empty line
        yield events


def _data(lines: Sequence[bytes]) -> list[bytes]:
    return [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]


def parsed(event: bytes) -> Mapping[str, Any]:
    """Parse an event's JSON object. Raises HttpError."""
    try:
        value = json.loads(event)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise HttpError(f"An event is no JSON object: {event[:80].decode(errors='replace')!r}")
    return value
