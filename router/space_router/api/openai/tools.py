"""Tool use of a request: which tools the model sees, may call or must call, and how calls are parsed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from space_router.api.openai.conversation import template_for
from space_router.api.openai.fields import AllowedToolChoice, NamedTool, Tool
from space_router.api.plan import PlannedChoice
from space_router.api.request_builder import RequestBuilder
from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.text.tool_calls.format import FORMATS, ToolFormat, calls_only, calls_or, named, recognised
from space_router.text.tool_calls.parser import ToolCallReader

ToolChoice = str | NamedTool | AllowedToolChoice
"""none, auto, required, one tool, or some of them."""


@dataclass(frozen=True)
class ToolUse:
    """Validated tool use: the tools that the model sees and may call, and the grammar that enforces it."""

    shown: tuple[Mapping[str, Any], ...] = ()  # tools passed to the chat template
    names: frozenset[str] = frozenset()  # tools that the model may call
    format: ToolFormat | None = None  # None: calls are not parsed
    grammar: Grammar | None = None
    markers: frozenset[int] = frozenset()  # special ids that the parser needs in the text

    def reader(self) -> ToolCallReader | None:
        """Return a parser for one text, or None if calls are not parsed."""
        return None if self.format is None else ToolCallReader(self.format.form, self.names)

    def call_id(self, seed: int, choice: PlannedChoice, index: int) -> str:
        """Return a call's id: reproducible for a request and seed, and unique within a conversation."""
        place = f"{seed}/{choice.index}/{index}/".encode() + str(choice.prompt.ids).encode()
        digest = hashlib.blake2b(place, digest_size=12).hexdigest()
        return digest[:9] if self.format is not None and self.format.short_ids else f"call_{digest}"


def tool_use(
    builder: RequestBuilder,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    *,
    parallel: bool,
    answer: Grammar | None = None,
) -> ToolUse:
    """Validate tools and tool_choice. `answer`: grammar of an answer without a call. Raises InvalidRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` asks for a call, and there are no `tools`.", param="tool_choice")
        return ToolUse(grammar=answer)
    functions = _functions(tools)
    mode, callable_ = _chosen(choice, list(functions))
    if mode == "none":
        return ToolUse(grammar=answer)
    template = template_for(builder, tools)
    if not template.habits.takes_tools:
        raise InvalidRequest(
            f"The chat template ({template.name}) does not show tools to the model. Start the server with "
            "`--chat-template chatml` or a file with a template that does, or leave `tools` out.",
            param="tools",
            code="unsupported_parameter",
        )
    known = _format(builder, template.source)
    called = [functions[name] for name in callable_]
    return ToolUse(
        shown=tuple(_shown(tool) for tool in tools),
        names=frozenset(callable_),
        format=known,
        grammar=_grammar(builder, known, called, mode, parallel=parallel, answer=answer),
        markers=frozenset(
            id_ for text in (known.markers if known else ()) if (id_ := _special_id(builder, text)) is not None
        ),
    )


def _functions(tools: Sequence[Tool]) -> dict[str, Tool]:
    functions = {tool.function.name: tool for tool in tools}
    if len(functions) < len(tools):
        raise InvalidRequest("`tools` has two functions of one name; names must differ.", param="tools")
    for place, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(
                f"`tools.{place}.function.parameters` must be a JSON schema of the type object; got the type "
                f"{short_repr((tool.function.parameters or {})['type'])}.",
                param="tools",
            )
    return functions


def _chosen(choice: ToolChoice | None, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the mode (none, auto, required or named) and the tools that may be called."""
    match choice:
        case NamedTool():
            mode, wanted = "named", [choice.function.name]
        case AllowedToolChoice():
            allowed = choice.allowed_tools
            mode, wanted = allowed.mode, list(dict.fromkeys(tool.function.name for tool in allowed.tools))
        case _:
            return choice or "auto", list(names)
    if unknown := [name for name in wanted if name not in names]:
        raise InvalidRequest(
            f"`tool_choice` names {short_repr(unknown[0])}, which is none of `tools`: {short_repr(', '.join(names))}.",
            param="tool_choice",
        )
    return mode, wanted


def _shown(tool: Tool) -> Mapping[str, Any]:
    """Return a tool as models are trained to see it: without OpenAI's `strict`, always with parameters."""
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": _schema(tool)}}


def _schema(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments, always an object."""
    schema = tool.function.parameters
    return {"type": "object", "properties": {}} if schema is None else {"type": "object", **schema}


def _format(builder: RequestBuilder, template: str) -> ToolFormat | None:
    """Return the tool call format, or None if the server's flags turn parsing off. Raises InvalidRequest."""
    match builder.config.tool_call_parser:
        case "off":
            return None
        case "auto":
            known = recognised(template)
        case name:
            known = named(name, template)
    if known is None:
        raise InvalidRequest(
            "The chat template tells of no format of tool calls that is known here. Start the server with "
            f"`--tool-call-parser` ({', '.join(FORMATS)}, or off to leave calls in the text).",
            param="tools",
            code="unsupported_parameter",
        )
    return known


def _special_id(builder: RequestBuilder, text: str) -> int | None:
    """Return the id of a special token, or None for other text."""
    id_ = builder.text.tokenizer.token_to_id(text)
    return id_ if id_ in builder.text.tokenizer.special_ids else None


def _grammar(
    builder: RequestBuilder,
    known: ToolFormat | None,
    tools: Sequence[Tool],
    mode: str,
    *,
    parallel: bool,
    answer: Grammar | None,
) -> Grammar | None:
    """Return the grammar of the output, or None if it is not constrained. Raises InvalidRequest."""
    strict = any(tool.function.strict for tool in tools)
    if mode == "auto" and parallel and not strict and (answer is None or known is None):
        return answer
    param = "tool_choice" if mode != "auto" else "tools" if strict else "parallel_tool_calls" if not parallel else ""
    if known is None or known.layout is None:
        what = "`--tool-call-parser off`" if known is None else f"the format of tool calls {known.name}"
        raise InvalidRequest(
            f"With {what} the model cannot be made to call tools in one way or another. Leave out `tool_choice` (or "
            'send "auto"), `strict`, `parallel_tool_calls` and `response_format` beside `tools`.',
            param=param or "response_format",
            code="unsupported_parameter",
        )
    schemas = {
        tool.function.name: _schema(tool) if mode != "auto" or tool.function.strict else {"type": "object"}
        for tool in tools
    }
    special_id = partial(_special_id, builder)
    if mode != "auto":
        if answer is not None:
            raise InvalidRequest(
                '`tool_choice` asks for a call, and `response_format` for an answer. Send `tool_choice` "auto" or '
                '"none", or leave `response_format` out.',
                param="response_format",
            )
        return Grammar("lark", calls_only(known.layout, schemas, special_id, many=parallel and mode != "named"))
    return Grammar("lark", calls_or(_schema_of(answer, known), known.layout, schemas, special_id, many=parallel))


def _schema_of(answer: Grammar | None, known: ToolFormat) -> Mapping[str, Any] | None:
    """Return the JSON schema of an answer without a call, or None."""
    if answer is None:
        return None
    if known.layout is None or not known.layout.trigger or answer.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"A structured answer beside tools must be JSON, and calls must begin with a marker; got {answer.kind} and "
            f'the format of tool calls {known.name}. Send `tool_choice` "none" or "required".',
            param="response_format",
            code="unsupported_parameter",
        )
    schema: Mapping[str, Any] = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.source)
    return schema
