"""From a GenerateRequest to a plan, through the bodies that HTTP requests go through."""

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from space_proto import generate_pb2

from space_router.api import chat, completions
from space_router.api.body import Body, validate
from space_router.api.chat_fields import CHAT_NEUTRAL, ChatBody
from space_router.api.door import Door
from space_router.api.fields import COMPLETION_NEUTRAL, CompletionBody, Count20
from space_router.api.plan import Plan
from space_router.errors import InvalidRequest

PROMPTS = ("prompt", "prompt_token_ids", "prompts", "messages")
"""Fields that say what to go on from."""

OURS = frozenset({*PROMPTS, "return_prompt_token_ids", "continuous_usage_stats"})
"""Fields without a twin of that name and type in a completion's body."""

MAX_TIMEOUT = 1e9
"""Seconds; a deadline beyond it is none."""


class Scores(Body):
    """`logprobs` as a number, for conversations too."""

    logprobs: Count20 | None = None


def plan(door: Door, request: generate_pb2.GenerateRequest, time_left: float | None) -> Plan:
    """What a call asks of the engine. `time_left`: seconds until its deadline. Raises InvalidRequest, NotFound."""
    refuse_unknown(request)
    values = _values(request)
    if time_left is not None:
        values["timeout"] = min(time_left, values.get("timeout", MAX_TIMEOUT), MAX_TIMEOUT)
    if request.messages:
        return chat.plan(door, validate(ChatBody, _of_chat(request, values), CHAT_NEUTRAL))
    return completions.plan(door, validate(CompletionBody, values | {"prompt": _prompt(request)}, COMPLETION_NEUTRAL))


def refuse_unknown(message: Message, place: str = "") -> None:
    """Raises InvalidRequest for a field of a later protocol, here or further down: it would change the answer."""
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


def conversation(messages: Iterable[generate_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Messages as JSON has them."""
    return [{field.name: value for field, value in one.ListFields()} for one in messages]


def _values(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    """The fields that are set, as a JSON body has them."""
    given = _one_prompt(request)
    values: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name in OURS:
            continue
        if isinstance(value, Mapping):
            value = {str(key): entry for key, entry in value.items()}
        values[field.name] = list(value) if field.is_repeated and not isinstance(value, dict) else value
    if "prediction" in values:
        values["prediction"] = {"type": "content", "content": values["prediction"]}
    if given == "messages":
        values["messages"] = conversation(request.messages)
    return values


def _one_prompt(request: generate_pb2.GenerateRequest) -> str:
    """The name of the one field that says what to go on from."""
    given = [field.name for field, _ in request.ListFields() if field.name in PROMPTS]
    if len(given) != 1:
        names = "`prompt`, `prompt_token_ids`, `prompts` and `messages`"
        got = " and ".join(f"`{name}`" for name in given) or "none"
        raise InvalidRequest(f"Give exactly one of {names}; got {got}.", param="prompt", code="missing_parameter")
    return given[0]


def _prompt(request: generate_pb2.GenerateRequest) -> Any:
    """What a completion's `prompt` would be."""
    if request.prompts:
        return [one.text if one.HasField("text") else list(one.ids.ids) for one in request.prompts]
    return list(request.prompt_token_ids) if request.prompt_token_ids else request.prompt


def _of_chat(request: generate_pb2.GenerateRequest, values: dict[str, Any]) -> dict[str, Any]:
    """The same values as a conversation's body has them: there `logprobs` is two fields."""
    wanted = validate(Scores, {"logprobs": values.pop("logprobs", None)}, {}).logprobs
    return values if wanted is None else values | {"logprobs": True, "top_logprobs": wanted}
