"""A steady load of all kinds of requests, each answer compared with the one that its request gets alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from space_common.http_client import Endpoint, HttpError, post_json
from space_eval.data import built_in

from chaos.harness import PATH, bodies, stream_choices
from chaos.soak import SCHEMA

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ALLOWED = (429, 503)  # how a request may be refused: the queue is full, or there is no worker
LOST_SECONDS = 300.0  # after which a request without an end counts as lost


@dataclass(frozen=True)
class Visit:
    """One kind of request."""

    kind: str
    path: str
    body: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """What a client has got so far."""

    text: str = ""
    finish: str | None = None


def visits(number: int, max_tokens: int) -> list[Visit]:
    """`number` requests, no two alike, at least one of each kind from 6 on."""
    prompts, made = built_in(), []
    for place, plain in enumerate(bodies(number, max_tokens)):
        body = {name: value for name, value in plain.items() if name != "return_token_ids"}
        talk = [{"role": "user", "content": f"{place}: {prompts[place % len(prompts)]}"}]
        chat = {name: body[name] for name in ("max_tokens", "seed", "temperature", "speculation")}
        streams = place % 12 < 6
        form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
        response = {
            "input": f"{place}: {prompts[place % len(prompts)]}",
            "max_output_tokens": max_tokens,
            "store": True,
            "temperature": 0,
        }
        made.append(
            (
                Visit("stream", PATH, body),
                Visit("whole answer", PATH, {**body, "stream": False}),
                Visit("chat stream", CHAT, {**chat, "messages": talk, "stream": True}),
                Visit("chat", CHAT, {**chat, "messages": talk}),
                Visit("JSON schema", CHAT, {**chat, "messages": talk, "response_format": form, "stream": streams}),
                Visit("stored response", RESPONSES, response),
            )[place % 6]
        )
    return made


async def ask(endpoint: Endpoint, visit: Visit, answer: Answer, leave_after: int | None = None) -> None:
    """Fill the answer as it comes; disconnect after so many choices of events. Raises HttpError."""
    if not visit.streams:
        whole = await post_json(endpoint, visit.path, visit.body)
        if visit.path == RESPONSES:
            answer.text = "".join(part["text"] for item in whole["output"] for part in item.get("content") or ())
            answer.finish = whole["status"]
        else:
            (choice,) = whole["choices"]
            answer.text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
            answer.finish = choice["finish_reason"]
        return
    num_choices = 0
    async with aclosing(stream_choices(endpoint, visit.path, visit.body)) as stream:
        async for choices in stream:
            for choice in choices:
                answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                answer.finish = choice.get("finish_reason") or answer.finish
            num_choices += len(choices)
            if leave_after is not None and num_choices >= leave_after:
                return


@dataclass
class LoadCounts:
    """What became of the requests."""

    num_answered: Counter[str] = field(default_factory=Counter)  # whole, and as expected, by kind
    num_refused: Counter[str] = field(default_factory=Counter)  # by status, before the first token
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds that one request took

    def record(self) -> dict[str, Any]:
        return {
            "num_answered": dict(self.num_answered),
            "num_refused": dict(self.num_refused),
            "num_wrong": len(self.wrong),
            "longest_request_seconds": self.longest,
        }


class MixedLoad:
    """Clients that ask one request after the other, in an order drawn by seed; some disconnect in the middle."""

    def __init__(self, endpoint: Endpoint, wanted: Sequence[Visit], seed: int) -> None:
        self.counts = LoadCounts()
        self.in_flight: set[object] = set()  # a token for each request that runs now
        self._endpoint, self._visits = endpoint, wanted
        self._expected: list[Answer] = []
        self._source = random.Random(seed)

    async def record_expected(self) -> None:
        """Ask each alone. Raises HttpError."""
        for visit in self._visits:
            answer = Answer()
            await ask(self._endpoint, visit, answer)
            if visit.kind == "JSON schema" and answer.finish == "stop":
                json.loads(answer.text)
            self._expected.append(answer)

    async def client(self, over: asyncio.Event) -> None:
        """Visit until it is over, and end the last request."""
        while not over.is_set():
            number = self._source.randrange(len(self._visits))
            visit = self._visits[number]
            leaves = visit.streams and self._source.random() < 0.2
            await self._one(number, self._source.randint(1, 30) if leaves else None)

    async def _one(self, number: int, leave_after: int | None) -> None:
        visit, expected, answer, token = self._visits[number], self._expected[number], Answer(), object()
        clock = asyncio.get_running_loop().time
        begun = clock()
        self.in_flight.add(token)
        try:
            async with asyncio.timeout(LOST_SECONDS):
                await ask(self._endpoint, visit, answer, leave_after)
        except TimeoutError:
            self.counts.wrong.append(f"{visit.kind}: no end within {LOST_SECONDS:g} s")
            return
        except HttpError as error:
            if error.status in ALLOWED:
                self.counts.num_refused[str(error.status)] += 1
                await asyncio.sleep(0.5)
            else:
                self.counts.wrong.append(f"{visit.kind}: {error}")
            return
        finally:
            self.in_flight.discard(token)
        self.counts.longest = max(self.counts.longest, clock() - begun)
        if leave_after is not None and expected.text.startswith(answer.text):
            self.counts.num_answered["left in the middle"] += 1
        elif answer == expected:
            self.counts.num_answered[visit.kind] += 1
        else:
            self.counts.wrong.append(f"{visit.kind} {number}: got {answer}, alone {expected}"[:2000])
