"""What all experiments share: unequal requests, streams whose every token is known, waiting for recovery, and flags."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from perf.harness import log, table
from space_common.http_client import Endpoint, HttpError, get_json, parsed, stream_events
from space_common.process import ServerProcess
from space_eval.bench.meters import idle
from space_eval.data import built_in

PATH = "/v1/completions"


@dataclass(frozen=True)
class StreamAnswer:
    """A whole stream."""

    token_ids: tuple[int, ...]
    text: str
    finish: str | None
    longest_pause: float = field(default=0.0, compare=False)  # seconds between two events

    def num_different(self, other: StreamAnswer) -> int:
        """Tokens at which the two differ, missing ones included; a text or finish reason that differs counts once."""
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        num_different = sum(mine != theirs for mine, theirs in pairs)
        num_different += abs(len(self.token_ids) - len(other.token_ids))
        return num_different or int((self.text, self.finish) != (other.text, other.finish))


def bodies(number: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests, no two alike: greedy and sampled, with and without drafts, penalties, predictions, grammars."""
    prompts = built_in()
    made = []
    for place in range(number):
        body: dict[str, Any] = {
            "prompt": f"# {place}\n" * (1 + place % 5) + prompts[place % len(prompts)],
            "max_tokens": max_tokens - place % 7 * (max_tokens // 16),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "seed": place,
            "temperature": (0.0, 0.8, 1.0)[place % 3],
            "speculation": ("auto", "off", 2, 4)[place // 3 % 4],
        }
        if place % 5 == 3:
            body |= {"repetition_penalty": 1.2, "top_p": 0.9}
        if place % 8 == 6:
            body["prediction"] = {"type": "content", "content": prompts[place % len(prompts)] * 2}
        if place % 8 == 7:
            body["structured_outputs"] = {"regex": r"([a-z]{1,12} = [0-9]{1,6}\n){400}"}
        made.append(body)
    return made


def raw_request(body: Mapping[str, Any]) -> bytes:
    """An HTTP/1.1 request, for clients that read the answer in a way of their own."""
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def stream_choices(
    endpoint: Endpoint, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[list[dict[str, Any]]]:
    """`POST` `body` and yield the choices of events that arrive together. Raises HttpError, also for an error in the
    stream, and for one that ends before its `[DONE]`.

    Use it in `aclosing`, which closes its connection.
    """
    is_done = False
    async with aclosing(stream_events(endpoint, path, body)) as events:
        async for together in events:
            choices: list[dict[str, Any]] = []
            for event in together:
                if event == b"[DONE]":
                    is_done = True
                    continue
                value = parsed(event)
                if value.get("error"):
                    raise HttpError(f"The stream ended with an error: {value['error']}")
                choices += value.get("choices") or ()
            yield choices
    if not is_done:
        raise HttpError("The stream ended without [DONE].")


async def ask(
    endpoint: Endpoint, body: Mapping[str, Any], on_tokens: Callable[[int], None] = lambda number: None
) -> StreamAnswer:
    """The streamed answer; `on_tokens` is called with the number of tokens of each event. Raises HttpError."""
    ids: list[int] = []
    text, finish = "", None
    clock = asyncio.get_running_loop().time
    last, longest = None, 0.0
    async with aclosing(stream_choices(endpoint, PATH, body)) as stream:
        async for choices in stream:
            now = clock()
            last, longest = now, max(longest, 0.0 if last is None else now - last)
            for choice in choices:
                ids += choice.get("token_ids") or ()
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
                on_tokens(len(choice.get("token_ids") or ()))
    return StreamAnswer(tuple(ids), text, finish, longest)


RECOVERY_SECONDS = 300.0  # longest wait for anything after a fault: the machine may be busy with other work


def add_flags(parser: argparse.ArgumentParser, *flags: tuple[str, int | float | bool, str]) -> None:
    """An experiment's own flags (name, default, help), and those of all experiments."""
    parser.add_argument("--model", default="demo", help="what is served: demo, a folder, a hub id [demo]")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices [1]")
    for flag, default, text in flags:
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, metavar="N", help=f"{text} [{default}]")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")


@dataclass
class StreamCounts:
    """What the streams of one load have seen."""

    num_streams: int = 0  # begun
    num_tokens: int = 0
    num_different: int = 0  # tokens that are not those of the solo run
    lost: list[str] = field(default_factory=list)  # streams that did not come to their own end: the server's words
    pauses: list[float] = field(default_factory=list)  # the longest of each whole stream, in seconds
    seconds: float = 0.0  # of the whole load

    @property
    def failures(self) -> list[str]:
        return [*self.lost[:20], *([f"{self.num_different} tokens are different."] if self.num_different else [])]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class StreamLoad:
    """Streams of one server, each compared with the answer that its request gets alone."""

    def __init__(
        self, server: ServerProcess, bodies: Sequence[Mapping[str, Any]], expected: Sequence[StreamAnswer] = ()
    ) -> None:
        """`expected`: where they are known from another server."""
        self.server = server
        self.endpoint = Endpoint.parse(server.url)
        self.bodies = bodies
        self.expected = list(expected)
        self._waiting: list[set[int]] = []  # of each `wait_for_tokens`: clients that have got tokens since it began

    async def record_expected(self) -> None:
        for number, body in enumerate(self.bodies, start=1):
            log(f"alone: {number} of {len(self.bodies)}")
            self.expected.append(await ask(self.endpoint, body))
        await self.wait_idle()

    async def once(self) -> StreamCounts:
        await self.wait_idle()
        counts, clock = StreamCounts(), asyncio.get_running_loop().time
        begun = clock()
        await asyncio.gather(*(self._stream(number, number, counts) for number in range(len(self.bodies))))
        counts.seconds = clock() - begun
        return counts

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StreamCounts]:
        """Keep one stream per request open while the block runs; left, wait for the last ones to end."""
        counts, over = StreamCounts(), asyncio.Event()
        clock = asyncio.get_running_loop().time
        begun = clock()

        async def client(place: int) -> None:
            number = place
            while not over.is_set():
                await self._stream(place, number % len(self.bodies), counts)
                number += 1

        clients = [asyncio.create_task(client(place)) for place in range(len(self.bodies))]
        try:
            yield counts
        except BaseException:
            for task in clients:
                task.cancel()
            raise
        finally:
            over.set()
            await asyncio.wait(clients)
        for task in clients:
            task.result()
        counts.seconds = clock() - begun

    async def _stream(self, place: int, number: int, counts: StreamCounts) -> None:
        def on_tokens(num_tokens: int) -> None:
            if num_tokens:
                counts.num_tokens += num_tokens
                for heard in self._waiting:
                    heard.add(place)

        counts.num_streams += 1
        try:
            answer = await ask(self.endpoint, self.bodies[number], on_tokens)
        except HttpError as error:
            counts.lost.append(str(error))
            return
        counts.pauses.append(answer.longest_pause)
        counts.num_different += answer.num_different(self.expected[number])

    async def wait_for_tokens(self, num_clients: int = 1) -> None:
        """Until so many clients have got tokens. Raises HttpError if they do not in time."""
        heard: set[int] = set()
        self._waiting.append(heard)
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while len(heard) < num_clients:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise self._not_in_time(f"tokens for {num_clients} streams") from None
        finally:
            self._waiting = [one for one in self._waiting if one is not heard]

    async def wait_until(self, path: str, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Ask `path` until its answer holds, and return it. Raises HttpError if it does not in time."""
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while not holds(found := await get_json(self.endpoint, path)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self._not_in_time(what) from None
        return found

    async def wait_idle(self) -> None:
        """Until nothing runs and no page is held."""
        await idle(self.endpoint, is_ours=True)

    def _not_in_time(self, what: str) -> HttpError:
        return HttpError(f"{what}: not within {RECOVERY_SECONDS:g} s.\n{self.server.last_words()}")


async def num_leaked_pages(endpoint: Endpoint) -> int:
    """Pages of an idle server that are neither free nor cached."""
    info, load = await get_json(endpoint, "/info"), await get_json(endpoint, "/load")
    leaked: int = load["num_workers_up"] * info["num_blocks"] - load["blocks_free"] - load["blocks_cached"]
    return leaked


def stream_table(parts: Mapping[str, StreamCounts]) -> str:
    """What streams have seen, a row for each part of a run."""
    head = ("part", "streams", "lost", "tokens different", "tokens", "tokens/s", "longest pause of a stream")
    rows = [
        (name, one.num_streams, len(one.lost), one.num_different, one.num_tokens, f"{one.tokens_per_second:.0f}",
         f"{max(one.pauses, default=0.0):.1f} s")
        for name, one in parts.items()
    ]  # fmt: skip
    return table(head, rows)
