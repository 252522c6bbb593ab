"""A scripted HTTP server and a clock that jumps, for tests of the load generator: exact figures, no waiting."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from doubles.tcp import tcp_server

Answer = TypeVar("Answer")

_REAL_SECONDS = 0.0005
"""For which the loop looks at its sockets before it takes nothing to be on its way; loopback delivers at once."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while there is work and jumps to the next thing due when there is none."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(_REAL_SECONDS)
        if not ready:
            self._loop.jump(timeout)
        return ready


def jumping(main: Awaitable[Answer]) -> Answer:
    """What `main` gives, run in a JumpingLoop."""

    async def run() -> Answer:
        return await main

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(run())


@dataclass(frozen=True)
class Reply:
    """What a scripted server answers: each piece after so many seconds."""

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        return cls([(0.0, json.dumps(value).encode())], status)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


@dataclass
class ScriptedServer:
    """Answers by `script`, which is given path and body (None for GET); notes what it was asked."""

    script: Callable[[str, Any], Reply]
    url: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    num_open: int = 0  # connections now
    most_open: int = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedServer]:
        async with tcp_server(self._answer) as address:
            self.url = f"http://{address}"
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            length = int(fields.get("Content-Length", 0))
            body = json.loads(await reader.readexactly(length)) if length else None
            self.asked.append((path, body))
            with self._open() if body is not None else nullcontext():
                writing = asyncio.create_task(_write(writer, self.script(path, body)))
                gone = asyncio.create_task(reader.read())  # ends only when the client goes away
                await asyncio.wait([writing, gone], return_when=asyncio.FIRST_COMPLETED)
                for task in (writing, gone):
                    task.cancel()
        except (OSError, EOFError):
            return
        finally:
            writer.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield
        finally:
            self.num_open -= 1


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(b"HTTP/1.1 %d said\r\nConnection: close\r\n\r\n" % reply.status)
    for seconds, piece in reply.pieces:
        await asyncio.sleep(seconds)
        writer.write(piece)


def openai_answer(
    bursts: Sequence[tuple[float, int]], *, ids: bool = False, usage: Mapping[str, int] | None = None, **last: Any
) -> Reply:
    """A stream of completions: after so many seconds an event with so many tokens, each one character; `last`: fields
    of the last event."""
    pieces = []
    number = 0
    for place, (seconds, count) in enumerate(bursts):
        choice: dict[str, Any] = {"index": 0, "text": "x" * count}
        if ids:
            choice["token_ids"] = list(range(number, number + count))
        number += count
        pieces.append((seconds, event({"choices": [choice]} | (last if place == len(bursts) - 1 else {}))))
    if usage is not None:
        pieces.append((0.0, event({"choices": [], "usage": dict(usage)})))
    pieces.append((0.0, event(b"[DONE]")))
    return Reply(pieces)


def tgi_answer(bursts: Sequence[tuple[float, int]], input_length: int = 3) -> Reply:
    """A stream of TGI: one event per token, those of a burst together."""
    pieces = []
    total, number = sum(count for _, count in bursts), 0
    for seconds, count in bursts:
        burst = b""
        for _ in range(count):
            number += 1
            ended = number == total
            burst += event(
                {
                    "token": {"id": number, "text": "x", "special": False},
                    "generated_text": "x" * total if ended else None,
                    "details": {"generated_tokens": total, "input_length": input_length} if ended else None,
                }
            )
        pieces.append((seconds, burst))
    return Reply(pieces)
