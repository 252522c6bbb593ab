"""Render messages into a prompt with the checkpoint's Jinja template or a built-in one, in a process of its own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from space_common.files import NotUtf8, is_contained, read_text

from space_router.errors import ConfigError, InvalidRequest
from space_router.text.checkpoint import read_json
from space_router.text.template_messages import LIMITS, AnswerKind, TemplateJob, TemplateLimits
from space_router.text.template_process import PROCESSES, SLOW_MEMORY, NotStarted

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


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which templates look for reasoning, in order of preference."""

_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})  # variables passed to every template
_CUT = "\x02cut here\x03 "  # marks the end of a message to continue; control characters avoid clashes with text


@dataclass(frozen=True)
class Habits:
    """What a template accepts, found by rendering probe conversations."""

    takes_tools: bool  # it renders the tools
    takes_text: bool  # message content as a string
    takes_parts: bool  # message content as a list of parts
    arguments_as_text: bool  # call arguments as JSON text; else as an object, as in transformers


class ChatTemplate:
    """A compiled template with the special tokens that it may use.

    `with_tools`: the checkpoint's other template, for requests with tools. `name`: for errors, which clients see, so
    without a folder.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str | None],
        name: str = "chat template",
        with_tools: "ChatTemplate | None" = None,
        limits: TemplateLimits = LIMITS,
    ) -> None:
        self.name = name
        self.source = source
        self.with_tools = with_tools
        self._limits = limits
        self._tokens = {key: token for key, token in tokens.items() if token is not None}
        try:
            answer = PROCESSES.ask(TemplateJob(source), limits)
        except NotStarted as error:
            raise ConfigError("The process that renders chat templates cannot be started; the log says why.") from error
        if answer.kind is not AnswerKind.TEXT:
            reason = answer.text or self._reason(answer.kind, limits.compile_seconds)
            raise ConfigError(f"{name} is no valid Jinja template: {reason}.")
        self.variables = frozenset(answer.text.split()) - _GIVEN - self._tokens.keys()

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
        values: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **(variables or {}),
            "messages": _marked(messages) if continue_final_message else list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            answer = PROCESSES.ask(TemplateJob(self.source, values, now or present()), self._limits)
        except RecursionError as error:
            raise InvalidRequest("The messages are nested too deep for the chat template.", param="messages") from error
        if answer.kind is AnswerKind.TOO_LONG:
            raise InvalidRequest(answer.text, param="messages")
        if answer.kind is not AnswerKind.TEXT:
            reason = answer.text or self._reason(answer.kind, self._limits.seconds)
            raise InvalidRequest(f"The chat template does not take these messages: {reason}", param="messages")
        return _cut(answer.text) if continue_final_message else answer.text

    @staticmethod
    def _reason(kind: AnswerKind, seconds: float) -> str:
        """Return why there is no answer; "" for an error without words."""
        return {
            AnswerKind.NO_TIME: f"it takes longer than {seconds:g} seconds",
            AnswerKind.NO_MEMORY: f"it takes more than {SLOW_MEMORY >> 20} MiB of memory",
        }.get(kind, "")

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
        return ChatTemplate(source, tokens, name=Path(choice).name)
    found = _own(folder)
    if "default" not in found:
        return None
    (source, name), other = found["default"], found.get("tool_use")
    return ChatTemplate(source, tokens, name, None if other is None else ChatTemplate(other[0], tokens, other[1]))


def _own(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the checkpoint's templates, and where in the folder each is from, by name, found as transformers does.

    chat_template.jinja replaces those of tokenizer_config.json; additional template files add to them;
    chat_template.json (multimodal models) is used if there are no others.
    """
    config = "chat_template of tokenizer_config.json"
    found = _parts(read_json(folder, "tokenizer_config.json").get("chat_template"), config)
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            found = {"default": (_text_in(folder, file), file.name)}
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[other.stem] = (_text_in(folder, other), str(other.relative_to(folder)))
    except NotUtf8 as error:
        raise ConfigError(str(error)) from error
    return found or _parts(read_json(folder, "chat_template.json").get("chat_template"), "chat_template.json")


def _text_in(folder: Path, file: Path) -> str:
    """Return the text of a template; clients can read it. Raises ConfigError for a link out of the folder, NotUtf8."""
    if not is_contained(file, folder):
        raise ConfigError(f"{file} is a link to {file.resolve()}, outside its folder. Copy the file to {file.parent}.")
    return read_text(file)


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
