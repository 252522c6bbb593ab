"""Anthropic's Messages API: shapes, event order, tools, errors, token counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.router.whole_router import TOKENIZER, Seen
from doubles.tokenizers import tiny_tokenizer
from space_router.api.anthropic.answers import AnthropicError, AnthropicMessage, MessageEvent
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig

ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"
REPLY = "Hello, Zürich. " + END
LARGE = 2**64 + 1
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "n": 1e400}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
AGENT = json.loads(Path(__file__).with_name("coding_agent_request.json").read_text(encoding="utf-8"))
"""A request of Claude Code 2.1.197 after three calls of tools; its texts are replaced by their lengths."""


async def message(router: Any, **body: Any) -> dict[str, Any]:
    """A message; it must be as the document says."""
    answer = await router.post("/v1/messages", **{"max_tokens": 200, "messages": HI, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.json()["id"]
    value: dict[str, Any] = answer.json()
    AnthropicMessage.model_validate(value)
    return value


async def events(router: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await router.post("/v1/messages", **{"max_tokens": 200, "messages": HI, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        MessageEvent.model_validate(found[-1])
    return found


async def refused(router: Any, status: int, kind: str, words: str, **body: Any) -> None:
    answer = await router.post("/v1/messages", **{"max_tokens": 8, "messages": HI, **body})
    assert answer.status_code == status, answer.text
    error = AnthropicError.model_validate(answer.json())
    assert (error.error.type, error.request_id) == (kind, answer.headers["request-id"])
    assert words in error.error.message, error.error.message


async def count(router: Any, **body: Any) -> int:
    answer = await router.post("/v1/messages/count_tokens", **{"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == ["input_tokens"]
    number: int = answer.json()["input_tokens"]
    return number


def prompt_of(seen: Seen) -> str:
    return tiny_tokenizer().decode(list(seen.take()[-1].prompt_ids), skip_special_tokens=False)


async def test_a_text_is_answered(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        made = await message(router, model="tiny", system="Be brief.")
        assert made["content"] == [{"type": "text", "text": "Hello, Zürich. "}]
        assert (made["role"], made["model"], made["stop_reason"]) == ("assistant", "tiny", "end_turn")
        assert made["usage"]["output_tokens"] == len(TOKENIZER.encode(REPLY))
        assert made["id"].startswith("msg_")


async def test_events_come_in_the_documented_order(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        found = await events(router)
        kinds = [event["type"] for event in found]
        assert kinds[:3] == ["message_start", "content_block_start", "ping"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}
        whole = await message(router)
        text = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
        assert [{"type": "text", "text": text}] == whole["content"]
        begun, ended = found[0]["message"], found[-2]
        assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 1)
        assert ended["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_a_call_keeps_its_numbers_as_written(start: Any) -> None:
    async with start("Let me look." + CALL + END, **ROOM) as router:
        answer = await router.post("/v1/messages", max_tokens=200, messages=HI, tools=[WEATHER])
        made = answer.json()
        assert [block["type"] for block in made["content"]] == ["text", "tool_use"]
        call = made["content"][1]
        assert (call["name"], call["input"]["city"], made["stop_reason"]) == ("get_weather", "Zürich", "tool_use")
        assert '"n": 1e400' in answer.text
        assert call["id"].startswith("toolu_")
        found = await events(router, tools=[WEATHER])
        kinds = [event["type"] for event in found if event["type"] not in ("content_block_delta", "ping")]
        block = ["content_block_start", "content_block_stop"]
        assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
        pieces = [event["delta"] for event in found if event["type"] == "content_block_delta" and event["index"] == 1]
        assert {piece["type"] for piece in pieces} == {"input_json_delta"}
        joined = "".join(piece["partial_json"] for piece in pieces)
        assert joined == '{"city": "Zürich", "n": 1e400}'
        starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        assert (starts[1]["name"], starts[1]["input"]) == ("get_weather", {})
        assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_was_cut_has_what_there_is_of_it(start: Any) -> None:
    begun = CALL.partition("rich")[0] + " an der Aare"
    async with start(begun * 9, **ROOM) as router:
        made = await message(router, tools=[WEATHER], max_tokens=len(TOKENIZER.encode(begun)))
        assert made["stop_reason"] == "max_tokens"
        assert [block["type"] for block in made["content"]] == ["tool_use"]
        assert made["content"][0]["input"]["city"].startswith("Zü an")


async def test_stop_sequences_and_limits_are_named(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        made = await message(router, stop_sequences=["xyz", ", Zü"])
        assert made["content"] == [{"type": "text", "text": "Hello"}]
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", ", Zü")
        cut = await message(router, max_tokens=2)
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
        assert (await events(router, max_tokens=2))[-2]["delta"]["stop_reason"] == "max_tokens"
    async with start("word " * 400, window=64, num_blocks=64) as router:
        full = await message(router, max_tokens=32000)
        assert full["stop_reason"] == "model_context_window_exceeded"
        assert sum(full["usage"].values()) == 64


async def test_tools_results_and_system_reach_the_template(start: Any, seen: Seen) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Zürich", "n": LARGE},
                },
                {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no such place"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"}
    system = [billing, {"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    async with start(REPLY, **ROOM) as router:
        made = await message(router, messages=turns, system=system, tools=[WEATHER])
        prompt = prompt_of(seen)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nBe kind.\n\nThese functions")
        assert '"name": "get_weather", "description": "The weather."' in prompt
        called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "n": '
        assert f"Let me look.\n{called}{LARGE}}}}}" in prompt
        assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nError: no such place" in prompt.replace(
            "</tool_response>\n\n<", "</tool_response>\n<"
        )
        assert prompt.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
        assert "billing" not in prompt
        counted = await count(router, messages=turns, system=system, tools=[WEATHER])
        figures = made["usage"]
        assert figures["input_tokens"] + figures["cache_read_input_tokens"] == counted
        again = (await message(router, messages=turns, system=system, tools=[WEATHER]))["usage"]
        assert again["cache_read_input_tokens"] > 0
        assert again["input_tokens"] + again["cache_read_input_tokens"] == counted


async def test_turns_of_one_role_are_joined_and_a_last_answer_is_continued(start: Any, seen: Seen) -> None:
    async with start(REPLY, **ROOM) as router:
        await message(router, messages=[*HI, *HI, {"role": "assistant", "content": "I say"}])
        assert prompt_of(seen) == "<|im_start|>user\nHi\n\nHi<|im_end|>\n<|im_start|>assistant\nI say"


async def test_a_tool_is_demanded_or_forbidden(start: Any, seen: Seen) -> None:
    async with start(CALL + END, **ROOM) as router:
        await message(router, tools=[WEATHER], tool_choice={"type": "any"})
        assert seen.take()[-1].sampling.grammar is not None
        await message(router, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
        assert seen.take()[-1].sampling.grammar is not None
        plain = await message(router, tools=[WEATHER], tool_choice={"type": "none"})
        assert [block["type"] for block in plain["content"]] == ["text"]
        await message(router, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert seen.take()[-1].sampling.grammar is not None


async def test_what_changes_nothing_is_taken_with_a_warning(start: Any, seen: Seen) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    body = {
        "max_tokens": 8,
        "messages": HI,
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [WEATHER, hosted],
    }
    async with start(REPLY, **ROOM) as router:
        answer = await router.post("/v1/messages", **body)
        assert answer.status_code == 200, answer.text
        said = answer.headers["warning"]
        for name in ("context_management", "budget_tokens", "thinking", "web_search"):
            assert name in said
        assert "web_search" not in prompt_of(seen)
        unknown = {**body, "brand_new": {"a": 1}, "messages": [{**HI[0], "newer": 1}]}
        assert (await router.post("/v1/messages", **unknown)).status_code == 400
        taken = await router.post("/v1/messages?beta=true", **unknown)
        assert taken.status_code == 200, taken.text
        assert "brand_new" in taken.headers["warning"]
        assert "newer" in taken.headers["warning"]
        headers = {"anthropic-beta": "x-2026-01-01", "anthropic-version": "2023-06-01"}
        assert (await router.client.post("/v1/messages", json=unknown, headers=headers)).status_code == 200
        await refused(
            router, 400, "invalid_request_error", "web_search_20250305", tools=[hosted],
            tool_choice={"type": "tool", "name": "web_search"},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("`max_tokens` is required", {"max_tokens": None}),
        ("`max_tokens` must be greater than or equal to 1", {"max_tokens": 0}),
        ("no images", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("no images, documents", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
        ("brand_new", {"brand_new": 1}),
        ("`messages`", {"messages": []}),
        ("tool_use", {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}),
        ("without `tool_result` blocks", {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}),
        ("`stop`", {"stop": ["x"]}),
        ("`stop_sequences`", {"stop_sequences": [""]}),
        ("must have `name`", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}),
        ("must have `input_schema`", {"tools": [{"name": "x"}]}),
        ("which is none of", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_in_its_shape(start: Any, words: str, body: dict[str, Any]) -> None:
    async with start(REPLY, **ROOM) as router:
        await refused(router, 400, "invalid_request_error", words, **body)


async def test_messages_of_which_nothing_is_left_are_refused(start: Any) -> None:
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2"}]
    async with start(REPLY, **ROOM) as router:
        for role, content in (("user", []), ("system", ""), ("system", billing)):
            empty = [{"role": role, "content": content}]
            await refused(router, 400, "invalid_request_error", "all of them are empty", messages=empty)
            counted = await router.post("/v1/messages/count_tokens", messages=empty)
            assert counted.status_code == 400, counted.text


async def test_too_long_a_prompt_is_refused_in_the_words_that_agents_know(start: Any) -> None:
    async with start(REPLY, window=64, num_blocks=64) as router:
        long = [{"role": "user", "content": "word " * 80}]
        number = await count(router, messages=long)
        await refused(
            router, 400, "invalid_request_error", f"prompt is too long: {number} tokens > 63 maximum", messages=long
        )
        await refused(router, 404, "not_found_error", "is not served here", model="claude")


async def test_keys_come_in_either_header(start: Any) -> None:
    config = replace(ServeConfig(), api_keys=plain_keys("sk-a"))
    body = {"max_tokens": 8, "messages": HI}
    async with start(REPLY, config=config, **ROOM) as router:
        assert (await router.client.get("/v1/models", headers={"x-api-key": "sk-a"})).status_code == 200
        for headers in ({"x-api-key": "sk-a"}, {"authorization": "Bearer sk-a"}, {"x-api-key": "sk-a",
                        "authorization": "Bearer none"}):  # fmt: skip
            assert (await router.client.post("/v1/messages", json=body, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "sk-b"}, {"authorization": "Basic sk-a"}):
            answer = await router.client.post("/v1/messages", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_full_queue_and_a_stopping_server_are_overloaded(start: Any) -> None:
    async with start(REPLY, config=replace(ServeConfig(), key_requests_per_minute=1), **ROOM) as router:
        await message(router)
        await refused(router, 429, "rate_limit_error", "Try again in")
    async with start(REPLY, **ROOM) as router:
        router.service.draining = True
        await refused(router, 503, "overloaded_error", "stopping")


async def test_a_coding_agents_request_is_answered_and_its_prefix_cached(start: Any, seen: Seen) -> None:
    """Its billing header differs in every request."""
    body = AGENT["body"]
    url = "/v1/messages?beta=true"
    async with start("Done. " + END, window=32768, num_blocks=4096) as router:
        figures = []
        for header in ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=2;"):
            system = [{"type": "text", "text": header}, *body["system"][1:]]
            answer = await router.client.post(
                url, json={**body, "system": system, "model": "tiny"}, headers=AGENT["headers"]
            )
            assert answer.status_code == 200, answer.text
            kinds = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
            end = next(json.loads(line[6:]) for line in answer.text.split("\n") if '"message_delta"' in line[:40])
            figures.append(end["usage"])
        assert prompt_of(seen).count("<system-reminder>") == 1
        assert figures[0]["cache_read_input_tokens"] == 0
        assert figures[1]["input_tokens"] <= 16  # the last block at most
        asked = {name: body[name] for name in ("messages", "system", "tools", "thinking")}
        counted = await router.client.post("/v1/messages/count_tokens", json=asked, headers=AGENT["headers"])
        assert counted.json()["input_tokens"] == figures[0]["input_tokens"]
