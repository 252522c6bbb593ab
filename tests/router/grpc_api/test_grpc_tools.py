"""Tools and templates over gRPC: asked as over HTTP, and their calls streamed in the same pieces."""

import json
from typing import Any

import grpc
import pytest
from doubles.router import always
from doubles.router.whole_router import Start
from space_proto import generate_pb2
from space_router.engine.request.request import Grammar

ROOM = {"window": 4096, "num_blocks": 2048}
USER = {"role": "user", "content": "How is the weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "It rains.", "parameters": json.dumps(PARAMETERS)}
TOOLS = [WEATHER, {"name": "now", "strict": True}]
HTTP_TOOLS = [
    {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HISTORY = [
    USER,
    {"role": "assistant", "tool_calls": [{"id": "call_1", "name": "now", "arguments": "{}"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]
HTTP_HISTORY = [
    USER,
    {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    HISTORY[2],
]
REQUIRED = "TOOL_MODE_REQUIRED"
TWINS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tools": TOOLS}, {"tools": HTTP_TOOLS}),
    ({"tools": TOOLS, "tool_choice": {"mode": REQUIRED}}, {"tools": HTTP_TOOLS, "tool_choice": "required"}),
    ({"tools": TOOLS, "tool_choice": {"mode": "TOOL_MODE_NONE"}}, {"tools": HTTP_TOOLS, "tool_choice": "none"}),
    (
        {"tools": TOOLS, "tool_choice": {"mode": REQUIRED, "names": ["now"]}},
        {
            "tools": HTTP_TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        },
    ),
    ({"tools": TOOLS, "parallel_tool_calls": False}, {"tools": HTTP_TOOLS, "parallel_tool_calls": False}),
    ({"messages": HISTORY}, {"messages": HTTP_HISTORY}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    (
        {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
    ),
    ({"structured_outputs": {"json": '{"type": "array"}'}}, {"structured_outputs": {"json": {"type": "array"}}}),
    ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"structured_outputs": {"grammar": 'start: "a"'}}),
]


async def test_each_field_of_a_conversation_asks_for_what_its_http_twin_asks(start: Start, seen: Any) -> None:
    async with start(**ROOM) as router:
        await router.events(messages=[USER], max_tokens=2)
        plain = seen.take()
        for fields, body in TWINS:
            await router.events(**{"messages": [USER], "max_tokens": 2, **fields})
            called = seen.take()
            answer = await router.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2, **body})
            assert answer.status_code == 200, answer.text
            assert called == seen.take(), fields
            assert called != plain or fields.get("tool_choice") == {"mode": "TOOL_MODE_NONE"}, fields


async def test_variables_that_the_template_does_not_know_are_refused_as_over_http(router: Any) -> None:
    for fields, body in (
        ({"chat_template_kwargs": '{"mood": "good"}'}, {"chat_template_kwargs": {"mood": "good"}}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ):
        error = await router.refusal(messages=[USER], **fields)
        answer = await router.http.post("/v1/chat/completions", json={"messages": [USER], **body})
        assert error.details() == answer.json()["error"]["message"]


async def test_a_structured_output_reaches_the_worker_as_its_grammar(router: Any, seen: Any) -> None:
    await router.events(prompt="x", structured_outputs={"regex": "[0-9]+"}, max_tokens=2)
    assert [request.sampling.grammar for request in seen] == [Grammar("regex", "[0-9]+")]


@pytest.mark.parametrize("reply", [f"Let me see.{CALL}<|endoftext|>", "It rains.<|endoftext|>", CALL * 2])
async def test_calls_are_streamed_apart_from_the_text_as_over_http(start: Start, reply: str) -> None:
    async with start(reply, accepts=always, **ROOM) as router:
        wanted = {"max_tokens": 120, "seed": 3, "ignore_eos": False}
        events = await router.events(messages=[USER], tools=TOOLS[:1], logprobs=0, **wanted)
        told = await router.sse("/v1/chat/completions", messages=[USER], tools=HTTP_TOOLS[:1], **wanted)
    choices = [choice for event in told for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(event.text for event in events) == "".join(delta.get("content") or "" for delta in deltas)
    theirs = [
        (piece["index"], piece.get("id", ""), piece["function"].get("name", ""), piece["function"]["arguments"])
        for delta in deltas
        for piece in delta.get("tool_calls", ())
    ]
    ours = [(piece.index, piece.id, piece.name, piece.arguments) for event in events for piece in event.tool_calls]
    assert calls(ours) == calls(theirs)
    assert bool(ours) == ("tool_call" in reply)
    name = generate_pb2.FinishReason.Name(events[-1].finish_reason).removeprefix("FINISH_REASON_").lower()
    assert choices[-1]["finish_reason"] == {"eos": "stop"}.get(name, name)
    assert sum(len(event.token_ids) for event in events) == told[-1]["usage"]["completion_tokens"]
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)


def calls(pieces: list[tuple[int, str, str, str]]) -> dict[int, tuple[str, str, str]]:
    """Calls that pieces add up to."""
    whole: dict[int, tuple[str, str, str]] = {}
    for index, id_, name, arguments in pieces:
        before = whole.get(index, ("", "", ""))
        whole[index] = (before[0] + id_, before[1] + name, before[2] + arguments)
    return whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs"),
        ({"tools": [{"name": "f", "parameters": "no JSON"}]}, "tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"tools": TOOLS, "tool_choice": {"mode": "TOOL_MODE_NONE", "names": ["now"]}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"names": ["dance"]}}, "tool_choice"),
    ],
)
async def test_what_is_no_json_or_no_tool_is_refused_by_name(router: Any, fields: dict[str, Any], param: str) -> None:
    error = await router.refusal(messages=[USER], **fields)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["error-param"] == param
    assert param in error.details()
