"""A thousand readers in one process: each counts its letters and notes when they came, and does nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Callable
from urllib.parse import urlsplit

LETTER = b"a"
_TEXT = re.compile(rb'"text":"(' + LETTER + rb'*)"')
_END = b"data: [DONE]"
_OVERLAP = 64  # bytes kept of the last piece: an event may be cut anywhere


class StreamReader(asyncio.Protocol):
    """One streamed completion, from the request to [DONE]."""

    def __init__(self, request: bytes, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        """`on_begin`: at the first token; `on_end`: once the connection is over, however it ended."""
        self.seconds = array("d")  # of each token, on the monotonic clock
        self.num_events = 0
        self.num_bytes = 0  # of the answer, its head included
        self.is_whole = False  # it came to [DONE]
        self.head = b""  # what came first: a status line
        self._request, self._on_begin, self._on_end = request, on_begin, on_end
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.num_bytes += len(data)
        if not self.head:
            self.head = data[:400]
        data = self._rest + data
        last = 0
        for match in _TEXT.finditer(data):
            last = match.end()
            self.num_events += 1
            if not self.seconds:
                self._on_begin()
            self.seconds.extend([now] * (match.end(1) - match.start(1)))
        if _END in data[last:]:
            self.is_whole = True
            assert self._transport is not None
            self._transport.close()
        self._rest = data[max(last, len(data) - _OVERLAP) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


def request(url: str, seed: int, max_tokens: int) -> bytes:
    """A completion as a stream, by hand: the seed is its name."""
    body = {"prompt": f"stream {seed}: ", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1}
    content = json.dumps({**body, "seed": seed, "stream": True}).encode()
    place = urlsplit(url).netloc
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
