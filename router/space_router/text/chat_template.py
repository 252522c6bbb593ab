"""Render messages into a prompt with the checkpoint's Jinja template or a built-in one, in a sandbox."""

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import Environment, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer
from space_common.files import NotUtf8, read_text

from space_router.errors import ConfigError, InvalidRequest
from space_router.text import written_numbers
from space_router.text.checkpoint import read_json

_VICUNA = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." -%}{%- set turns = messages -%}
{%- endif -%}
{{ bos_token or '' }}{{ system }}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{ ('' if loop.previtem is defined and loop.previtem.role == 'assistant' else ' ') + 'USER: ' + message.content }}
{%- elif message.role == 'assistant' -%}{{ ' ASSISTANT: ' + message.content + (eos_token or '') }}
{%- else -%}{{ raise_exception('The vicuna template knows system (first), user and assistant messages only.') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}
"""

_LLAMA_2 = """\
{%- if messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{ raise_exception('The llama-2 template wants user and assistant messages in turn, user first.') }}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ (bos_token or '') + '[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
{%- else -%}{{ ' ' + message.content | trim + ' ' + (eos_token or '') }}
{%- endif -%}
{%- endfor -%}
"""

_CHATML = """\
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if tools -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{{ '<|im_start|>system\\n' + system }}\
These functions can be called, each described by a JSON schema:
<tools>
{% for tool in tools -%}{{ (tool.function if tool.function is defined else tool) | tojson }}
{% endfor -%}
</tools>
To call one, write its name and its arguments as a JSON object between tags, and nothing behind it:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{{ ('' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user')
   + '\\n<tool_response>\\n' + message.content + '\\n</tool_response>'
   + ('' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n') }}
{%- elif message.tool_calls -%}
{{ '<|im_start|>assistant\\n' + message.content + ('\\n' if message.content else '') }}
{%- for call in message.tool_calls -%}
{{ ('' if loop.first else '\\n') + '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": '
   + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_ALPACA = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = 'Below is an instruction that describes a task. Write a response that appropriately completes the \
request.' -%}{%- set turns = messages -%}
{%- endif -%}
{{ (bos_token or '') + system }}
{%- for message in turns -%}
{%- if message.role == 'user' -%}{{ '\\n\\n### Instruction:\\n' + message.content }}
{%- elif message.role == 'assistant' -%}{{ '\\n\\n### Response:\\n' + message.content + (eos_token or '') }}
{%- else -%}{{ raise_exception('The alpaca template knows system (first), user and assistant messages only.') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n\\n### Response:\\n' }}{%- endif -%}
"""

BUILT_IN: Mapping[str, str] = {"vicuna": _VICUNA, "llama-2": _LLAMA_2, "chatml": _CHATML, "alpaca": _ALPACA}


MAX_STEPS = 500_000  # loop iterations and macro calls: 120 for each of 4096 messages
MAX_WRITTEN = 64 * 1024**2  # characters, counted each time they are written; far above any context window
MAX_OPERAND = 4 * 1024**2  # characters, entries or digits in the result of one operator
MAX_SECONDS = 10.0  # bounds loops that are not counted, such as those inside filters
STEP, WROTE = "_template_step", "_template_wrote"  # Names by which a metered template calls its budget

_LONG_FORMAT = re.compile(r"%[-#0 +]*(\*|\d{5,}|\d*\.\d{5,})")
_LONG_FIELD = re.compile(r"\{[^}]*:[^}]*(\d{5,}|\{)")
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson", "lipsum"}
"""Methods and filters with a result size given by an argument."""


class TemplateBudget:
    """The remaining budget of one rendering. Raises SecurityError when it is exhausted."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_WRITTEN
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, num_literal: int) -> None:
        """Count one execution of a body with `num_literal` characters of plain text."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it loops more than {MAX_STEPS} times.")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} seconds.")
        self._spend(num_literal)

    def wrote(self, value: Any) -> Any:
        """Count a value that is written, and return it."""
        self._spend(len(value) if isinstance(value, str) else 16)
        return value

    def _spend(self, num_characters: int) -> None:
        self._characters -= num_characters
        if self._characters < 0:
            raise SecurityError(f"it writes more than {MAX_WRITTEN} characters.")


class _Meter(NodeTransformer):
    """Inserts calls to the budget into a template."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            one if isinstance(one, nodes.TemplateData) else self._call(WROTE, one, one.lineno) for one in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call(WROTE, node, node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        num_literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        report = nodes.ExprStmt(self._call(STEP, nodes.Const(num_literal), node.lineno))
        node.body.insert(0, report.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _count

    def _call(self, name: str, argument: nodes.Expr, lineno: int) -> nodes.Call:
        call = nodes.Call(nodes.Name(name, "load"), [argument], [], None, None)
        call.set_lineno(lineno).set_environment(self._environment)
        return call


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise SecurityError if the result of an operation would be too large."""
    size = 0
    if operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            size = len(left) + len(right)
    elif operator == "%":
        size = MAX_WRITTEN if isinstance(left, str) and _LONG_FORMAT.search(left) else 0
    elif isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
    elif operator == "*":
        sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
        size = len(sized) * times if hasattr(sized, "__len__") and isinstance(times, int) else 0
    if size > MAX_OPERAND:
        raise SecurityError(f"`{operator}` would give something larger than {MAX_OPERAND} characters.")


def check_arguments(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise SecurityError if the result of a method or filter would be too large.

    `arguments`: the object or filtered value first.
    """
    given = [*arguments, *named.values()]
    size = 0
    if name in _PADDING:
        size = max((abs(one) for one in given if isinstance(one, int)), default=0)
        if name in ("indent", "expandtabs", "tojson") and given:
            size *= max(1, len(given[0]) if hasattr(given[0], "__len__") else 1)
    elif name == "replace":
        texts = [one for one in given if isinstance(one, str)]
        if len(texts) >= 3:
            size = len(texts[0]) + len(texts[2]) * (texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1)
    elif name == "join":
        glue = next((one for one in given if isinstance(one, str)), "")
        most = max((len(one) for one in given if isinstance(one, list | tuple)), default=0)
        size = len(glue) * most
    elif name in ("format", "format_map"):
        text = given[0] if given and isinstance(given[0], str) else ""
        size = MAX_WRITTEN if _LONG_FORMAT.search(text) or _LONG_FIELD.search(text) else 0
    if size > MAX_OPERAND:
        raise SecurityError(f"`{name}` would give something larger than {MAX_OPERAND} characters.")


def check_result(name: str, value: Any) -> Any:
    """Return the value. Raises SecurityError if it is too large."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > MAX_OPERAND:
        raise SecurityError(f"`{name}` gives something larger than {MAX_OPERAND} characters.")
    return value


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which templates look for reasoning, in order of preference."""

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
            _Meter(environment).visit(parsed)
            self._template = environment.from_string(parsed)
        except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            # Some errors, such as a `break` outside a loop, are found only by Python's compiler.
            raise ConfigError(f"{name} is no valid Jinja template: {str(error)[:300]}.") from error

    def of(self, tools: Sequence[object]) -> "ChatTemplate":
        """Return the template for a request with these tools."""
        return self if self.with_tools is None or not tools else self.with_tools

    def add_reasoning(self, message: dict[str, Any], text: str) -> None:
        """Add reasoning to an assistant's message in the form that the template shows; none if it shows no earlier
        reasoning.
        """
        name = next((name for name in REASONING_FIELDS if re.search(rf"\b{name}\b", self.source)), None)
        if "'thinking'" in self.source and "block" in self.source and name != "reasoning_content":
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message["content"] = [{"type": "thinking", "thinking": text}, *(part for part in parts if part.get("text"))]
        elif name is not None:
            message[name] = text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """Return the prompt, ending where the assistant's turn begins. Raises InvalidRequest with the template's error.

        `continue_final_message`: the prompt ends directly after the last message's text, which the model continues.
        `now`: the time of `strftime_now`; None: the present.
        """
        budget = TemplateBudget()
        values: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **(variables or {}),
            "messages": _marked(messages) if continue_final_message else list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": (now or present()).strftime,
            STEP: budget.step,
            WROTE: budget.wrote,
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
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RuntimeError,
            AssertionError,
            MemoryError,
        ) as error:
            message = f"The chat template does not take these messages: {str(error)[:300]}"
            raise InvalidRequest(message, param="messages") from error
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

        as_object, as_text = called({"x": "spaceprobe"}), called('{"spaceprobe":1}')
        arguments_as_text = "spaceprobe" not in as_object and "spaceprobe" in as_text
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
            known = ", ".join(BUILT_IN)
            raise ConfigError(f"--chat-template={choice!r}: neither one of {known} nor a readable file.") from error
        return ChatTemplate(source, tokens, name=choice)
    found = _own(folder)
    if "default" not in found:
        return None
    (source, name), other = found["default"], found.get("tool_use")
    return ChatTemplate(source, tokens, name, None if other is None else ChatTemplate(other[0], tokens, other[1]))


def _own(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the checkpoint's templates, and where each is from, by name, found as transformers does.

    chat_template.jinja replaces those of tokenizer_config.json; additional template files add to them;
    chat_template.json (multimodal models) is used if there are no others.
    """
    config = "chat_template of tokenizer_config.json"
    found = _parts(read_json(folder, "tokenizer_config.json").get("chat_template"), config)
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            found = {"default": (read_text(file), str(file))}
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[other.stem] = (read_text(other), str(other))
    except NotUtf8 as error:
        raise ConfigError(str(error)) from error
    return found or _parts(read_json(folder, "chat_template.json").get("chat_template"), "chat_template.json")


def _parts(own: Any, name: str) -> dict[str, tuple[str, str]]:
    """Parse a template entry: one template, or several by name as a list of objects or as one object."""
    if isinstance(own, str):
        return {"default": (own, name)}
    if isinstance(own, list):
        own = {entry["name"]: entry["template"] for entry in own}
    return {key: (template, f"{name} ({key})") for key, template in (own or {}).items()}


def present() -> datetime:
    """Return the time that `strftime_now` shows."""
    return datetime.now()


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
    return written_numbers.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
