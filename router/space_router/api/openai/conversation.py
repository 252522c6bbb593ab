"""Render the messages of a request with the chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from space_router.api.openai.fields import ChatBody, Message, RefusalPart, ToolCall
from space_router.api.request_builder import RequestBuilder
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.text.chat_template import ChatTemplate, Habits


@dataclass(frozen=True)
class PromptOptions:
    """Options of a request for its prompt, besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()  # in the form that templates expect
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # template variables by name

    @classmethod
    def of(cls, body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> "PromptOptions":
        """Read the options of a body. Raises InvalidRequest if they contradict each other."""
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` are both true: the prompt ends with the last "
                "message or with the beginning of a new one. Set one of them.",
                param="continue_final_message",
            )
        variables = dict(body.chat_template_kwargs or {})
        effort = body.reasoning_effort
        if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequest(
                f'`reasoning_effort` is "{effort}", and `chat_template_kwargs` has another; give one.',
                param="reasoning_effort",
            )
        return cls(
            tools,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            variables=variables,
        )


def template_for(builder: RequestBuilder, tools: Sequence[object] = ()) -> ChatTemplate:
    """Return the chat template for a request with these tools. Raises InvalidRequest if there is none."""
    template = builder.text.chat_template
    if template is None:
        raise InvalidRequest(
            f"`{builder.text.name}` has no chat template. Use /v1/completions, or start the server with "
            "`--chat-template` (vicuna, llama-2, chatml, alpaca or a file).",
            param="messages",
            code="no_chat_template",
        )
    return template.of(tools)


def prompt_text(builder: RequestBuilder, messages: Sequence[Message], options: PromptOptions | None = None) -> str:
    """Return the messages as rendered by the chat template. Raises InvalidRequest."""
    options = options or PromptOptions()
    template = template_for(builder, options.tools)
    variables = {key: value for key, value in options.variables.items() if _is_heeded(template, key, value)}
    if options.continue_final_message and not messages[-1].content:
        raise InvalidRequest(
            "`continue_final_message` needs a last message with `content` to continue.", param="continue_final_message"
        )
    return template.render(
        _plain(messages, template.habits),
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        variables=variables,
    )


def _is_heeded(template: ChatTemplate, key: str, value: Any) -> bool:
    """Return whether a variable is passed to the template. Raises InvalidRequest if it would have no effect."""
    if key in template.variables:
        return True
    if key == "reasoning_effort" and value == "none":
        return False
    names = ", ".join(sorted(template.variables)[:16]) or "none"
    param = "reasoning_effort" if key == "reasoning_effort" else "chat_template_kwargs"
    raise InvalidRequest(
        f"{short_repr(key)} is no variable of this model's chat template, so that it would change nothing; its "
        f"variables are: {names}. Leave it out.",
        param=param,
        code="unsupported_parameter",
    )


def _plain(messages: Sequence[Message], habits: Habits) -> list[dict[str, Any]]:
    """Return messages in the form that the template expects, without absent fields."""
    names: dict[str, str] = {}  # function name by call id
    plain: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message, habits),
        }
        if message.tool_calls:
            one["tool_calls"] = [_call(call, habits) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if (name := message.name or names.get(message.tool_call_id or "")) is not None:
            one["name"] = name
        plain.append(one)
    return plain


def _content(message: Message, habits: Habits) -> Any:
    """Return the content as text, or as a list of parts if the template requires it."""
    content = message.refusal or "" if message.content is None else message.content
    texts = (
        [content]
        if isinstance(content, str)
        else [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]
    )
    if habits.takes_text and (isinstance(content, str) or not habits.takes_parts):
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts if text or len(texts) > 1]


def _call(call: ToolCall, habits: Habits) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    arguments = text if habits.arguments_as_text else _parsed(text)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """Return call arguments as an object, or unchanged if they are invalid, as in a truncated call."""
    try:
        arguments = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
