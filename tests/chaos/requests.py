"""What streams ask for: unequal prompts, lengths and sampling parameters; and the answers that they must get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from space_eval.bench.client import Endpoint, LoadError, parsed, stream_events
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


async def ask(
    endpoint: Endpoint, body: Mapping[str, Any], on_tokens: Callable[[int], None] = lambda number: None
) -> StreamAnswer:
    """The streamed answer; `on_tokens` is called with the number of tokens of each event. Raises LoadError."""
    ids: list[int] = []
    text, finish, is_done = "", None, False
    clock = asyncio.get_running_loop().time
    last, longest = None, 0.0
    async with aclosing(stream_events(endpoint, PATH, body)) as events:
        async for together in events:
            now = clock()
            last, longest = now, max(longest, 0.0 if last is None else now - last)
            for event in together:
                if event == b"[DONE]":
                    is_done = True
                    continue
                value = parsed(event)
                if value.get("error"):
                    raise LoadError(f"The stream ended with an error: {value['error']}")
                for choice in value.get("choices") or ():
                    ids += choice.get("token_ids") or ()
                    text += choice.get("text") or ""
                    finish = choice.get("finish_reason") or finish
                    on_tokens(len(choice.get("token_ids") or ()))
    if not is_done:
        raise LoadError("The stream ended without [DONE].")
    return StreamAnswer(tuple(ids), text, finish, longest)
