"""The clients of a soak: readers, cancellations, slow readers, long prompts, grammars, predictions, mistakes."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from space_eval.bench.client import Endpoint, LoadError, parsed, post_json, stream_events

from chaos.requests import PATH, raw_request

SLOW_SECONDS = 5.0
"""After which a slow reader disconnects."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class Visits:
    """Draws one visit after the other; the same seed draws the same, and counts by kind what became of them."""

    def __init__(self, endpoint: Endpoint, *, window: int, text: str, seed: int) -> None:
        """`text`: what prompts are cut from; `window`: of the model, in tokens."""
        self.num_done: Counter[str] = Counter()
        self.num_refused: Counter[str] = Counter()  # 429: the queue was full, as it may be
        self.wrong: list[str] = []  # what should not have happened
        self._endpoint = endpoint
        self._window = window
        self._text = text
        self._source = random.Random(seed)
        self._kinds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream": (30, self._stream),
            "whole answer": (10, self._whole),
            "cancelled": (15, self._cancelled),
            "slow reader": (5, self._slow),
            "long prompt": (8, self._long),
            "grammar": (8, self._grammar),
            "prediction": (8, self._prediction),
            "several choices": (8, self._choices),
            "mistake": (8, self._mistake),
        }

    async def one(self) -> None:
        """One visit; an error is recorded, not raised."""
        kinds = list(self._kinds)
        (kind,) = self._source.choices(kinds, [self._kinds[name][0] for name in kinds])
        try:
            await self._kinds[kind][1]()
        except LoadError as error:
            if error.status == 429:
                self.num_refused[kind] += 1
                await asyncio.sleep(0.5)
            else:
                self.wrong.append(f"{kind}: {error}")
            return
        self.num_done[kind] += 1

    def _prompt(self, num_characters: int) -> str:
        start = self._source.randrange(len(self._text) - num_characters)
        return self._text[start : start + num_characters]

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {
            "prompt": self._prompt(self._source.randint(20, 200)),
            "max_tokens": self._source.randint(8, 96),
            "temperature": self._source.choice([0.0, 0.8]),
            "seed": self._source.randrange(1 << 32),
            "speculation": self._source.choice(["auto", "auto", "off", 2]),
            **fields,
        }

    async def _events(self, body: Mapping[str, Any], leave_after: int | None = None) -> None:
        """Read a stream to its end, or disconnect after so many events."""
        num_events, is_done = 0, False
        async with aclosing(stream_events(self._endpoint, PATH, {**body, "stream": True})) as events:
            async for together in events:
                num_events += len(together)
                is_done = is_done or together[-1] == b"[DONE]"
                for event in together:
                    if b'"error"' in event and (error := parsed(event).get("error")):
                        raise LoadError(f"The stream ended with an error: {error}")
                if leave_after is not None and num_events >= leave_after:
                    return
        if not is_done:
            raise LoadError("The stream ended without [DONE].")

    async def _stream(self) -> None:
        await self._events(self._body())

    async def _whole(self) -> None:
        await post_json(self._endpoint, PATH, self._body())

    async def _cancelled(self) -> None:
        await self._events(self._body(max_tokens=200, ignore_eos=True), self._source.randint(1, 30))

    async def _long(self) -> None:
        body = self._body(prompt=self._prompt(8 * self._window), truncate_prompt_tokens=self._window * 3 // 4)
        await self._events({**body, "max_tokens": 16})

    async def _grammar(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
        answer = await post_json(self._endpoint, PATH, self._body(response_format=form, max_tokens=96))
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])

    async def _prediction(self) -> None:
        text = self._prompt(150)
        await self._events(self._body(prompt=text, prediction={"type": "content", "content": text}))

    async def _choices(self) -> None:
        await post_json(self._endpoint, PATH, self._body(n=self._source.randint(2, 4), temperature=1.0))

    async def _mistake(self) -> None:
        """A request that cannot be served must be refused with a client error and a message."""
        wrong: list[dict[str, Any]] = [
            {"prompt": 5.5},
            {"max_tokens": -1},
            {"temperature": "warm"},
            {"prompt": [2**31]},
            {"prompt": self._prompt(8 * self._window), "truncate_prompt_tokens": None},
            {"structured_outputs": {"regex": "("}},
        ]
        try:
            await post_json(self._endpoint, PATH, self._body(**self._source.choice(wrong)))
        except LoadError as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
        else:
            raise LoadError("A request that cannot be served was answered with 200.")

    async def _slow(self) -> None:
        """Read a few bytes at a time through a small buffer; then disconnect."""
        request = raw_request(self._body(max_tokens=400, ignore_eos=True, stream=True))
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with connection, suppress(ConnectionError):
            await loop.sock_connect(connection, (self._endpoint.host, self._endpoint.port))
            await loop.sock_sendall(connection, request)
            end = loop.time() + SLOW_SECONDS
            while loop.time() < end and await loop.sock_recv(connection, 64):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
