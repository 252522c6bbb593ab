"""Conversion of a GenerateRequest to a plan, with the validation of HTTP requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from space_proto import generate_pb2

from space_router.api.openai import chat, completions
from space_router.api.openai.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, ChatBody, CompletionBody, Count20
from space_router.api.plan import GenerationPlan
from space_router.api.request_builder import RequestBuilder
from space_router.api.service import Service
from space_router.errors import InvalidRequest, TimedOut
from space_router.http_server.body import Body, short_repr, validate
from space_router.http_server.responses import in_thread_if_long

PROMPTS = ("prompt", "prompt_token_ids", "prompts", "messages")
"""Fields that give the prompt; exactly one must be set."""

OURS = frozenset({*PROMPTS, "return_prompt_token_ids", "continuous_usage_stats"})
"""Fields that have no counterpart of the same name and type in the JSON body."""

_MODES = {
    generate_pb2.TOOL_MODE_AUTO: "auto",
    generate_pb2.TOOL_MODE_NONE: "none",
    generate_pb2.TOOL_MODE_REQUIRED: "required",
}


def values_of(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    """Return the JSON body's fields. Raises InvalidRequest for invalid JSON, or not exactly one kind of prompt."""
    values: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name not in OURS:
            values[field.name] = list(value) if field.is_repeated else value
    if request.logit_bias:
        values["logit_bias"] = {str(id_): bias for id_, bias in request.logit_bias.items()}
    if request.HasField("prediction"):
        values["prediction"] = {"type": "content", "content": request.prediction}
    if request.HasField("structured_outputs"):
        values["structured_outputs"] = _structure(request.structured_outputs)
    if request.tools:
        values["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        values["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("chat_template_kwargs"):
        values["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return values | _prompt(request)


def conversation(messages: Iterable[generate_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Return chat messages in the JSON form."""
    found = []
    for message in messages:
        values = {field.name: value for field, value in message.ListFields()}
        if message.tool_calls:
            values["tool_calls"] = [_call(call) for call in message.tool_calls]
        found.append(values)
    return found


def _prompt(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    """Return `prompt` or `messages` of the body. Raises InvalidRequest."""
    given = [field.name for field, _ in request.ListFields() if field.name in PROMPTS]
    if len(given) != 1:
        names = "`prompt`, `prompt_token_ids`, `prompts` and `messages`"
        got = " and ".join(f"`{name}`" for name in given) or "none"
        raise InvalidRequest(f"Give exactly one of {names}; got {got}.", param="prompt", code="missing_parameter")
    match given[0]:
        case "messages":
            return {"messages": conversation(request.messages)}
        case "prompts":
            return {"prompt": [one.text if one.HasField("text") else list(one.ids.ids) for one in request.prompts]}
        case "prompt_token_ids":
            return {"prompt": list(request.prompt_token_ids)}
        case _:
            return {"prompt": request.prompt}


def _structure(wanted: generate_pb2.StructuredOutputs) -> dict[str, Any]:
    kind = wanted.WhichOneof("kind")
    if kind is None:
        return {}
    return {kind: list(wanted.choice.texts) if kind == "choice" else getattr(wanted, kind)}


def _tool(tool: generate_pb2.Tool, place: str) -> dict[str, Any]:
    function: dict[str, Any] = {field.name: value for field, value in tool.ListFields()}
    if tool.HasField("parameters"):
        function["parameters"] = _object(tool.parameters, f"{place}.parameters")
    return {"type": "function", "function": function}


def _choice(choice: generate_pb2.ToolChoice) -> str | dict[str, Any]:
    mode = _MODES.get(choice.mode)
    if mode is None:
        names = ", ".join(generate_pb2.ToolMode.Name(known) for known in _MODES)
        raise InvalidRequest(
            f"`tool_choice.mode` must be one of {names}; got {choice.mode}.", param="tool_choice", code="invalid_value"
        )
    if not choice.names:
        return mode
    named = [{"type": "function", "function": {"name": name}} for name in choice.names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _call(call: generate_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function, "index": call.index}


def _object(text: str, place: str) -> dict[str, Any]:
    """Parse a field that is a JSON object as text. Raises InvalidRequest."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason = f"is not valid JSON: {error.msg[:100]} (at character {error.pos})"
    else:
        if isinstance(value, dict):
            return value
        reason = f"must be a JSON object as text; got {short_repr(value)}"
    raise InvalidRequest(f"`{place}` {reason}.", param=place.partition(".")[0], code="invalid_value")


MAX_TIMEOUT = 1e9
"""Seconds; a longer deadline counts as none."""


@dataclass(frozen=True)
class Asked:
    """One validated call."""

    request: generate_pb2.GenerateRequest
    plan: GenerationPlan
    shape: chat.ChatShape | None  # separates tool calls from text in chats; None: no chat


class Scores(Body):
    """`logprobs` as a number, also for chats."""

    logprobs: Count20 | None = None


async def read(
    service: Service, builder: RequestBuilder, request: generate_pb2.GenerateRequest, time_left: float | None
) -> Asked:
    """Validate a call. `time_left`: seconds until its deadline, None: no deadline. Raises ApiError."""
    if time_left == 0:
        raise TimedOut("The call's deadline had passed before it was read. Give it more time.")
    refuse_unknown(request)
    values, size = values_of(request), request.ByteSize()
    if time_left is not None:
        values["timeout"] = min(time_left, values.get("timeout", MAX_TIMEOUT), MAX_TIMEOUT)
    if request.messages:
        talk = validate(ChatBody, _of_chat(values), CHAT_NEUTRAL)
        tools = chat.tools_of(builder, talk)
        await service.checked(tools.grammar, "tools" if tools.shown else talk.grammar_field)
        made = await in_thread_if_long(size, chat.plan, builder, talk, tools)
        unscored = talk.model_copy(update={"logprobs": None})  # events have their own form of logprobs
        return Asked(request, made, chat.ChatShape(service.text.tokenizer, unscored, made, tools))
    body = validate(CompletionBody, values, COMPLETION_NEUTRAL)
    grammar = await service.checked(body.wanted_grammar(), body.grammar_field)
    return Asked(request, await in_thread_if_long(size, completions.plan, builder, body, grammar), None)


def refuse_unknown(message: Message, place: str = "") -> None:
    """Raise InvalidRequest for an unknown field at any depth, because ignoring it would change the result."""
    if unknown := UnknownFieldSet(message):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name}{place} has a field numbered {unknown[0].field_number}, which this server does "
            "not know. Nothing is accepted and ignored: leave it out, or ask a newer server.",
            code="unknown_parameter",
        )
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for number, part in enumerate(value if field.is_repeated else [value]):
                refuse_unknown(part, f"{place}.{field.name}" + f".{number}" * field.is_repeated)


def _of_chat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values in the form of a chat body, where `logprobs` is two fields."""
    wanted = validate(Scores, {"logprobs": values.pop("logprobs", None)}).logprobs
    return values if wanted is None else values | {"logprobs": True, "top_logprobs": wanted}
