"""Conversion of a GenerateRequest to a plan, with the validation of HTTP requests."""

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from space_proto import generate_pb2

from space_router.api.openai import chat, completions
from space_router.api.openai.chat_fields import CHAT_NEUTRAL, ChatBody
from space_router.api.openai.fields import COMPLETION_NEUTRAL, CompletionBody, Count20
from space_router.api.plan import GenerationPlan
from space_router.api.request_builder import RequestBuilder
from space_router.api.service import Service
from space_router.errors import InvalidRequest, TimedOut
from space_router.grpc_api.values import values_of
from space_router.http_server.body import Body, validate
from space_router.http_server.connection import beside

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
        made = await beside(size, chat.plan, builder, talk, tools)
        unscored = talk.model_copy(update={"logprobs": None})  # events have their own form of logprobs
        return Asked(request, made, chat.ChatShape(service.text.tokenizer, unscored, made, tools))
    body = validate(CompletionBody, values, COMPLETION_NEUTRAL)
    grammar = await service.checked(body.wanted_grammar(), body.grammar_field)
    return Asked(request, await beside(size, completions.plan, builder, body, grammar), None)


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
    wanted = validate(Scores, {"logprobs": values.pop("logprobs", None)}, {}).logprobs
    return values if wanted is None else values | {"logprobs": True, "top_logprobs": wanted}
