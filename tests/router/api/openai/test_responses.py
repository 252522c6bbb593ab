"""OpenAI's newer API: the official client works, whole and streamed, and its events add up to the response."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pydantic
import pytest
from doubles.tokenizers import tiny_tokenizer
from space_router.api.openai.answers import ResponseEvent, ResponseObject
from space_router.api.openai.response_fields import RESPONSE_NEUTRAL, ResponseBody
from space_router.api.openai.responses import plan, tools_of
from space_router.http_server.body import validate

ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"
REPLY = "Hello, Zürich. " + END
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}


async def respond(router: Any, **body: Any) -> dict[str, Any]:
    """A response; it must be as the document says."""
    answer = await router.post("/v1/responses", **{"input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    ResponseObject.model_validate(value)
    return value


async def events(router: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await router.post("/v1/responses", **{"input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        ResponseEvent.model_validate(found[-1])
    return found


@asynccontextmanager
async def official(router: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=router.app)
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://router/v1", api_key="none", max_retries=0, http_client=http)


async def test_the_official_client_gets_a_text(start: Any) -> None:
    async with start(REPLY, **ROOM) as router, official(router) as client:
        made = await client.responses.create(
            model="tiny", input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, store=False
        )
        assert made.output_text == "Hello, Zürich. "
        assert (made.status, made.instructions, made.temperature) == ("completed", "Be brief.", 0.5)
        assert made.metadata == {"a": "b"}
        assert made.usage is not None
        assert made.usage.output_tokens == len(tiny_tokenizer().encode(REPLY))
        assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
        assert made.output[0].type == "message"
        assert made.id.startswith("resp_")


async def test_the_official_clients_stream_adds_up_to_the_same(start: Any) -> None:
    async with start(REPLY, **ROOM) as router, official(router) as client:
        async with client.responses.stream(model="tiny", input="Hi") as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == final.output_text == "Hello, Zürich. "
        kinds = [event.type async for event in await client.responses.create(model="tiny", input="Hi", stream=True)]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]


class Weather(pydantic.BaseModel):
    """What the official client can parse an answer into."""

    city: str
    days: int


async def test_the_official_client_parses_a_text_format_and_asks_for_it_by_a_grammar(start: Any) -> None:
    async with start('{"city": "Bern", "days": 2}' + END, **ROOM) as router, official(router) as client:
        made = await client.responses.parse(model="tiny", input="Hi", text_format=Weather)
        assert made.output_parsed == Weather(city="Bern", days=2)
        schema = {"type": "json_schema", "name": "w", "schema": Weather.model_json_schema()}
        assert (sampling(router, text={"format": schema}).grammar or None).kind == "json_schema"
        assert sampling(router, text={"format": {"type": "json_object"}}).grammar.kind == "json_object"
        assert sampling(router, text={"format": {"type": "text"}}).grammar is None


def sampling(router: Any, **body: Any) -> Any:
    """The law that the engine is given."""
    checked = validate(ResponseBody, {"input": "Hi", **body}, RESPONSE_NEUTRAL)
    builder = router.service.builder()
    return plan(builder, checked, tools_of(builder, checked)).choices[0].request.sampling


async def test_the_official_client_gets_calls_whole_and_streamed(start: Any) -> None:
    async with start(f"Well: {CALL}{CALL}{END}", **ROOM) as router, official(router) as client:
        asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": [WEATHER], "extra_body": {"seed": 1}}
        made = await client.responses.create(**asked)
        assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
        assert made.output_text == "Well:"
        call = made.output[1]
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Zürich"}')
        async with client.responses.stream(**asked) as stream:
            deltas = [event async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        assert deltas[-1].snapshot == call.arguments
        assert [getattr(item, "call_id", None) for item in final.output] == [
            getattr(item, "call_id", None) for item in made.output
        ]


@pytest.mark.parametrize("reply", ["Hello", "", f"Well: {CALL} so\n{CALL}", "{" * 30])
@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["no tools", "tools"])
async def test_events_are_numbered_and_add_up_to_the_response(start: Any, reply: str, tools: list[Any]) -> None:
    async with start(reply + END, **ROOM) as router:
        for limit in (None, 12):
            whole = await respond(router, tools=tools, seed=3, max_output_tokens=limit, request_id="r")
            found = await events(router, tools=tools, seed=3, max_output_tokens=limit, request_id="r")
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            last = found[-1]
            assert last["type"] == f"response.{whole['status']}"
            cached = {"input_tokens_details": last["response"]["usage"]["input_tokens_details"]}
            own = {"created_at": 0, "completed_at": 0, "spaceserve": None, "usage": whole["usage"] | cached}
            assert last["response"] | {**own, "usage": last["response"]["usage"]} == whole | own
            assert added_up(found) == whole["output"]


def added_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items, built from what is added and from deltas; what is said to be done must be so."""
    items: list[dict[str, Any]] = []
    for event in found:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_text.done":
                assert event["text"] == items[event["output_index"]]["content"][event["content_index"]]["text"]
            case "content_part.done":
                assert event["part"] == items[event["output_index"]]["content"][event["content_index"]]
            case "function_call_arguments.done":
                assert event["arguments"] == items[event["output_index"]]["arguments"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert event["item"] == items[event["output_index"]]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


async def test_an_answer_that_is_cut_off_is_incomplete(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        made = await respond(router, max_output_tokens=5)
        assert made["status"] == made["output"][0]["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert made["usage"]["output_tokens"] == 5


async def test_logprobs_come_with_the_text_where_they_are_included(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        part = (await respond(router, **body))["output"][0]["content"][0]
        assert "".join(entry["token"] for entry in part["logprobs"]).startswith("Hello, Z")
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        found = await events(router, **body)
        streamed = [entry for event in found if "delta" in event for entry in event["logprobs"]]
        assert streamed == part["logprobs"]
        assert (await respond(router))["output"][0]["content"][0]["logprobs"] == []


async def test_items_become_the_conversation_that_chat_has(start: Any) -> None:
    text = [{"type": "input_text", "text": "How is "}, {"type": "input_text", "text": "Bern?"}]
    said = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": text},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city": "Bern"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "How is Bern?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    async with start(REPLY, **ROOM) as router:
        made = await respond(router, input=items, instructions="Be brief.")
        chat = await router.post("/v1/chat/completions", messages=messages)
        assert made["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
        checked = validate(ResponseBody, {"input": items, "instructions": "Be brief."}, RESPONSE_NEUTRAL)
        assert [one.model_dump(exclude_none=True) for one in checked.messages()] == messages


async def test_a_response_can_be_the_next_ones_input(start: Any) -> None:
    async with start(f"Well: {CALL}{END}", **ROOM) as router:
        made = await respond(router, tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": made["output"][1]["call_id"], "output": "rain"}
        question = {"role": "user", "content": "Hi"}
        await respond(router, tools=[WEATHER], input=[question, *made["output"], output], temperature=0)


async def test_so_can_what_the_official_client_makes_of_it_with_nulls_where_nothing_was(start: Any) -> None:
    async with start(f"Well: {CALL}{END}", **ROOM) as router, official(router) as client:
        made = await client.responses.create(model="tiny", input="Hi", tools=[WEATHER])
        items = [item.model_dump() for item in made.output]
        assert items[0]["phase"] is None
        output = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "rain"}
        await respond(router, tools=[WEATHER], input=[{"role": "user", "content": "Hi"}, *items, output])


async def test_parameters_and_speculation_are_those_of_chat(start: Any) -> None:
    async with start(None, **ROOM) as router:
        sampling_params = sampling(
            router, top_k=5, min_p=0.1, seed=9, frequency_penalty=0.5, temperature=0.25, top_p=0.5
        )
        assert (
            sampling_params.top_k,
            sampling_params.min_p,
            sampling_params.seed,
            sampling_params.frequency_penalty,
        ) == (5, 0.1, 9, 0.5)
        body = {"seed": 4, "max_output_tokens": 60, "temperature": 1}
        texts = [(await respond(router, speculation=how, **body))["output"] for how in ("off", "auto", 1)]
        assert [one[0]["content"] for one in texts[1:]] == [texts[0][0]["content"]] * 2


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "at least 1"),
    ({"input": 7}, "input", ""),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_text"),
    ({"input": "x" * 5000}, "input", "4096"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "--response-store"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "middle"}, "truncation", "auto"),
    ({"metadata": {"a": 1}}, "metadata", "texts"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"max_tokens": 5}, "max_tokens", "not a field"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"include": ["everything"]}, "include", "logprobs"),
    ({"tools": [WEATHER], "include": ["message.output_text.logprobs"]}, "include", "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "hosted tool"),
    ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text", ""),
    ({"reasoning": {"effort": "high"}, "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning", "give one"),
    ({"store": "yes"}, "store", "boolean"),
    ({"model": "nobody"}, "model", "not served"),
    ({"temperature": 3}, "temperature", "2"),
]


async def test_what_is_wrong_is_named(start: Any) -> None:
    async with start(REPLY, **ROOM) as router:
        for body, param, words in WRONG:
            for stream in (False, True):
                status = 404 if param == "model" else 400
                await router.refuses("/v1/responses", param, words, status, **{"input": "Hi", "stream": stream, **body})
        neutral = {"store": False, "previous_response_id": None, "background": False, "truncation": "disabled"}
        kept = {"user": "me", "include": ["reasoning.encrypted_content"], "service_tier": "auto", "tools": []}
        await respond(router, **neutral, **kept, text={"verbosity": "medium"}, reasoning={"effort": "none"})


async def test_a_wish_to_store_is_taken_and_the_answer_says_that_nothing_was(start: Any) -> None:
    async with start(REPLY, **ROOM) as router, official(router) as client:
        for store in (True, False, None):
            made = await client.responses.create(model="tiny", input="Hi", store=store)
            assert made.store is False  # type: ignore[attr-defined]


async def test_a_failure_in_mid_stream_is_an_error_and_a_failed_response(start: Any) -> None:
    async with start(None, step_seconds=0.05, **ROOM) as router:
        streaming = asyncio.create_task(events(router, request_id="doomed", ignore_eos=True, max_output_tokens=2000))
        await router.until(lambda load: router.value("spaceserve_generated_tokens_total"))
        assert (await router.client.delete("/v1/requests/doomed")).status_code < 300
        found = await streaming
        assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
        assert found[-2]["code"] == "cancelled"
        assert found[-1]["response"]["status"] == "failed"
        assert found[-1]["response"]["error"]["message"] == found[-2]["message"]
