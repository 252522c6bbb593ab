"""Reasoning in Anthropic's Messages API: blocks of their own, whole and streamed, and back in the next request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doubles.router import listed
from doubles.router.whole_router import Seen
from doubles.thinking import THINKS
from doubles.tokenizers import byte_level, tiny_tokenizer
from space_router.api.anthropic.answers import AnthropicMessage, MessageEvent
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"
HI = [{"role": "user", "content": "Hi"}]
THOUGHT = "One STOP.\nTwo."
REPLY = f"{THOUGHT}\n</think>\n\nThe answer: 42."
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = {"name": "f", "input_schema": {"type": "object"}}


async def message(router: Any, **body: Any) -> dict[str, Any]:
    answer = await router.post("/v1/messages", **{"max_tokens": 200, "messages": HI, **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    AnthropicMessage.model_validate(value)
    return value | {"warning": answer.headers.get("warning", "")}


async def events(router: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await router.post("/v1/messages", **{"max_tokens": 200, "messages": HI, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = [json.loads(block.partition("data: ")[2]) for block in answer.text.strip().split("\n\n")]
    for event in found:
        MessageEvent.model_validate(event)
    return [event for event in found if event["type"] != "ping"]


def blocks_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream's events add up to."""
    blocks: list[dict[str, Any]] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                kind = delta.pop("type")
                assert kind == "signature_delta" or not blocks[-1].get("signature"), "the signature is the last"
                for name, text in delta.items():
                    blocks[-1][name] = blocks[-1].get(name, "") + text
            case _:
                pass
    return blocks


def prompt_of(seen: Seen) -> str:
    return tiny_tokenizer().decode(list(seen.take()[-1].prompt_ids), skip_special_tokens=False)


@pytest.mark.parametrize("lengths", [[0], [1], [3, 0, 2], [9]])
async def test_reasoning_is_a_block_before_the_text_whole_and_streamed(start: Any, lengths: list[int]) -> None:
    async with start(REPLY + END, chat=THINKS, accepts=listed(lengths), **ROOM) as router:
        made = await message(router, stop_sequences=["STOP"])
        thinking, text = made["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHT)
        assert len(thinking["signature"]) == 44
        assert (text["type"], text["text"]) == ("text", "The answer: 42.")
        assert made["stop_reason"] == "end_turn", "stop sequences do not act in reasoning"
        assert blocks_of(await events(router, stop_sequences=["STOP"])) == made["content"]


async def test_what_was_thought_comes_back_to_the_template(start: Any, seen: Seen) -> None:
    async with start(REPLY + END, chat=THINKS, **ROOM) as router:
        made = await message(router)
        prompt_of(seen)
        turns = [*HI, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": "So"}]
        await message(router, messages=turns)
        assert prompt_of(seen) == (
            f"<user>Hi</><assistant><think>{THOUGHT}</think>The answer: 42.</><user>So</><assistant><think>\n"
        )


async def test_thinking_is_switched_by_the_field(start: Any, seen: Seen) -> None:
    async with start(REPLY + END, chat=THINKS, **ROOM) as router:
        for thinking, ending in (
            ({"type": "enabled", "budget_tokens": 1024}, "<assistant><think>\n"),
            ({"type": "adaptive"}, "<assistant><think>\n"),
            ({"type": "disabled"}, "<assistant><think>\n\n</think>\n\n"),
        ):
            made = await message(router, thinking=thinking)
            assert prompt_of(seen).endswith(ending)
            assert ("budget_tokens" in made["warning"]) == ("budget_tokens" in thinking), "markers of several tokens"
        omitted = await message(router, thinking={"type": "adaptive", "display": "omitted"})
        assert [(block["type"], block.get("thinking")) for block in omitted["content"]] == [
            ("thinking", ""),
            ("text", None),
        ]
        streamed = blocks_of(await events(router, thinking={"type": "adaptive", "display": "omitted"}))
        assert streamed == omitted["content"]


async def test_reasoning_is_left_out_where_it_is_disabled_and_cannot_be_switched_off(start: Any) -> None:
    always = "{% for m in messages %}{{ m.content }}{% endfor %}<assistant><think>\n{# </think> #}"
    async with start(REPLY + END, chat=always, **ROOM) as router:
        made = await message(router, thinking={"type": "disabled"})
        assert [block["type"] for block in made["content"]] == ["text"]
        assert "`thinking` has no effect" in made["warning"]
        assert (await message(router, thinking={"type": "adaptive"}))["warning"] == ""


async def test_a_call_behind_reasoning_and_a_cut_in_it(start: Any) -> None:
    async with start(f"Why not.</think>\n{CALL}" + END, chat=THINKS, **ROOM) as router:
        made = await message(router, tools=[F])
        assert [block["type"] for block in made["content"]] == ["thinking", "tool_use"]
        assert made["content"][1]["input"] == {"a": 1}
        assert made["stop_reason"] == "tool_use"
        assert blocks_of(await events(router, tools=[F]))[0] == made["content"][0]
        cut = await message(router, max_tokens=2)
        assert ([block["type"] for block in cut["content"]], cut["stop_reason"]) == (["thinking"], "max_tokens")


async def test_a_budget_is_a_grammar_where_the_markers_are_tokens(start: Any, seen: Seen) -> None:
    inner = byte_level()
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = Tokenizer(inner, {"bos_token": END, "eos_token": END})
    end_id = tokenizer.token_to_id("</think>")
    async with start("x" + END, chat=THINKS, tokenizer=tokenizer, vocab_size=end_id + 1, **ROOM) as router:
        made = await message(router, thinking={"type": "enabled", "budget_tokens": 7})
        grammar = seen.take()[-1].sampling.grammar
        assert grammar is not None
        assert "thought: token{0,7}" in grammar.source
        assert made["warning"] == ""
        await message(router, thinking={"type": "disabled", "budget_tokens": 7})
        assert seen.take()[-1].sampling.grammar is None
