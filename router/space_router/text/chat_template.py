"""Render messages into a prompt with the checkpoint's Jinja template or a built-in one, in a sandbox."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from space_common.files import NotUtf8, read_text

from space_router.errors import ConfigError, InvalidRequest
from space_router.text.built_in_templates import BUILT_IN as BUILT_IN
from space_router.text.checkpoint import read_json
from space_router.text.template_budget import TemplateBudget, check_arguments, check_operands, check_result, metered

_MAX_PROMPT = 16 * 1024**2  # characters a template may produce; far above any context window
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})  # variables passed to every template
_CUT = "\x02cut here\x03 "  # marks the end of a message to continue; control characters avoid clashes with text


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with bounded operators."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, one) for name, one in self.filters.items()}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, *arguments: Any, **named: Any) -> Any:
        name = getattr(function, "__name__", "")
        on = getattr(function, "__self__", None)
        check_arguments(name, (on, *arguments) if isinstance(on, str) else arguments, named)
        return check_result(name, super().call(context, function, *arguments, **named))


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it refuses results that are too large."""

    @functools.wraps(apply)  # keeps Jinja's pass_context and pass_environment marks
    def checked(*arguments: Any, **named: Any) -> Any:
        given = [one for one in arguments if not isinstance(one, jinja2.Environment | jinja2.runtime.Context)]
        check_arguments(name, given, named)
        return check_result(name, apply(*arguments, **named))

    return checked


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; it renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Extension declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@dataclass(frozen=True)
class Habits:
    """What a template accepts, found by rendering probe conversations."""

    takes_tools: bool  # it renders the tools
    takes_text: bool  # message content as a string
    takes_parts: bool  # message content as a list of parts
    arguments_as_text: bool  # call arguments as JSON text; else as an object, as in transformers


class ChatTemplate:
    """A compiled template with the special tokens that it may use.

    `with_tools`: the checkpoint's other template, for requests with tools.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str | None],
        *,
        name: str = "chat template",
        with_tools: "ChatTemplate | None" = None,
    ) -> None:
        environment = _Sandbox()
        self.name = name
        self.source = source
        self.with_tools = with_tools
        self._tokens = {key: token for key, token in tokens.items() if token is not None}
        try:
            parsed = environment.parse(source)
            known = environment.globals.keys() | _GIVEN | self._tokens.keys()
            self.variables = frozenset(meta.find_undeclared_variables(parsed) - known)
            self._template = environment.from_string(metered(environment, parsed))
        except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            # Some errors, such as a `break` outside a loop, are found only by Python's compiler.
            raise ConfigError(f"{name} is no valid Jinja template: {str(error)[:300]}.") from error

    def of(self, tools: Sequence[object]) -> "ChatTemplate":
        """Return the template for a request with these tools."""
        return self if self.with_tools is None or not tools else self.with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt, ending where the assistant's turn begins. Raises InvalidRequest with the template's error.

        `continue_final_message`: the prompt ends directly after the last message's text, which the model continues.
        """
        budget = TemplateBudget()
        values: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **(variables or {}),
            "messages": _marked(messages) if continue_final_message else list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            **budget.names,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > _MAX_PROMPT:
                    raise InvalidRequest(f"The messages give more than {_MAX_PROMPT} characters.", param="messages")
        except (
            jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError,
            AssertionError, MemoryError,
        ) as error:  # fmt: skip
            raise InvalidRequest(
                f"The chat template does not take these messages: {str(error)[:300]}", param="messages"
            ) from error
        text = "".join(pieces)
        return _cut(text) if continue_final_message else text

    @cached_property
    def habits(self) -> Habits:
        """What the template accepts; the usual behaviour is assumed where it rejects the probe conversation."""
        parts = self._tries([{"role": "user", "content": [{"type": "text", "text": "spaceprobe"}]}])
        takes_parts = parts.strip() != "" and "spaceprobe" in parts and "'type'" not in parts and '"type"' not in parts
        takes_text = "spaceprobe" in self._tries([{"role": "user", "content": "spaceprobe"}]) or not takes_parts
        content: Any = "hi" if takes_text else [{"type": "text", "text": "hi"}]
        user = {"role": "user", "content": content}
        function = {"name": "spaceprobe", "description": "none", "parameters": {"type": "object", "properties": {}}}
        shown = self._tries([user], tools=[{"type": "function", "function": function}])

        def called(arguments: Any) -> str:
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
            assistant = {"role": "assistant", "content": "" if takes_text else [], "tool_calls": [call]}
            return self._tries([user, assistant, {"role": "tool", "content": content, "tool_call_id": "abcdefghi"}])

        arguments_as_text = "spaceprobe" not in called({"x": "spaceprobe"}) and "spaceprobe" in called(
            '{"spaceprobe":1}'
        )
        return Habits("spaceprobe" in shown, takes_text, takes_parts, arguments_as_text)

    def _tries(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            return self.of(tools).render(messages, tools=tools)
        except InvalidRequest:
            return ""


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with `_CUT` appended to the last one."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + _CUT}]
    *parts, end = content
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + _CUT}]}]


def _cut(text: str) -> str:
    """Return the text before the mark. Strips white space at its end if the template trims messages."""
    at = text.rfind(_CUT.rstrip())
    if at < 0:
        raise InvalidRequest(
            "The chat template does not show the last message as it is, so that it cannot be continued. Leave "
            "`continue_final_message` out.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


def find(folder: Path, choice: str | None, tokens: Mapping[str, str | None]) -> ChatTemplate | None:
    """Return the chosen template, else the checkpoint's own, else None. Raises ConfigError."""
    if choice is not None:
        if choice in BUILT_IN:
            return ChatTemplate(BUILT_IN[choice], tokens, name=choice)
        try:
            source = read_text(Path(choice).expanduser())
        except NotUtf8 as error:
            raise ConfigError(f"--chat-template={choice!r}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"--chat-template={choice!r}: neither one of {', '.join(BUILT_IN)} nor a readable file."
            ) from error
        return ChatTemplate(source, tokens, name=choice)
    found = _own(folder)
    default = found.get("default")
    if default is None:
        return None
    other = found.get("tool_use")
    return ChatTemplate(
        default.source,
        tokens,
        name=default.name,
        with_tools=None if other is None else ChatTemplate(other.source, tokens, name=other.name),
    )


@dataclass(frozen=True)
class _Source:
    """A template of the checkpoint and the file it is from."""

    source: str
    name: str


def _own(folder: Path) -> dict[str, _Source]:
    """Return the checkpoint's templates by name, found as transformers does.

    chat_template.jinja replaces those of tokenizer_config.json; additional template files add to them;
    chat_template.json (multimodal models) is used if there are no others.
    """
    config = "chat_template of tokenizer_config.json"
    found = _parts(read_json(folder, "tokenizer_config.json").get("chat_template"), config)
    file = folder / "chat_template.jinja"
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if file.is_file():
        found = {"default": _Source(_text(file), str(file))}
    found |= {other.stem: _Source(_text(other), str(other)) for other in others}
    if not found:
        processor = "chat_template.json"
        found = _parts(read_json(folder, processor).get("chat_template"), processor)
    return found


def _parts(own: Any, name: str) -> dict[str, _Source]:
    """Parse a template entry: one template, or several by name as a list of objects or as one object."""
    if isinstance(own, str):
        return {"default": _Source(own, name)}
    if isinstance(own, list):
        own = {entry["name"]: entry["template"] for entry in own}
    return {key: _Source(template, f"{name} ({key})") for key, template in (own or {}).items()}


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except NotUtf8 as error:
        raise ConfigError(str(error)) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes for HTML, which models are not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
