"""Messages to one prompt, by the checkpoint's Jinja template or one of ours, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from space_router.errors import ConfigError, InvalidRequest
from space_router.text.checkpoint import read_json

_MAX_PROMPT = 16 * 1024**2  # characters a template may produce: far above any window, below harm

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
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
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


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str | None], *, name: str = "chat template") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._tokens = {key: token for key, token in tokens.items() if token is not None}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name} is no valid Jinja template: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ending where the assistant is to speak. Raises InvalidRequest with the template's own words."""
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(messages=list(messages), add_generation_prompt=True, **self._tokens):
                pieces.append(piece)
                length += len(piece)
                if length > _MAX_PROMPT:
                    raise InvalidRequest(f"The messages give more than {_MAX_PROMPT} characters.", param="messages")
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"The chat template does not take these messages: {str(error)[:300]}", param="messages"
            ) from error
        return "".join(pieces)


def find(folder: Path, choice: str | None, tokens: Mapping[str, str | None]) -> ChatTemplate | None:
    """The template asked for, else the checkpoint's own, else None. Raises ConfigError."""
    if choice is not None:
        if choice in BUILT_IN:
            return ChatTemplate(BUILT_IN[choice], tokens, name=choice)
        try:
            source = Path(choice).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--chat-template={choice!r}: neither one of {', '.join(BUILT_IN)} nor a readable file."
            ) from error
        return ChatTemplate(source, tokens, name=choice)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), tokens, name=str(file))
    own = read_json(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(own, list):  # several by name: [{"name": "default", "template": ...}]
        own = {entry["name"]: entry["template"] for entry in own}.get("default")
    return None if own is None else ChatTemplate(own, tokens, name="chat_template of tokenizer_config.json")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
