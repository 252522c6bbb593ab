"""A character whose bytes come with several steps is told once and whole, and cut the same however it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

import pytest
from space_router.text.tokenizer import Tokenizer

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WAYS: list[tuple[str | int, bool]] = [("off", False), ("auto", True), (1, False), (2, True), (4, True)]
"""(speculation, streamed)."""

CHARACTERS = "中文é😀"
PROMPT = "# 中文 é 😀\nx = '中文中文中文'\ny = 'éé😀é😀é😀'\nz = '中文é😀中文é"
NUM_TOKENS = 28


class Bytes:
    """Asks the steady server for texts of CHARACTERS' bytes: every token is one of them."""

    def __init__(self, live: Any, tokenizer: Tokenizer, route: str) -> None:
        self.live, self.tokenizer, self.route = live, tokenizer, route
        self.allowed = sorted({id_ for one in CHARACTERS for id_ in tokenizer.encode(one, add_special_tokens=False)})
        assert {len(tokenizer.bytes_of[id_]) for id_ in self.allowed} == {1}

    def ask(self, drafts: str | int, stream: bool, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """The choice that a seed gives, with its usage; and the steps of its tokens, where it is streamed."""
        body = {"prompt": PROMPT, "logprobs": 1}
        if self.route == "chat":
            body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 1}
        body |= {"allowed_token_ids": self.allowed, "temperature": 0.9, "max_tokens": NUM_TOKENS}
        body |= {"return_token_ids": True, "speculation": drafts, "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_steps": True}
        answer = self.live.answer(ROUTES[self.route], body)
        (choice,) = answer["choices"]
        return {**choice, "num_tokens": answer["usage"]["completion_tokens"]}, answer["steps"]

    def every_way(self, **fields: Any) -> dict[str, Any]:
        """The choice that every way of asking gives."""
        told = {way: self.ask(*way, **fields)[0] for way in WAYS}
        assert told == dict.fromkeys(WAYS, told["off", False])
        return told["off", False]

    def content(self, ids: list[int]) -> bytes:
        return b"".join(self.tokenizer.bytes_of[id_] for id_ in ids)


def characters(content: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of the valid characters of several bytes."""
    begin = 0
    while begin < len(content):
        lengths = (length for length in (2, 3, 4) if is_character(content[begin : begin + length]))
        length = next(lengths, 1)
        if length > 1:
            yield begin, begin + length
        begin += length


def is_character(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


class Across(NamedTuple):
    """A character of which one step gave a part and a later one the rest; at least one of them gave several tokens."""

    seed: int
    ids: list[int]
    begin: int  # tokens before it
    end: int
    character: str


def character_across_steps(asked: Bytes) -> Across:
    """The first one among the seeds that stands nowhere before in its text."""
    for seed in range(60):
        asked.live.wait_idle()  # what runs alone takes the same steps each time
        told, steps = asked.ask(4, True, seed=seed)
        content = asked.content(told["token_ids"])
        for begin, end in characters(content):
            character = content[begin:end].decode()
            if content.decode(errors="replace").index(character) < len(content[:begin].decode(errors="replace")):
                continue
            first, last = steps[begin], steps[end - 1]
            if first < last and max(steps.count(first), steps.count(last)) > 1:
                return Across(seed, told["token_ids"], begin, end, character)
    raise AssertionError("no character lay across two steps")


@pytest.fixture(scope="module", params=["completions", pytest.param("chat", marks=pytest.mark.slow)])
def asked(steady: Any, request: pytest.FixtureRequest) -> Bytes:
    with resources.as_file(resources.files("space_demo")) as folder:
        return Bytes(steady, Tokenizer.load(folder), request.param)


def test_a_character_across_steps_is_told_once_and_whole(asked: Bytes) -> None:
    seed, ids, begin, end, character = character_across_steps(asked)
    told = asked.every_way(seed=seed)
    assert told["token_ids"] == ids
    assert told["text"] == asked.content(ids).decode(errors="replace")
    for limit in range(
        max(begin, 1), end + 1
    ):  # the bytes of a character that is cut stand for nothing, and stay tokens
        cut, _ = asked.ask(4, True, seed=seed, max_tokens=limit)
        assert cut == asked.ask("off", False, seed=seed, max_tokens=limit)[0]
        assert cut["token_ids"] == ids[:limit]
        assert cut["text"] == asked.content(ids[:limit]).decode(errors="replace")
        assert cut["text"].endswith(character) == (limit == end)
    stopped = asked.every_way(seed=seed, stop=character)
    assert stopped["text"] == told["text"][: told["text"].index(character)]
    assert stopped["token_ids"] == ids[:begin]
    assert (stopped["finish_reason"], stopped["stop_reason"], stopped["num_tokens"]) == ("stop", character, begin)
    kept = asked.every_way(seed=seed, stop=character, include_stop_str_in_output=True)
    assert kept["text"] == stopped["text"] + character
    assert kept["token_ids"] == ids[:end]
