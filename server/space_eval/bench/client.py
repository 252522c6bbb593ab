"""Load on a server: requests whose every token is timed, and what is polled of the server and the machine meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from space_common.server_tls import client_context, tls_trouble

from space_eval.flags import FlagError

MAX_LINE = 1 << 20  # bytes of one header or chunk-size line


class LoadError(RuntimeError):
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
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key, cacert)


def read_api_key(file: Path | None) -> str | None:
    """Return the first key of a file; keys on a command line would be visible to other processes. Raises FlagError."""
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise FlagError(f"--api-key-file {file}: there is no key in it.") from None
    if key.startswith("sha256:"):
        raise FlagError(f"--api-key-file {file}: it has a key's digest, not the key. Give a file with the key itself.")
    return key


async def stream_events(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes]]:
    """`POST` `body` and yield the data of events that arrive together, including `[DONE]`. Raises LoadError.

    Use it in `aclosing`, which closes its connection.
    """
    async with _request(endpoint, "POST", path, body) as pieces:
        async for events in _events(pieces):
            yield events


async def get_text(endpoint: Endpoint, path: str) -> str:
    """Return the text at `path`. Raises LoadError."""
    async with _request(endpoint, "GET", path, None) as pieces:
        return b"".join([piece async for piece in pieces]).decode(errors="replace")


async def get_json(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Return the JSON object at `path`. Raises LoadError."""
    async with _request(endpoint, "GET", path, None) as pieces:
        value = json.loads(b"".join([piece async for piece in pieces]))
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object.")
    return value


async def post_json(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Any:
    """POST `body` to `path` and return the JSON response. Raises LoadError."""
    async with _request(endpoint, "POST", path, body) as pieces:
        return json.loads(b"".join([piece async for piece in pieces]))


@asynccontextmanager
async def _request(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield an iterator over the chunks of the response body. Raises LoadError for any status except 200."""
    content = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.host}:{endpoint.port}", "Connection: close"]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if endpoint.api_key is not None:
        head.append(f"Authorization: Bearer {endpoint.api_key}")
    try:
        context = client_context(endpoint.cacert) if endpoint.tls else None
    except OSError:
        raise LoadError(f"--cacert {endpoint.cacert}: there is no certificate in it.") from None
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MAX_LINE)
    except OSError as error:
        if trouble := tls_trouble(error):
            raise LoadError(f"{endpoint.host}:{endpoint.port} answers, but {trouble}") from error
        raise LoadError(f"No connection to {endpoint.host}:{endpoint.port}: {error.strerror or error}.") from error
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        pieces = _body(reader, headers)
        if status != 200:
            refusal = b"".join([piece async for piece in pieces])[:500].decode(errors="replace")
            seconds = headers.get("retry-after", "")
            retry_after = float(seconds) if seconds.isdecimal() else None
            raise LoadError(f"{method} {path} was answered with {status}: {refusal}", status, retry_after)
        yield pieces
    except (OSError, EOFError, ValueError) as error:
        raise LoadError(f"{method} {path}: the server broke off its answer: {error or type(error).__name__}") from error
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
    """Parse an event's JSON object. Raises LoadError."""
    try:
        value = json.loads(event)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LoadError(f"An event is no JSON object: {event[:80].decode(errors='replace')!r}")
    return value


ENERGY = "spaceserve_energy_joules_total"
DRAFTS = ("spaceserve_draft_length_sum", "spaceserve_draft_length_count")
POWER_SECONDS = 0.25  # the interval at which workers report their counters
JOULES_PER_KWH = 3.6e6
IDLE_SECONDS = 30.0  # longest wait for cancelled requests to leave a server


@asynccontextmanager
async def polled(endpoint: Endpoint, every: float | None, read: Callable[[float, str], bool]) -> AsyncIterator[None]:
    """While the block runs, call `read` every `every` seconds with the elapsed seconds and the text of /metrics.

    Stops when `read` returns False or the server does not answer; without `every` it does not poll.
    """
    if every is None:
        yield
        return
    task = asyncio.create_task(_poll(endpoint, every, read))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _poll(endpoint: Endpoint, every: float, read: Callable[[float, str], bool]) -> None:
    clock = asyncio.get_running_loop().time
    begun, number = clock(), 0
    while True:
        try:
            text = await get_text(endpoint, "/metrics")
        except LoadError:
            return
        if not read(clock() - begun, text):
            return
        number += 1
        await asyncio.sleep(max(0.0, begun + number * every - clock()))


class PowerMeter:
    """Power from a counter that updates in steps, measured from its first to its last update."""

    def __init__(self) -> None:
        self._updates: list[tuple[float, float]] = []  # (seconds, joules) when a new value was first seen
        self._last: float | None = None

    def read(self, seconds: float, text: str) -> bool:
        if (joules := energy_figure(text)) is None:
            return False
        self.add(seconds, joules)
        return True

    def add(self, seconds: float, joules: float) -> None:
        if self._last is not None and joules != self._last:
            self._updates.append((seconds, joules))
        self._last = joules

    @property
    def watts(self) -> float | None:
        """Mean watts; None if the counter has not changed often enough."""
        if len(self._updates) < 3:
            return None
        (begun, first), (ended, last) = self._updates[0], self._updates[-1]
        return (last - first) / (ended - begun)


def energy_figure(text: str) -> float | None:
    """Return the joules of all devices so far; None if there is no counter."""
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(ENERGY + "{")]
    return sum(map(float, values)) if values else None


async def joules(endpoint: Endpoint) -> float | None:
    """Return the joules that a server has counted so far; None if it has no counter."""
    try:
        return energy_figure(await get_text(endpoint, "/metrics"))
    except LoadError:
        return None


@dataclass(frozen=True)
class DraftSample:
    """The draft length between two polls of a server."""

    seconds: float  # after the round's start, at the second poll
    draft_length: float  # mean over the steps of all sequences


class DraftMeter:
    """The mean draft length from poll to poll."""

    def __init__(self) -> None:
        self.samples: list[DraftSample] = []
        self._before: tuple[float, float] | None = None

    def read(self, seconds: float, text: str) -> bool:
        now = draft_figures(text)
        if now is None:
            return False
        if self._before is not None and now[1] > self._before[1]:
            drafted, steps = now[0] - self._before[0], now[1] - self._before[1]
            self.samples.append(DraftSample(seconds, drafted / steps))
        self._before = now
        return True


def draft_figures(text: str) -> tuple[float, float] | None:
    """Return drafts and sequence steps so far; None if the text has no such series."""
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(DRAFTS))
    try:
        return float(values[DRAFTS[0]]), float(values[DRAFTS[1]])
    except (KeyError, ValueError):
        return None


async def idle(endpoint: Endpoint, *, is_ours: bool) -> None:
    """Wait until no request runs and every block is free; one second, if the server is not `is_ours`."""
    clock = asyncio.get_running_loop().time
    end = clock() + (IDLE_SECONDS if is_ours else 1.0)
    while clock() < end:
        if is_ours:
            load = await get_json(endpoint, "/load")
            if not (load.get("num_queued") or load.get("num_running") or load.get("blocks_held")):
                return
        await asyncio.sleep(0.02)
