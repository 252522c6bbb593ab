"""Tools of `/v1/responses`: functions, custom tools, namespaces of both, and hosted kinds, which are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from space_router.api.openai.fields import (
    MAX_TOOLS,
    AllowedToolChoice,
    AllowedTools,
    CacheMarked,
    FunctionDefinition,
    FunctionName,
    FunctionReference,
    NamedTool,
    Tool,
    ToolChoice,
)
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, short_repr
from space_router.http_server.warnings import warn

INPUT = "input"  # the argument by which the model gives a custom tool its text


class ResponseTool(CacheMarked):
    """A function the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class CustomFormat(Body):
    """What the text for a custom tool is like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _has_a_grammar(self) -> CustomFormat:
        if (self.type == "grammar") != (self.syntax is not None and self.definition is not None):
            raise ValueError("must have `syntax` and `definition` with the type grammar, and only with it")
        return self


class CustomTool(CacheMarked):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: Literal[False] | None = None


class NamespaceTool(Body):
    """Several tools under one name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[ResponseTool | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ]


class HostedTool(Body):
    """A tool that OpenAI's servers run, such as `web_search`."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _by_its_type(cls, value: Any) -> Any:
        return {"type": value["type"]} if isinstance(value, dict) and "type" in value else value


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "hosted"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
]


class NamedFunction(Body):
    """One of the functions or custom tools."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


class AllowedFunctions(Body):
    """Some of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedFunction, Tag("own")] | Annotated[HostedTool, Tag("hosted")],
                Discriminator(lambda value: "own" if _kind(value) in ("function", "custom") else "hosted"),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS),
    ]


def _choice_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"function": "named", "custom": "named", "allowed_tools": "allowed"}
    return "word" if isinstance(value, str) else known.get(str(kind), "hosted")


AnyToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("named")]
    | Annotated[AllowedFunctions, Tag("allowed")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_choice_kind),
]


class LongFunction(FunctionDefinition):
    """A function, with the name of its namespace in front of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,130}$")]


class LongReference(FunctionReference):
    """Its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,130}$")]


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def leave_out_hosted(kind: str, param: str, *, refuse: bool) -> None:
    """Warn that a tool which OpenAI hosts is left out. Raises InvalidRequest with `refuse`. `param`: names it."""
    if refuse:
        raise InvalidRequest(
            f"The tool {short_repr(kind)} is hosted by OpenAI; this server has none of that kind "
            "(`--compat strict`). Leave it out.",
            param=param,
            code="unsupported_parameter",
        )
    warn(f"The hosted tool {kind} was left out: this server has none of that kind.")


@dataclass(frozen=True)
class KnownTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass
class ResponseTools:
    """The tools of a request, as the chat has them."""

    known: dict[str, KnownTool] = field(default_factory=dict)  # by the model's name
    chat: list[Tool] = field(default_factory=list)
    kept: list[Body] = field(default_factory=list)  # without hosted ones

    @classmethod
    def of(cls, tools: Sequence[Any], *, refuse_hosted: bool) -> ResponseTools:
        """Take the tools. Hosted ones get a warning, or with `refuse_hosted` raise InvalidRequest."""
        made = cls()
        for tool in tools:
            match tool:
                case HostedTool():
                    leave_out_hosted(tool.type, "tools", refuse=refuse_hosted)
                    continue
                case NamespaceTool():
                    for inner in tool.tools:
                        made._add(inner, tool)
                case _:
                    made._add(tool, None)
            made.kept.append(tool)
        return made

    def _add(self, tool: ResponseTool | CustomTool, namespace: NamespaceTool | None) -> None:
        space = None if namespace is None else namespace.name
        name = full_name(tool.name, space)
        description = (
            "\n\n".join(filter(None, (None if namespace is None else namespace.description, tool.description))) or None
        )
        if isinstance(tool, CustomTool):
            parameters, more = _custom_schema(tool)
            description = "\n\n".join(filter(None, (description, more))) or None
            function = LongFunction(name=name, description=description, parameters=parameters)
        else:
            function = LongFunction(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
        self.known[name] = KnownTool(tool.name, space, isinstance(tool, CustomTool))
        self.chat.append(Tool(type="function", function=function))

    def choice(self, choice: Any) -> ToolChoice | None:
        """Return the tool choice for the chat. Raises InvalidRequest if it names a hosted tool."""
        match choice:
            case NamedFunction():
                return self._reference(choice)
            case AllowedFunctions():
                named = [self._reference(one) for one in choice.tools]
                allowed = AllowedTools(mode=choice.mode, tools=named)
                return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
            case HostedTool():
                self._reference(choice)
        found: ToolChoice | None = choice
        return found

    def _reference(self, choice: NamedFunction | HostedTool) -> NamedTool:
        if isinstance(choice, HostedTool):
            raise InvalidRequest(
                f"`tool_choice` names the hosted tool {short_repr(choice.type)}, and this server has none of that "
                "kind. Name a function or a custom tool.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        name = full_name(choice.name, choice.namespace)
        if name not in self.known and choice.namespace is None:  # the name may be unique among the namespaces
            inside = [full for full, tool in self.known.items() if tool.name == choice.name]
            name = inside[0] if len(inside) == 1 else name
        return NamedTool(function=LongReference(name=name))


def _custom_schema(tool: CustomTool) -> tuple[dict[str, Any], str | None]:
    """Return the JSON schema of a custom tool's one argument, and what else the model needs to know of it."""
    form = tool.format
    text: dict[str, Any] = {"type": "string"}
    more = None
    if form is not None and form.syntax == "regex":
        text["pattern"] = f"^(?:{form.definition})$"
    elif form is not None and form.syntax == "lark":
        more = f"`{INPUT}` follows this Lark grammar:\n{form.definition}"
        warn(f"The Lark grammar of the custom tool {tool.name} is shown to the model and not enforced.")
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }, more


_BEFORE = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_BEGINNING = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_LONE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # the first half of a surrogate pair


class CustomInput:
    """The text for a custom tool, out of the pieces of a call's arguments: `{"input": "..."}`."""

    def __init__(self) -> None:
        self._text = ""  # not given out yet
        self._is_inside: bool | None = None  # False: the arguments are something else
        self._has_ended = False

    def push(self, piece: str) -> str:
        """Return what is known of the text by now."""
        self._text += piece
        if self._is_inside is None:
            if (before := _BEFORE.match(self._text)) is not None:
                self._is_inside, self._text = True, self._text[before.end() :]
            elif not _BEGINNING.fullmatch(self._text):
                self._is_inside = False
        if not self._is_inside or self._has_ended:
            return ""
        found = _WHOLE.match(self._text)
        whole = "" if found is None else found[0]
        if self._text[len(whole) : len(whole) + 1] == '"':
            self._has_ended = True
        elif (lone := _LONE.search(whole)) is not None:
            whole = whole[: lone.start()]
        self._text = self._text[len(whole) :]
        return _unescaped(whole)

    def finish(self) -> str:
        """Return the rest: arguments that are something else, as they are."""
        if self._is_inside:
            return ""
        rest, self._text = self._text, ""
        return rest


def _unescaped(text: str) -> str:
    try:
        known: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return known.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def custom_arguments(text: str) -> str:
    """Return the arguments of an earlier call of a custom tool, as the model wrote them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def shown_tools(tools: Sequence[Body]) -> Iterator[dict[str, Any]]:
    """Yield the tools as a response repeats them."""
    for tool in tools:
        values = tool.model_dump(exclude_none=True)
        yield {"parameters": None, "strict": None, **values} if isinstance(tool, ResponseTool) else values
