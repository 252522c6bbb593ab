"""Tools in chat: what the model is shown, what it must write, and how its calls reach the client."""

import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from space_router.api.openai.chat import plan, tools_of
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody
from space_router.config import ServeConfig
from space_router.http_server.body import validate
from space_router.text import tool_calls as tool_call_forms
from space_router.text.tool_parsers import formats
from space_router.text.tool_parsers.formats import FORMATS

USER = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "It rains.", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HALF = CALL[: CALL.index("ich")]
ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"


async def chat(router: Any, **body: Any) -> dict[str, Any]:
    answer = await router.post("/v1/chat/completions", **{"messages": USER, "tools": [WEATHER, NOW], **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


async def events(router: Any, **body: Any) -> list[dict[str, Any]]:
    asked = {"messages": USER, "tools": [WEATHER, NOW], **body}
    found: list[dict[str, Any]] = await router.events("/v1/chat/completions", **asked)
    return found


def joined(found: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the events of one choice add up to, as a client adds them up."""
    message: dict[str, Any] = {"content": None, "tool_calls": [], "finish_reason": None}
    for choice in [choice for event in found for choice in event["choices"] if choice["index"] == index]:
        delta = choice["delta"]
        assert message["finish_reason"] is None
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(message["tool_calls"]):
                assert piece["id"]
                assert piece["type"] == "function"
                message["tool_calls"].append({"id": piece["id"], "type": "function", "function": piece["function"]})
            else:
                assert piece["index"] == len(message["tool_calls"]) - 1
                assert piece.keys() == {"index", "function"}
                assert piece["function"].keys() == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def test_a_call_is_a_call_and_no_content(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        (choice,) = (await chat(router, seed=1))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}


@pytest.mark.parametrize("reply", [CALL, f"Let me see.\n{CALL}\n{CALL}", "No <tool_call> at all", f"{CALL} then"])
async def test_the_events_of_a_stream_add_up_to_the_whole_message(start: Any, reply: str) -> None:
    async with start(reply + END, **ROOM) as router:
        for speculation in ("off", "auto"):
            whole = (await chat(router, seed=3, speculation=speculation))["choices"][0]
            message = joined(await events(router, seed=3, speculation=speculation))
            assert message["content"] == whole["message"]["content"]
            assert message["tool_calls"] == whole["message"].get("tool_calls", [])
            assert message["finish_reason"] == whole["finish_reason"]
            assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])


async def test_a_calls_name_comes_first_and_its_arguments_while_they_are_written(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        found = [event["choices"][0] for event in await events(router, speculation="off")]
        pieces = [piece for choice in found for piece in choice["delta"].get("tool_calls", [])]
        assert found[0]["delta"] == {"role": "assistant", "content": None}
        assert pieces[0]["function"] == {"name": "get_weather", "arguments": "{"}
        assert len(pieces) > 10
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Zürich"}'
        assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + ["tool_calls"]


@pytest.mark.parametrize(
    ("reply", "stop", "arguments", "reason"),
    [
        (CALL, ["ich"], '{"city": "Zür', "stop"),
        (CALL, ["}"], '{"city": "Zürich"', "stop"),
        (HALF, None, '{"city": "Zür', "stop"),
        (CALL + HALF, None, '{"city": "Zür', "stop"),
        (CALL, ["</tool_call>"], '{"city": "Zürich"}', "tool_calls"),
    ],
)
async def test_half_a_call_is_none_to_act_upon(
    start: Any, reply: str, stop: list[str] | None, arguments: str, reason: str
) -> None:
    async with start(reply + END, **ROOM) as router:
        whole = (await chat(router, stop=stop, seed=1))["choices"][0]
        streamed = joined(await events(router, stop=stop, seed=1))
        for message, finish in ((whole["message"], whole["finish_reason"]), (streamed, streamed["finish_reason"])):
            assert message["tool_calls"][-1]["function"]["arguments"] == arguments
            assert finish == reason
        tools = [{"type": "function", **WEATHER["function"]}]
        answer = (await router.post("/v1/responses", input="Hi", tools=tools, stop=stop)).json()
        status = "completed" if reason == "tool_calls" else "incomplete"
        assert (answer["status"], answer["output"][-1]["status"]) == (status, status)
        assert answer["incomplete_details"] is None
        lines = (await router.post("/v1/responses", input="Hi", tools=tools, stop=stop, stream=True)).text
        last = json.loads(lines.strip().split("data: ")[-1])
        assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)


async def test_each_choice_has_calls_of_its_own(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        whole = await chat(router, n=3, seed=5)
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]]
        assert len(set(ids)) == 3
        found = await events(router, n=3, seed=5)
        assert [joined(found, index)["tool_calls"][0]["id"] for index in range(3)] == ids


async def test_ids_of_calls_follow_from_seed_and_prompt(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:

        async def first_id(**body: Any) -> str:
            call = (await chat(router, **body))["choices"][0]["message"]["tool_calls"][0]
            return str(call["id"])

        once = await first_id(seed=1)
        assert await first_id(seed=1) == once
        assert await first_id(seed=2) != once
        assert await first_id(seed=1, messages=[*USER, *USER]) != once


async def test_logprobs_and_usage_count_every_token_of_a_call(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        whole = await chat(router, logprobs=True)
        text = bytes(byte for entry in whole["choices"][0]["logprobs"]["content"] for byte in entry["bytes"]).decode()
        assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"] - 1  # all but EOS
        assert text == CALL
        found = await events(router, logprobs=True)
        streamed = [entry for event in found for entry in event["choices"][0]["logprobs"]["content"]]
        assert streamed == whole["choices"][0]["logprobs"]["content"]


async def test_a_call_that_is_cut_off_is_as_long_as_it_is_and_says_length(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        for num_tokens in (5, 58):
            whole = (await chat(router, max_tokens=num_tokens, seed=1))["choices"][0]
            message = joined(await events(router, max_tokens=num_tokens, seed=1))
            assert whole["finish_reason"] == message["finish_reason"] == "length"
            assert message["tool_calls"] == whole["message"].get("tool_calls", [])
            assert message["content"] == whole["message"]["content"]
        assert whole["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Z'}


async def test_calls_of_other_functions_than_those_offered_are_text(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        message = (await chat(router, tools=[NOW]))["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message


async def test_with_the_choice_none_tools_are_neither_shown_nor_read(start: Any) -> None:
    async with start(CALL + END, **ROOM) as router:
        without = await chat(router, tools=None)
        refused = await chat(router, tool_choice="none")
        assert refused["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
        assert refused["choices"][0]["message"]["content"] == CALL
        assert refused["choices"][0]["finish_reason"] == "stop"


async def test_the_prompt_shows_tools_calls_and_results(start: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ]
    async with start("ok" + END, **ROOM) as router:
        answer = await router.post("/chat_tokenize", messages=messages, tools=[WEATHER])
        text = answer.json()["templated_text"]
        assert text.startswith("<|im_start|>system\nBe brief.\n\n")
        assert json.dumps(WEATHER["function"]) in text
        assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>' in text
        assert "<tool_response>\nsun\n</tool_response>" in text


@pytest.mark.parametrize("arguments", ['{"city": "', "[1]", "nonsense", '{"city": NaN}', "{" * 9999])
async def test_arguments_that_are_no_object_are_shown_to_the_model_as_they_are(start: Any, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with start("ok" + END, **ROOM) as router:
        answer = await router.post("/chat_tokenize", messages=[*USER, said], tools=[WEATHER])
        assert answer.status_code == 200, answer.text
        assert f'{{"name": "get_weather", "arguments": {json.dumps(arguments)}}}' in answer.json()["templated_text"]


async def test_a_call_that_was_cut_off_may_be_sent_back_with_what_came_of_it(start: Any) -> None:
    messages: list[Any] = [*USER]
    async with start(CALL + END, **ROOM) as router:
        (choice,) = (await chat(router, messages=messages, max_tokens=60))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length"
        assert not call["function"]["arguments"].endswith("}")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "error: no JSON"}
        await chat(router, messages=[*messages, choice["message"], result])


async def test_special_tokens_that_mark_a_call_are_seen_although_they_are_skipped(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test's vocabulary has <|im_start|> as a special token: here it is Mistral's marker."""
    monkeypatch.setattr(tool_call_forms, "TOOL_CALLS", "<|im_start|>")
    marked = replace(FORMATS["mistral"], markers=("<|im_start|>",))
    monkeypatch.setattr(formats, "named", lambda name, template: marked)
    reply = '<|im_end|><|im_start|>[{"name": "now", "arguments": {}}]'
    async with start(reply + END, config=ServeConfig(tool_call_parser="mistral"), chat=TEMPLATE, **ROOM) as router:
        message = (await chat(router))["choices"][0]["message"]
        assert message["content"] is None
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert joined(await events(router))["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


TEMPLATE = "{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}{% endfor %}"


async def test_a_template_without_tools_or_a_known_format_refuses_them(start: Any) -> None:
    for config, chat_, words in [
        (ServeConfig(), "vicuna", "does not show tools"),
        (ServeConfig(), TEMPLATE, "--tool-call-parser"),
        (ServeConfig(tool_call_parser="off"), "vicuna", "does not show tools"),
    ]:
        async with start(CALL + END, config=config, chat=chat_, **ROOM) as router:
            await router.refuses("/v1/chat/completions", "tools", words, messages=USER, tools=[WEATHER])


async def test_the_flag_names_the_format_or_leaves_calls_in_the_text(start: Any) -> None:
    for name, reply, content in [
        ("hermes", CALL, None),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}}]', None),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Zürich"}}', None),
        ("pythonic", "[get_weather(city='Zürich')]", None),
        ("off", CALL, CALL),
    ]:
        config = ServeConfig(tool_call_parser=name)
        async with start(reply + END, config=config, chat=TEMPLATE, **ROOM) as router:
            message = (await chat(router))["choices"][0]["message"]
            assert message["content"] == content
            if content is None:
                function = message["tool_calls"][0]["function"]
                assert function == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
                assert (len(message["tool_calls"][0]["id"]) == 9) == (name == "mistral")


async def test_what_a_format_writes_around_answers_is_no_content_without_tools_either(start: Any) -> None:
    config = ServeConfig(tool_call_parser="functionary_v32")
    async with start("all\nIt is hot." + END, config=config, chat=TEMPLATE, **ROOM) as router:
        for body in ({"tools": None}, {"tool_choice": "none"}):
            assert (await chat(router, **body))["choices"][0]["message"]["content"] == "It is hot."
            assert joined(await events(router, **body))["content"] == "It is hot."
        answer = await router.post("/v1/responses", input="Hi")
        assert answer.json()["output"][0]["content"][0]["text"] == "It is hot."
        answer = await router.post("/v1/messages", messages=USER, max_tokens=64)
        assert answer.json()["content"] == [{"type": "text", "text": "It is hot."}]


def grammar(router: Any, **body: Any) -> str | None:
    """The grammar of the engine's request."""
    checked = validate(ChatBody, {"messages": USER, "tools": [WEATHER, NOW], **body}, CHAT_NEUTRAL)
    builder = router.service.builder()
    made = plan(builder, checked, tools_of(builder, checked)).choices[0].request.sampling.grammar
    assert made is None or made.kind == "lark"
    return None if made is None else str(made.source)


async def test_a_grammar_holds_the_model_to_what_was_asked_for(router: AbstractAsyncContextManager[Any]) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert grammar(router) is None
    assert grammar(router, tool_choice="auto", parallel_tool_calls=True) is None
    assert grammar(router, tool_choice="none") is None
    required = grammar(router, tool_choice="required")
    assert required is not None
    assert "get_weather" in required
    assert "now" in required
    assert json.dumps(PARAMETERS)[1:-1] in required
    for choice in (named, some, {"function": {"name": "now"}}):  # the last as Hugging Face's client writes it
        one = grammar(router, tool_choice=choice)
        assert one is not None
        assert "now" in one
        assert "get_weather" not in one
    assert "(" in required
    assert "(" not in (grammar(router, tool_choice="required", parallel_tool_calls=False) or "(").split("call_0:")[0]


async def test_one_call_at_most_and_strict_tools_need_a_grammar_even_where_no_call_is_asked_for(
    router: AbstractAsyncContextManager[Any],
) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert "PLAIN" in (grammar(router, parallel_tool_calls=False) or "")
    assert json.dumps(PARAMETERS)[1:-1] not in (grammar(router, parallel_tool_calls=False) or "")
    assert json.dumps(PARAMETERS)[1:-1] in (grammar(router, tools=[strict]) or "")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "maxProperties": 3}}}
    assert '"maxProperties": 3' in (grammar(router, response_format=schema) or "")


async def test_a_tool_without_parameters_is_called_without_arguments(router: AbstractAsyncContextManager[Any]) -> None:
    def tool(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "now", **function}}

    nothing, null = tool(), tool(parameters=None)
    open_object = tool(parameters={"type": "object", "properties": {}})
    for one, is_closed in ((nothing, True), (null, True), (open_object, False), (tool(parameters={}), False)):
        found = grammar(router, tools=[one], tool_choice="required")
        assert found is not None
        assert ('"additionalProperties": false' in found) == is_closed


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools", "differ"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "object"),
    ({"tools": [NOW] * 129}, "tools", "128"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no `tools`"),
    ({"tool_choice": "any"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "nobody"),
    ({"functions": [NOW["function"]]}, "functions", "send `tools`"),
    ({"function_call": {"name": "now"}}, "function_call", "send `tool_choice`"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages", "`tool`"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages", "tool_calls"),
    ({"messages": [{"role": "assistant"}]}, "messages", "tool_calls"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort", "give one"),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking", "give one"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages", "reasoning_content"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "one of them"),
    ({"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": ""}]},
     "continue_final_message", "content"),
]  # fmt: skip


async def test_what_is_wrong_about_tools_and_messages_is_named(router: Any) -> None:
    for body, param, words in WRONG:
        for stream in (False, True):
            asked = {"messages": USER, "tools": [WEATHER, NOW], "stream": stream, **body}
            await router.refuses("/v1/chat/completions", param, words, **asked)


async def test_without_a_parser_nobody_can_be_made_to_call(start: Any) -> None:
    async with start(CALL + END, config=ServeConfig(tool_call_parser="off"), **ROOM) as router:
        for body, param in [
            ({"tool_choice": "required"}, "tool_choice"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ]:
            await router.refuses("/v1/chat/completions", param, "", messages=USER, tools=[WEATHER], **body)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder"])
async def test_what_a_notation_cannot_enforce_is_named_and_refused_where_it_is_strict(start: Any, name: str) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    async with start(CALL + END, config=ServeConfig(tool_call_parser=name), **ROOM) as router:
        for strict in (False, True):
            function = {"name": "get_weather", "parameters": city, "strict": strict}
            body = {"messages": USER, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
            if strict:
                await router.refuses("/v1/chat/completions", "tools", "maxLength", **body)
            else:
                answer = await router.post("/v1/chat/completions", max_tokens=1, **body)
                assert "maxLength" in answer.headers["warning"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_that_is_cut_anywhere_is_a_part_of_a_call_and_no_text(start: Any, choice: Any) -> None:
    num_named = CALL.index(', "arguments"')
    async with start(CALL + END, **ROOM) as router:
        for num_tokens in range(1, 60):
            asked = {"max_tokens": num_tokens, "seed": 1, "tool_choice": choice, "speculation": "off"}
            whole = (await chat(router, **asked))["choices"][0]
            found = await events(router, **asked)
            message = joined(found)
            assert whole["finish_reason"] == message["finish_reason"] == "length"
            assert whole["message"]["content"] is message["content"] is None
            assert message["tool_calls"] == whole["message"].get("tool_calls", [])
            assert all(event["choices"][0]["delta"] or event["choices"][0]["finish_reason"] for event in found)
            if choice == NAMED or num_tokens > num_named + 20:
                (call,) = message["tool_calls"]
                assert call["function"]["name"] == "get_weather"
                assert '{"city": "Zürich"}'.startswith(call["function"]["arguments"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    "arguments",
    ['{"x": 1e400}', '{"x": 18446744073709551617}', '{"x": -1e400, "y": [0.10, {"z": 1.0000000000000000001}]}',
     '{"x": -0, "y": 1E5}', '{"x": ' + "9" * 5000 + "}", '{"x": 1.5, "y": 3}'],
)  # fmt: skip
async def test_numbers_of_an_earlier_call_reach_the_model_as_they_were_written(start: Any, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with start("ok" + END, window=16384, num_blocks=2048) as router:
        answer = await router.post("/chat_tokenize", messages=[*USER, said], tools=[WEATHER])
        assert f'"arguments": {arguments}}}' in answer.json()["templated_text"]
